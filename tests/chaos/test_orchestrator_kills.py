"""`kill -9` of the orchestrator at every call that writes and at random moments: those that go on lose no prompt,
train no rollout twice, and account for every one that was issued."""

import asyncio
import multiprocessing
import os
import random
import signal
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from grpo.configs.orch import OrchSettings
from grpo.orchestrator.buffer import Buffer
from grpo.orchestrator.run import orchestrate

from tests.chaos.kill_points import DISK_CALLS, kill_at
from tests.orchestrator.fakes import FakeServer, FakeTrainer, settings_for
from tests.orchestrator.words import Words
from tests.support import END_S

pytestmark = pytest.mark.chaos

GROUPS_PER_BATCH = 4
NUM_RANDOM_KILLS = int(os.environ.get("TEST_KILLS", "5"))
CALLS = [call for call in DISK_CALLS if call not in ("unlink", "rmdir", "fsync")]
CALLS.append("fsync")  # of files that are made at the end of a run


@contextmanager
def serving(latency_s: float) -> Iterator[FakeServer]:
    """A server that outlives orchestrators, in a thread of its own."""
    server = FakeServer(lambda prompt, version: random.choice("ab"))
    loop, up = asyncio.new_event_loop(), threading.Event()
    server.latency_s = latency_s

    async def serve() -> None:
        await server.start()
        up.set()

    def work() -> None:
        loop.run_until_complete(serve())
        loop.run_forever()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert up.wait(60)
    yield server
    asyncio.run_coroutine_threadsafe(server.stop(), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(60)
    loop.close()


def work(settings: dict[str, Any], at: tuple[str, int] | None) -> None:
    """One orchestrator, which dies at a call of `os` for the n-th time."""
    if at is not None:
        kill_at(*at)
    asyncio.run(orchestrate(OrchSettings.model_validate(settings)))


@pytest.fixture(scope="module")
def context() -> ForkServerContext:
    """Makes processes that have this module imported already. Python has one fork server for the whole session, which
    takes no more modules once it runs: what the trainer's kills need is among them, or each process imports torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "tests.chaos.training", "tests.trainer.forked", "tests.trainer.models"])
    return context


class Run:
    """A run whose server and trainer live on while its orchestrators die."""

    def __init__(
        self, context: ForkServerContext, folder: Path, server: FakeServer, *, num_steps: int, step_s: float
    ) -> None:
        self.num_steps = num_steps
        self._context, self.folder, self._server = context, folder, server
        self.trainer = FakeTrainer(folder, step_s=step_s, idle_s=10 * END_S)
        self.trainer.start()

    def settings(self) -> OrchSettings:
        """Of the next orchestrator."""
        changes: dict[str, Any] = {"max_steps": self.num_steps, "max_async_level": 1, "max_off_policy_steps": 1}
        changes |= {"eval": {"num_examples": 0}, "wait_timeout_s": END_S}
        return settings_for(self.folder, self._server, **changes)

    def start(self, at: tuple[str, int] | None = None) -> BaseProcess:
        """An orchestrator that goes on with the run."""
        settings = self.settings().model_dump(mode="json", exclude_unset=True)
        process = self._context.Process(target=work, args=(settings, at))
        process.start()
        return process

    def finish(self) -> None:
        """Nobody interrupts the last one."""
        process = self.start()
        process.join(END_S)
        assert process.exitcode == 0
        self.trainer.join(END_S)
        assert self.trainer.ended_after == self.num_steps

    def check(self) -> None:
        """Nothing was lost, nothing was trained twice, and the ledger says so."""
        with sqlite3.connect(self.folder / "ledger.sqlite") as database:
            rows = database.execute("SELECT id, group_id, example, state, reason, step FROM rollouts").fetchall()
        assert {row[3] for row in rows} <= {"trained", "dropped"}
        assert {row[4] for row in rows if row[3] == "dropped"} <= {"restarted"}
        in_ledger = Counter((row[5], row[0]) for row in rows if row[3] == "trained")
        received = {step: [i for batch in batches for i in batch.rollout_ids] for step, batches in self.batches}
        assert Counter((step, name) for step, names in received.items() for name in names) == in_ledger
        assert len({name for _, name in in_ledger}) == sum(in_ledger.values()) == self.num_steps * GROUPS_PER_BATCH * 4
        trained = {row[1]: row[2] for row in rows if row[3] == "trained"}
        # Not in their order: a group that a later one had overtaken when a batch left is asked again after it.
        assert Counter(trained.values()) == Counter(self.examples())

    @property
    def batches(self) -> list[tuple[int, Any]]:
        """What the trainer has received, in order."""
        assert sorted(self.trainer.batches) == list(range(1, self.num_steps + 1))
        return sorted(self.trainer.batches.items())

    def examples(self) -> list[int]:
        """Those that a run which nobody interrupts trains."""
        settings = self.settings()
        keys = [str(index) for index in range(len(Words().dataset("train")))]
        buffer = Buffer({"words": keys}, seed=settings.seed)
        return [buffer.issue(group)[1] for group in range(self.num_steps * GROUPS_PER_BATCH)]


def test_kills_at_every_call_of_a_shipment(context: ForkServerContext, tmp_path: Path) -> None:
    with serving(latency_s=0.0) as server:
        run = Run(context, tmp_path / "run", server, num_steps=24, step_s=0.0)
        for number, call in enumerate(CALLS):
            process = run.start((call, 1 + number % 3))
            process.join(END_S)
            assert process.exitcode == -signal.SIGKILL, f"it was to die at {call}"
        run.finish()
        run.check()


def test_kills_at_random_moments(context: ForkServerContext, tmp_path: Path) -> None:
    draw = random.Random(7)
    with serving(latency_s=0.02) as server:
        run = Run(context, tmp_path / "run", server, num_steps=3 * NUM_RANDOM_KILLS, step_s=0.05)
        for _ in range(NUM_RANDOM_KILLS):
            process, goal = run.start(), min(len(run.trainer.batches) + draw.randint(0, 2), run.num_steps)
            while len(run.trainer.batches) < goal:
                process.join(0.01)
                assert process.exitcode in (None, 0)  # the run may be over before the last kills
            process.join(draw.uniform(0.0, 0.5))
            process.kill()
            process.join(END_S)
        run.finish()
        run.check()

"""Whole runs with a teacher on a server of its own, and everything that it may do instead of teaching: none of it ends
the run or reaches a batch, all of it is said and counted."""

import asyncio
import json
import random
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from aiohttp import web

from orchestrator.run import orchestrate
from tests.orchestrator.fakes import MODEL, FakeServer, FakeTrainer, settings_for, until
from tests.orchestrator.teacher.serving import FakeTeacher, Fault, answering, cut, hang, hang_up, in_turn
from transport.records import MicroBatch

NUM_STEPS, BATCH_SIZE, GROUP_SIZE = 3, 16, 4


def some_letters(prompt: str, version: int) -> str:
    """Of all lengths, so that most rows are asked about."""
    return "".join(random.choices("abcdefghij", k=random.randint(1, 6)))


@pytest_asyncio.fixture
async def server() -> AsyncIterator[FakeServer]:
    server = await FakeServer(some_letters).start()
    yield server
    await server.stop()


@pytest_asyncio.fixture
async def teacher() -> AsyncIterator[FakeTeacher]:
    teacher = await FakeTeacher(ours=True, info={"max_model_len": 512}).start()
    yield teacher
    await teacher.stop()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A run that has shipped all of its batches."""

    steps: list[dict[str, float]]
    """Their metrics."""
    dropped: Counter[str]
    """Rollouts by reason, as the ledger has them."""
    num_trained: int

    def total(self, metric: str) -> float:
        return sum(step.get(metric, 0.0) for step in self.steps)


async def finished(folder: Path, server: FakeServer, *teachers: FakeTeacher, **client: Any) -> Finished:
    """Ships NUM_STEPS batches, each of which is looked at: it has all of its groups, and every loss token has the
    log-probability that the teacher gives it."""
    trainer = FakeTrainer(folder, settings={"loss": {"adv_tau": 0.0, "teacher_tau": 1.0}}, step_s=0.02)
    trainer.start()
    client = {"base_url": [one.url for one in teachers], "timeout": 5.0, "retries": 0} | client
    chosen = {"model": {"name": str(MODEL)}, "client": client}
    async with asyncio.timeout(60):
        await orchestrate(settings_for(folder, server, eval={"num_examples": 0}, teacher_model=chosen))
    assert sorted(trainer.batches) == [*range(1, NUM_STEPS + 1)]
    num_trained = sum(check_batch(batches) for batches in trainer.batches.values())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    with sqlite3.connect(folder / "ledger.sqlite") as ledger:
        rollouts = ledger.execute("SELECT state, reason FROM rollouts").fetchall()
    dropped = Counter(reason for state, reason in rollouts if state == "dropped" and reason != "run_ended")
    assert Counter(state for state, _ in rollouts)["trained"] == num_trained
    steps = [line for line in lines if "loss/policy" in line]
    return Finished(steps=steps, dropped=dropped, num_trained=num_trained)


def reasons_of(folder: Path) -> set[str]:
    with sqlite3.connect(folder / "ledger.sqlite") as ledger:
        return {reason for (reason,) in ledger.execute("SELECT DISTINCT reason FROM rollouts")}


def check_batch(batches: tuple[MicroBatch, ...]) -> int:
    """How many rollouts it has: of each group those that the teacher has scored."""
    ids = [rollout_id for batch in batches for rollout_id in batch.rollout_ids]
    assert len(ids) == len(set(ids))
    assert len({rollout_id.partition("/")[0] for rollout_id in ids}) == BATCH_SIZE // GROUP_SIZE
    for batch in batches:
        assert batch.teacher_logprobs is not None
        expected = np.where(batch.loss_mask, -batch.token_ids / 100, 0).astype(np.float32)
        np.testing.assert_allclose(batch.teacher_logprobs, expected, rtol=1e-6)
    return len(ids)


def check_counts(run: Finished, reason: str) -> None:
    """What failed is counted in the metrics; the ledger has it too, with what failed after the last batch."""
    failed = run.total(f"teacher/failed_{reason}")
    assert failed > 0
    assert run.total("teacher/failed") == failed
    assert set(run.dropped) <= {f"teacher_{reason}", "all_withheld"}
    assert run.dropped[f"teacher_{reason}"] >= run.total(f"rollout/dropped_teacher_{reason}") >= failed


async def test_a_teacher_that_answers_costs_no_rollout(
    tmp_path: Path, server: FakeServer, teacher: FakeTeacher
) -> None:
    run = await finished(tmp_path, server, teacher)
    assert run.dropped == Counter()
    assert run.num_trained == NUM_STEPS * BATCH_SIZE
    assert run.total("teacher/failed") == run.total("teacher/retries") == 0
    assert run.total("teacher/rows") >= NUM_STEPS * BATCH_SIZE
    assert run.total("teacher/requests") <= len(teacher.asked)


async def minus_infinity(request: web.Request) -> web.StreamResponse:
    """As OpenAI's routes write it."""
    body = json.loads(await request.read())
    logprobs = [-0.5] * (len(body["token_ids"]) - 2) + [-9999.0]
    return web.json_response({"version": None, "logprobs": logprobs})


async def one_too_few(request: web.Request) -> web.StreamResponse:
    body = json.loads(await request.read())
    return web.json_response({"version": None, "logprobs": [-0.5] * (len(body["token_ids"]) - 2)})


FAULTS: list[tuple[Fault, str]] = [
    (hang, "slow"),
    (answering(500, text="out of memory"), "error"),
    (minus_infinity, "not_finite"),
    (one_too_few, "other_tokens"),
]


@pytest.mark.parametrize(("fault", "reason"), FAULTS)
async def test_what_it_does_instead_of_answering_costs_these_rollouts_and_has_its_reason(
    tmp_path: Path,
    server: FakeServer,
    teacher: FakeTeacher,
    fault: Fault,
    reason: str,
) -> None:
    teacher.fault = in_turn(None, *[fault] * 7)  # the first request is that of start-up
    run = await finished(tmp_path, server, teacher, try_timeout_s=0.1 if fault is hang else 5.0)
    check_counts(run, reason)


async def test_what_passes_is_tried_again_and_costs_nothing(
    tmp_path: Path, server: FakeServer, teacher: FakeTeacher
) -> None:
    teacher.fault = in_turn(None, None, cut, hang_up, answering(503), answering(500))
    run = await finished(tmp_path, server, teacher, retries=4)
    assert run.dropped == Counter()
    assert run.total("teacher/retries") == 4


async def test_a_teacher_that_is_down_and_comes_back_in_time_costs_nothing(
    tmp_path: Path, server: FakeServer, teacher: FakeTeacher
) -> None:
    async with asyncio.TaskGroup() as group:
        running = group.create_task(finished(tmp_path, server, teacher))
        await until(lambda: len(teacher.asked) > 4)
        await teacher.stop()
        await asyncio.sleep(0.3)
        await teacher.start()
    run = running.result()
    assert set(run.dropped) <= {"teacher_cut_off"}  # what it was computing when it went
    assert run.total("teacher/retries") > 0


async def test_a_teacher_that_is_down_for_longer_costs_what_was_sampled_meanwhile_and_not_the_run(
    tmp_path: Path, server: FakeServer, teacher: FakeTeacher
) -> None:
    async with asyncio.TaskGroup() as group:
        running = group.create_task(finished(tmp_path, server, teacher, timeout=0.3))
        await until(lambda: len(teacher.asked) > 4)
        await teacher.stop()
        await until(lambda: "teacher_down" in reasons_of(tmp_path))
        await teacher.start()
    run = running.result()
    assert run.total("teacher/failed_down") > 0
    assert run.dropped["teacher_down"] > 0


async def test_what_would_be_too_long_for_it_is_not_sampled(tmp_path: Path, server: FakeServer) -> None:
    """Prompts have 31 to 36 tokens, answers may have 16 more."""
    teacher = await FakeTeacher(ours=True, info={"max_model_len": 51}).start()
    try:
        run = await finished(tmp_path, server, teacher)
    finally:
        await teacher.stop()
    assert run.total("teacher/failed") == 0
    assert set(run.dropped) == {"prompt_too_long"}
    assert max(len(request["prompt_token_ids"]) for request in server.requests) == 34

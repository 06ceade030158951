"""The whole orchestrator against a server and a trainer that are stand-ins."""

import asyncio
import json
import random
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from configs.errors import SettingsError
from configs.train import TrainSettings
from orchestrator.checks import Mismatch
from orchestrator.inference.client import ServerError
from orchestrator.run import orchestrate
from orchestrator.workers.failures import EnvironmentFailed
from tests.orchestrator.fakes import FakeServer, FakeTrainer, settings_for
from transport.batches.filesystem import BatchReceiver, FilesystemBatchReceiver
from transport.errors import DeadlineError
from transport.run import create_run, join_run, only_one
from transport.status import read_status
from transport.weights.store import METRICS_FILE, PolicyPublisher


def improving(prompt: str, version: int) -> str:
    """Right more often with every version."""
    word = prompt.partition("Reverse: ")[2].partition("\n")[0]
    return word[::-1] if random.random() < version / 3 else "x"


@pytest_asyncio.fixture
async def server() -> AsyncIterator[FakeServer]:
    server = await FakeServer(improving).start()
    yield server
    await server.stop()


@pytest.mark.parametrize("level", [0, 1])
async def test_every_batch_is_shipped_once_and_its_lag_stays_within_the_bound(
    tmp_path: Path, server: FakeServer, level: int
) -> None:
    trainer = FakeTrainer(tmp_path, step_s=0.05)
    trainer.start()
    settings = settings_for(tmp_path, server, max_async_level=level, max_off_policy_steps=level, max_steps=5)

    summary = await orchestrate(settings)

    trainer.join(5)
    assert trainer.ended_after == 5
    assert sorted(trainer.batches) == [1, 2, 3, 4, 5]
    ids = [i for batches in trainer.batches.values() for batch in batches for i in batch.rollout_ids]
    assert len(ids) == len(set(ids)) == 5 * 16
    for step, batches in trainer.batches.items():
        for batch in batches:
            lags = step - 1 - batch.policy_versions
            assert lags.min() >= 0
            assert lags.max() <= level
    assert summary.rollouts_issued == summary.rollouts_trained == 80
    assert summary.rollouts_dropped == {}
    assert summary.versions_served == (0, 1, 2, 3, 4, 5)
    assert server.live == {5}


async def test_every_rollout_is_in_the_ledger_before_a_server_is_asked_for_it(
    tmp_path: Path, server: FakeServer
) -> None:
    num_asked = 0

    def answer(prompt: str, version: int) -> str:
        nonlocal num_asked
        num_asked += 1
        with sqlite3.connect(tmp_path / "ledger.sqlite") as database:
            assert database.execute("SELECT COUNT(*) FROM rollouts").fetchone()[0] >= num_asked
        return "x"

    server.answer = answer
    trainer = FakeTrainer(tmp_path)
    trainer.start()
    summary = await orchestrate(settings_for(tmp_path, server, eval={"num_examples": 0}))
    assert summary.rollouts_issued == num_asked
    trainer.join(5)


class GoesBack(FakeTrainer):
    """Publishes version 1 twice, the second time with other bytes, and version 2 once servers have loaded that, unless
    they sleep."""

    server: FakeServer
    sleeps: bool

    def _train(self, publisher: PolicyPublisher, receiver: BatchReceiver) -> None:
        def publish(version: int, canary: bytes) -> None:
            files = {"canary.json": canary, METRICS_FILE: b'{"loss/policy": 0.5}'}
            publisher.publish(version=version, spec=self.spec, files=files)

        receiver.receive(1, timeout_s=60)
        publish(1, b"{}")
        receiver.receive(2, timeout_s=60)
        publish(1, b'{"another": 1}')
        deadline = time.monotonic() + 20
        while not self.sleeps and len(self.server.loads) < 3 and time.monotonic() < deadline:
            time.sleep(0.02)
        publish(2, b"{}")
        assert receiver.receive(3, timeout_s=60) is None


@pytest.mark.parametrize("kind", ["adapter", "merged", "sleep"])
async def test_a_version_that_is_published_again_with_other_bytes_is_loaded_again(
    tmp_path: Path, server: FakeServer, kind: str
) -> None:
    server.info |= {"kinds": ["adapter", "merged"], "asleep": False if kind == "sleep" else None}
    form: Any = "merged" if kind == "merged" else "adapter"
    broadcast = {"weight_broadcast": {"format": form}}
    changed = {"sleep_mode": True} if kind == "sleep" else broadcast
    trainer = GoesBack(tmp_path, kind=form, settings=changed)
    trainer.server, trainer.sleeps = server, kind == "sleep"
    trainer.start()
    more = broadcast if kind == "merged" else {"sleep_mode": True, "max_async_level": 0} if kind == "sleep" else {}
    await orchestrate(settings_for(tmp_path, server, max_steps=2, **more))
    trainer.join(5)
    assert [load["version"] for load in server.loads] == [0, 1, 1, 2]


async def test_what_is_trained_is_what_the_server_sampled(tmp_path: Path, server: FakeServer) -> None:
    server.answer = lambda prompt, version: "abc"
    trainer = FakeTrainer(tmp_path, settings={"sequence_len": 256}, sequence_len=256)
    trainer.start()

    await orchestrate(settings_for(tmp_path, server, max_steps=1, batch_size=4, seq_len=256))

    [batch] = trainer.batches[1]
    [request] = [r for r in server.requests if r["n"] == 4]
    expected = [*request["prompt_token_ids"], *b"abc", 258]
    length = len(expected)
    assert batch.token_ids.tolist() == expected * 4
    assert batch.sequence_lengths.tolist() == [length] * 4
    assert batch.loss_mask.tolist() == ([False] * (length - 4) + [True] * 4) * 4
    assert batch.inference_logprobs.tolist() == ([0.0] * (length - 4) + [-0.5] * 4) * 4


async def test_each_of_the_trainers_ranks_gets_its_own_micro_batches(tmp_path: Path, server: FakeServer) -> None:
    trainer = FakeTrainer(tmp_path, settings={"gpus": 2})
    trainer.start()

    await orchestrate(settings_for(tmp_path, server, max_steps=1))

    run = trainer.run_folder
    with FilesystemBatchReceiver(run.batches, run_id=run.run_id, rank=1, num_ranks=2) as receiver:
        second = receiver.receive(1, timeout_s=5)
    assert second is not None
    ranks = (trainer.batches[1], second)
    assert [{batch.rank for batch in batches} for batches in ranks] == [{0}, {1}]
    assert len(ranks[0]) == len(ranks[1])
    every = [batch for batches in ranks for batch in batches]
    ids = [i for batch in every for i in batch.rollout_ids if i]
    assert len(ids) == len(set(ids)) == 16


async def test_summary_metrics_ledger_and_picture_tell_the_same_story(tmp_path: Path, server: FakeServer) -> None:
    trainer = FakeTrainer(tmp_path)
    trainer.start()

    summary = await orchestrate(settings_for(tmp_path, server))

    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss/policy" in line]
    assert [line["progress/step"] for line in steps] == [1, 2, 3]
    assert all(line["policy/lag_max"] == 0 for line in steps)
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["accuracy_before"] == summary.accuracy_before == 0
    assert written["accuracy_after"] == 1
    assert written["mismatch_max_lag0"] == 3e-6
    assert written["canary_max_abs"] == 2e-6
    assert written["seconds"]["train"] == 0.75
    rows = sqlite3.connect(tmp_path / "ledger.sqlite").execute("SELECT state, step FROM rollouts").fetchall()
    assert Counter(rows) == {("trained", 1): 16, ("trained", 2): 16, ("trained", 3): 16}


async def test_rollouts_are_sampled_with_the_versions_noise_and_evaluation_without(
    tmp_path: Path, server: FakeServer
) -> None:
    FakeTrainer(tmp_path).start()

    await orchestrate(settings_for(tmp_path, server, max_steps=2, eval={"interval": 1}))

    assert Counter((request["temperature"] == 0, request["noisy"]) for request in server.requests) == {
        (False, True): 8,  # two batches of four groups
        (True, False): 15,
    }


async def test_a_trainer_that_vanishes_is_named(tmp_path: Path, server: FakeServer) -> None:
    FakeTrainer(tmp_path, vanish_after=1).start()

    with pytest.raises(DeadlineError, match="version 2"):
        await orchestrate(settings_for(tmp_path, server, wait_timeout_s=6))
    # The ledger still tells every rollout's fate.
    rows = sqlite3.connect(tmp_path / "ledger.sqlite").execute("SELECT state, step FROM rollouts").fetchall()
    assert Counter(rows) == {("trained", 1): 16, ("shipped", 2): 16}


async def test_the_trainers_time_runs_from_the_version_before_however_many_batches_were_shipped_at_once(
    tmp_path: Path, server: FakeServer
) -> None:
    FakeTrainer(tmp_path, step_s=1.0).start()
    # Batches 1 to 4 ship at once: version 4 comes 4 s later, and no version later than 1 s after the one before.
    pace = {"max_async_level": 3, "max_off_policy_steps": 3, "max_steps": 5}

    summary = await orchestrate(settings_for(tmp_path, server, **pace, wait_timeout_s=3.5))

    assert summary.steps == 5
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    waits_s = [line["time/wait_trainer_s"] for line in lines if "time/wait_trainer_s" in line]
    assert len(waits_s) == 5
    assert max(waits_s) < 3.5


LONG_WORDS = {"id": "reverse-text", "args": {"num_train": 20, "num_eval": 5, "min_len": 40, "max_len": 50}}


async def test_a_trainer_with_other_settings_is_an_error_with_both_values_before_it_has_loaded_its_model(
    tmp_path: Path, server: FakeServer
) -> None:
    run, theirs = create_run(tmp_path), {"model": "m", "sequence_len": 128, "lora_rank": 8}
    settings = TrainSettings.model_validate(theirs).model_dump(mode="json")

    async def join_later() -> None:
        await asyncio.sleep(0.3)
        join_run(tmp_path, role="train", settings=settings, run_id=run.run_id, timeout_s=1)

    with only_one(tmp_path, "train"), pytest.raises(SettingsError, match="lora_rank = 16"):
        await asyncio.gather(orchestrate(settings_for(tmp_path, server)), join_later())


@pytest.mark.parametrize(
    ("info", "trainer", "changes", "error", "message"),
    [
        ({}, None, {"wait_timeout_s": 0.5}, DeadlineError, "grpo-train"),
        ({}, {"base_model": "another"}, {}, Mismatch, r"model\.name"),
        ({"base_model": "other"}, {}, {}, Mismatch, "other"),
        ({"max_lora_rank": 8}, {}, {}, Mismatch, "max_lora_rank"),
        ({"max_model_len": 20}, {}, {}, Mismatch, "max_model_len"),
        ({"refuses": 2}, {}, {}, ServerError, "409"),
        ({"away": True}, {}, {}, ServerError, r"client\.timeout"),
        ({}, {}, {"sampling": {"max_tokens": 120}, "eval": {"num_examples": 0}}, ValueError, "50"),
        ({}, {}, {"eval": {"env": [LONG_WORDS]}, "sampling": {"max_tokens": 80}}, ValueError, "eval:reverse-text"),
    ],
)
async def test_what_does_not_fit_or_never_comes_is_an_error_that_names_it(
    tmp_path: Path,
    info: dict[str, Any],
    trainer: dict[str, Any] | None,
    changes: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    refuses, away = info.pop("refuses", None), info.pop("away", False)
    server = await FakeServer(**info).start()
    server.refuse_version = refuses
    if away:
        await server.stop()
    if trainer is None:
        create_run(tmp_path)
    else:
        FakeTrainer(tmp_path, **trainer).start()
    base = {"eval": {"sampling": {"max_tokens": 30}}, "client": {"base_url": [server.url], "timeout": 2}}
    with pytest.raises(error, match=message):
        await orchestrate(settings_for(tmp_path, server, **(base | changes)))
    if not away:
        await server.stop()


ENVIRONMENT = """
import os, time
from grpo import Environment, Rubric

def broken(completion, example):
    {body}

class Broken(Environment):
    rubric = Rubric([broken])
    def dataset(self, split):
        return [{{"prompt": f"say {{i}}", "split": split, "index": i}} for i in range(20)]
"""


def environment(folder: Path, body: str) -> list[dict[str, str]]:
    path = folder / "broken.py"
    path.write_text(ENVIRONMENT.format(body=body))
    return [{"id": f"{path}:Broken"}]


async def test_rollouts_whose_reward_raises_are_dropped_and_the_run_goes_on(tmp_path: Path, server: FakeServer) -> None:
    server.answer = lambda prompt, version: random.choice("aaab")
    trainer = FakeTrainer(tmp_path)
    trainer.start()
    env = environment(tmp_path, "return 1 / (completion == 'a')")

    summary = await orchestrate(settings_for(tmp_path, server, env=env, max_env_failure_rate=0.9))

    assert summary.rollouts_dropped["env_error"] > 0
    dropped = sum(summary.rollouts_dropped.values())
    assert summary.rollouts_issued == summary.rollouts_trained + dropped
    trained = sum(len(batch.rollout_ids) for batches in trainer.batches.values() for batch in batches)
    assert trained == summary.rollouts_trained


DELAYED = """
import asyncio
from pathlib import Path
from grpo import Environment, Rubric

FOLDER = Path(__file__).parent

async def later(completion, example, ctx):
    if example["number"] not in (0, 1):
        await asyncio.sleep(0.05)
        return float(completion == "a")
    async with ctx.delayed(timeout_s=3 if example["number"] else 60):
        (FOLDER / "waits").touch()
        while not (FOLDER / "go").exists():
            await asyncio.sleep(0.01)
    return 1.0

class Delayed(Environment):
    rubric = Rubric([later])

    def dataset(self, split):
        return [{"prompt": f"number {number}", "number": number} for number in range(8)]
"""


async def test_a_reward_may_come_later_while_other_groups_take_the_slots(tmp_path: Path, server: FakeServer) -> None:
    (tmp_path / "late.py").write_text(DELAYED)
    server.answer = lambda prompt, version: random.choice("ab")
    FakeTrainer(tmp_path / "run").start()

    async def go() -> None:
        metrics = tmp_path / "run/metrics.jsonl"
        while not (metrics.exists() and (tmp_path / "waits").exists() and len(metrics.read_text().splitlines()) > 12):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await asyncio.sleep(3.5)  # past the deadline of one of the two
        (tmp_path / "go").touch()

    opening = asyncio.create_task(go())
    env = [{"id": f"{tmp_path / 'late.py'}:Delayed"}]
    given = {"env": env, "max_steps": 200, "batch_size": 4, "max_async_level": 1, "max_off_policy_steps": 199}
    given |= {"reward_timeout_s": 2, "max_env_failure_rate": 1.0, "eval": {"num_examples": 0}}
    settings = settings_for(tmp_path / "run", server, **given)
    summary = await orchestrate(settings)
    await opening
    assert summary.rollouts_dropped["env_timeout"] >= 4
    assert summary.rollouts_trained == 800
    with closing(sqlite3.connect(tmp_path / "run/ledger.sqlite")) as ledger:
        query = "SELECT min(step), min(version) FROM rollouts WHERE example = 0 AND state = 'trained'"
        [(step, version)] = ledger.execute(query).fetchall()
    assert step - version > 10  # it waited while others were trained


# --- environments that fail ---


async def states_of(folder: Path, seen: set[tuple[str, str | None]]) -> None:
    """Gathers what the orchestrator says about itself until it is cancelled."""
    while True:
        if status := read_status(folder / "status" / "orch.json"):
            seen.add((status["state"], status["waiting_for"]))
        await asyncio.sleep(0.02)


async def test_a_reward_that_hangs_stops_the_run_with_its_name_long_before_the_trainer_has_waited(
    tmp_path: Path, server: FakeServer
) -> None:
    FakeTrainer(tmp_path).start()
    env = environment(tmp_path, "time.sleep(1000)")
    limits = {
        "reward_timeout_s": 2,
        "wait_timeout_s": 16,
        "max_env_failure_rate": 1.0,
        "eval": {"eval_base_model": False},
    }
    seen: set[tuple[str, str | None]] = set()
    watch = asyncio.create_task(states_of(tmp_path, seen))

    with pytest.raises(EnvironmentFailed, match=r"broken\.py"):
        await orchestrate(settings_for(tmp_path, server, env=env, **limits))
    watch.cancel()
    assert ("scoring", f"environment {env[0]['id']}") in seen


ALWAYS = "return 1.0 if example['split'] == 'train' or example['index'] in {} else 1 / 0"


@pytest.mark.parametrize(
    ("body", "step_s", "changes", "message"),
    [
        ("raise RuntimeError('the moon is full')", 0, {}, r"broken\.py"),
        (ALWAYS.format("()"), 0, {"eval": {"num_examples": 5}}, "ZeroDivisionError"),
        # Before version 1, 18 of 20 evaluations fail and 16 rollouts do not: 5 of some 16 in a row do.
        (ALWAYS.format("(1, 2)"), 2, {"max_env_failure_rate": 0.25}, "ZeroDivisionError"),
    ],
    ids=["always", "a whole evaluation", "as they come"],
)
async def test_an_environment_that_fails_too_often_stops_the_run_with_its_traceback(
    tmp_path: Path, server: FakeServer, body: str, step_s: float, changes: dict[str, Any], message: str
) -> None:
    FakeTrainer(tmp_path, step_s=step_s).start()
    with pytest.raises(EnvironmentFailed, match=message):
        await orchestrate(settings_for(tmp_path, server, env=environment(tmp_path, body), **changes))


# --- evaluation ---


async def test_without_examples_there_is_no_evaluation_and_its_split_is_not_loaded(
    tmp_path: Path, server: FakeServer
) -> None:
    FakeTrainer(tmp_path).start()
    env = environment(tmp_path, "return float(len(completion))")
    path = tmp_path / "broken.py"
    path.write_text(path.read_text().replace("return [", "assert split == 'train'; return ["))

    summary = await orchestrate(settings_for(tmp_path, server, env=env, max_steps=1, eval={"num_examples": 0}))

    assert (summary.accuracy_before, summary.accuracy_after, summary.accuracies) == (None, None, {})
    assert not [request for request in server.requests if request["temperature"] == 0]


# --- status ---


async def test_a_run_survives_a_server_that_fails_and_is_away_for_a_while_for_which_the_status_says_it_waits(
    tmp_path: Path, server: FakeServer
) -> None:
    server.latency_s, server.num_failures = 0.2, 5
    FakeTrainer(tmp_path).start()
    seen: set[tuple[str, str | None]] = set()
    watch = asyncio.create_task(states_of(tmp_path, seen))
    run = asyncio.create_task(orchestrate(settings_for(tmp_path, server, eval={"num_examples": 0})))
    async with asyncio.timeout(60):
        while not server.requests:  # noqa: ASYNC110 - the server rings no bell
            await asyncio.sleep(0.01)
        await server.stop()
        while ("waiting", f"inference servers: {server.url.removesuffix('/v1')}") not in seen:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await server.start()
    assert (await run).rollouts_trained == 48
    watch.cancel()

"""The whole orchestrator against a server and a trainer that are stand-ins."""

import json
import random
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from orchestrator.client import ServerError
from orchestrator.loop import orchestrate
from orchestrator.startup import Mismatch
from orchestrator.workers.process import EnvironmentFailed
from tests.orchestrator.fakes import FakeServer, FakeTrainer, settings_for
from transport.errors import DeadlineError


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
    assert batch.num_loss_tokens == 16


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
    assert (tmp_path / "plots" / "reward.png").read_bytes().startswith(b"\x89PNG")


async def test_evaluation_is_greedy_and_names_its_version(tmp_path: Path, server: FakeServer) -> None:
    FakeTrainer(tmp_path).start()

    await orchestrate(settings_for(tmp_path, server, max_steps=2, eval={"interval": 1}))

    greedy = [request["version"] for request in server.requests if request["temperature"] == 0]
    assert Counter(greedy) == {0: 5, 1: 5, 2: 5}


async def test_a_refused_version_stops_the_run_with_the_servers_message(tmp_path: Path, server: FakeServer) -> None:
    server.refuse_version = 2
    FakeTrainer(tmp_path).start()

    with pytest.raises(ServerError, match=r"409: version 2: the canary is 3\.2 nats off"):
        await orchestrate(settings_for(tmp_path, server))


async def test_a_server_that_never_comes_up_is_named_within_the_deadline(tmp_path: Path) -> None:
    server = FakeServer()
    server.url = "http://127.0.0.1:9/v1"
    FakeTrainer(tmp_path).start()

    with pytest.raises(ServerError, match=r"client\.timeout = 0\.5 s .* http://127\.0\.0\.1:9"):
        await orchestrate(settings_for(tmp_path, server, client={"base_url": [server.url], "timeout": 0.5}))


async def test_a_trainer_that_vanishes_is_named(tmp_path: Path, server: FakeServer) -> None:
    FakeTrainer(tmp_path, vanish_after=1).start()

    with pytest.raises(DeadlineError, match="trainer to publish version 2"):
        await orchestrate(settings_for(tmp_path, server, wait_timeout=2))
    # The ledger still tells every rollout's fate.
    rows = sqlite3.connect(tmp_path / "ledger.sqlite").execute("SELECT state, step FROM rollouts").fetchall()
    assert Counter(rows) == {("trained", 1): 16, ("shipped", 2): 16}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"rank": 8}, "lora_rank = 8, the orchestrator model.lora_rank = 16"),
        ({"sequence_len": 256}, "sequence_len = 256, the orchestrator seq_len = 128"),
    ],
)
async def test_a_trainer_with_other_settings_is_an_error_with_both_values(
    tmp_path: Path, server: FakeServer, spec: dict[str, int], message: str
) -> None:
    FakeTrainer(tmp_path, **spec).start()

    with pytest.raises(Mismatch, match=message):
        await orchestrate(settings_for(tmp_path, server))


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"base_model": "other"}, "identity other, expected"),
        ({"max_lora_rank": 8}, "max_lora_rank = 8, expected at least model.lora_rank = 16"),
        ({"max_model_len": 16}, "max_model_len = 16, expected more than sampling.max_tokens = 16"),
    ],
)
async def test_a_server_that_does_not_fit_is_an_error_with_both_values(
    tmp_path: Path, info: dict[str, object], message: str
) -> None:
    server = await FakeServer(**info).start()
    FakeTrainer(tmp_path).start()

    with pytest.raises(Mismatch, match=message):
        await orchestrate(settings_for(tmp_path, server))
    await server.stop()


ENVIRONMENT = """
import os, time
from orchestrator.envs import Environment, Rubric

def broken(completion, example):
    {body}

class Broken(Environment):
    rubric = Rubric([broken])
    def dataset(self, split):
        return [{{"prompt": f"say {{i}}"}} for i in range(20)]
"""


def environment(folder: Path, body: str) -> list[dict[str, str]]:
    path = folder / "broken.py"
    path.write_text(ENVIRONMENT.format(body=body))
    return [{"id": f"{path}:Broken"}]


async def test_an_environment_that_always_raises_stops_the_run_with_its_traceback(
    tmp_path: Path, server: FakeServer
) -> None:
    FakeTrainer(tmp_path).start()
    env = environment(tmp_path, "raise RuntimeError('the moon is full')")

    with pytest.raises(EnvironmentFailed, match=r"broken\.py(.|\n)*the moon is full"):
        await orchestrate(settings_for(tmp_path, server, env=env))


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


async def test_prompts_without_room_for_an_answer_are_an_error_if_all_are(tmp_path: Path, server: FakeServer) -> None:
    FakeTrainer(tmp_path).start()

    with pytest.raises(ValueError, match="all 50 prompts of reverse-text are too long"):
        await orchestrate(settings_for(tmp_path, server, sampling={"max_tokens": 120}))


async def test_a_run_survives_a_server_that_fails_for_a_while(tmp_path: Path, server: FakeServer) -> None:
    server.num_failures = 5
    FakeTrainer(tmp_path).start()

    summary = await orchestrate(settings_for(tmp_path, server))

    assert summary.rollouts_trained == 48

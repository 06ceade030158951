"""Whatever user code asks or returns costs its own rollouts: the real engine, workers, advantages and traces."""

import asyncio
import json
import random
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from grpo.orchestrator.advantage import group_credit
from grpo.orchestrator.ledger import Ledger
from grpo.orchestrator.renderer import ChatRenderer
from grpo.orchestrator.rollouts.engine import RolloutEngine
from grpo.orchestrator.rollouts.records import EpisodeResult, Group, SamplingParams, Task
from grpo.orchestrator.rollouts.stores import ArtifactStores
from grpo.orchestrator.samples import ScoredGroup, add_samples, unfit

from tests.orchestrator import absurd
from tests.orchestrator.fakes import MODEL, FakeServer
from tests.orchestrator.inference.serving import client_of
from tests.orchestrator.worker_pools import pool_for

REASONS = {"", "env_error", "env_memory", "reward_not_finite", "reward_too_large", "context_full"}
NUM_AT_ONCE = 24
PARAMS = SamplingParams(temperature=1.0, max_tokens=None)


@pytest.mark.parametrize("name", ["Absurd", "AbsurdReward"])
async def test_whatever_user_code_asks_or_returns_is_a_fate_of_its_rollout(
    tmp_path: Path, server: FakeServer, name: str
) -> None:
    server.live, server.info["max_model_len"] = {0}, 1024
    draws, seen = random.Random(0), Counter[str]()
    client, told = client_of(server.url, timeout_s=60), {"args": {"num": NUM_AT_ONCE}, "memory_bytes": 1 << 30}
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        async with pool_for(f"{absurd.__file__}:{name}", **told) as pool, asyncio.timeout(600):
            given = {"context_len": 1024, "seed": 0, "stores": ArtifactStores(ledger)}
            engine = RolloutEngine({"e": pool}, client, ChatRenderer.of_model(MODEL), **given)
            prompts = await pool.prompts("train")

            async def rolled_out(index: int) -> EpisodeResult:
                task = Task(env="e", split="train", index=index, messages=prompts[index])
                [result] = await engine.run_group(Group(task=task, id=str(index), num=1, version=0, params=PARAMS))
                return result

            for _ in range(8):
                plans = [
                    (draws.choice(absurd.PLACES), draws.randrange(len(absurd.VALUES)), draws.random() < 0.5)
                    for _ in range(NUM_AT_ONCE - 1)
                ]

                def answer(prompt: str, version: int, plans: list[tuple[str, int, bool]] = plans) -> str:
                    """To example number n its plan, and a word to anything else."""
                    number = prompt.partition("number ")[2].partition(".")[0]
                    return json.dumps(plans[int(number)]) if number in map(str, range(len(plans))) else "fine"

                server.answer = answer
                *results, other = await asyncio.gather(*map(rolled_out, range(NUM_AT_ONCE)))
                assert other.failure is None  # who asked for nothing of the kind
                for plan, result in zip(plans, results, strict=True):
                    reason = result.failure.reason if result.failure else ""
                    assert reason in REASONS | ({"env_timeout"} if plan[0] == "delayed" else set()), (plan, result)
                    if not reason:
                        group = ScoredGroup([result])
                        add_samples(group, group_credit, number="0")
                        samples = group.samples
                        assert unfit(samples) is None, plan
                    seen[reason] += 1
    await client.close()
    assert seen[""] > 20
    assert seen["env_error"] > 10

"""Whatever user code asks or returns costs its own rollouts: the real engine, workers, advantages and traces."""

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from grpo.orchestrator.advantage import group_credit
from grpo.orchestrator.inference.client import PolicyClient
from grpo.orchestrator.inference.pool import ServerPool
from grpo.orchestrator.ledger import Ledger
from grpo.orchestrator.renderer import ChatRenderer
from grpo.orchestrator.rollouts.engine import RolloutEngine
from grpo.orchestrator.rollouts.records import EpisodeResult, Group, SamplingParams, Task
from grpo.orchestrator.rollouts.stores import ArtifactStores
from grpo.orchestrator.samples import ScoredGroup, finish_group, unfit
from grpo.orchestrator.workers.pool import WorkerPool
from hypothesis import given
from hypothesis import strategies as st

from tests.orchestrator import absurd
from tests.orchestrator.fakes import MODEL, FakeServer

Plan = tuple[str, int, bool]
PLANS: st.SearchStrategy[Plan] = st.tuples(
    st.sampled_from(absurd.PLACES), st.integers(0, len(absurd.VALUES) - 1), st.booleans()
)
REASONS = {"env_error", "env_memory", "reward_not_finite", "reward_too_large", "context_full"}
NUM_AT_ONCE = 24


def answering(plans: dict[int, Plan]) -> Any:
    """What the policy says: to example number n its plan, and a word to anything else."""

    def answer(prompt: str, version: int) -> str:
        number = prompt.partition("number ")[2].partition(".")[0]
        return json.dumps(plans[int(number)]) if number.isdecimal() and int(number) in plans else "fine"

    return answer


class Place:
    """Workers of the environment, and the engine over them, on a server that is a stand-in."""

    async def start(self, folder: Path, name: str) -> "Place":
        self.server = await FakeServer(max_model_len=1024).start()
        self.server.live = {0}
        servers = ServerPool([self.server.url])
        for one in servers.servers:
            servers.readmit(one)
        self.client = PolicyClient(servers, api_key=None, timeout_s=60)
        env_id = f"{absurd.__file__}:{name}"
        self.pool = WorkerPool(
            label="e", env_id=env_id, args={"num": NUM_AT_ONCE}, timeout_s=60.0, memory_bytes=1 << 30
        )
        self.prompts = await self.pool.prompts("train")
        self.ledger = Ledger(folder / "ledger.sqlite")
        stores = ArtifactStores(self.ledger)
        renderer = ChatRenderer.of_model(MODEL)
        self.engine = RolloutEngine({"e": self.pool}, self.client, renderer, context_len=1024, seed=0, stores=stores)
        return self

    async def close(self) -> None:
        await self.pool.close()
        await self.client.close()
        await self.server.stop()
        self.ledger.close()

    async def rolled_out(self, plans: list[Plan]) -> list[EpisodeResult]:
        """A rollout for each plan, and last one without."""
        self.server.answer = answering(dict(enumerate(plans)))
        params = SamplingParams(temperature=1.0, max_tokens=None)
        tasks = [Task(env="e", split="train", index=n, messages=self.prompts[n]) for n in range(len(plans) + 1)]
        groups = [Group(task=task, id=str(task.index), num=1, version=0, params=params) for task in tasks]
        async with asyncio.timeout(300):
            return [one for [one] in await asyncio.gather(*map(self.engine.run_group, groups))]


@pytest.fixture(params=["Absurd", "AbsurdReward"])
def place(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[asyncio.Runner, Place]]:
    with asyncio.Runner() as runner:
        place = runner.run(Place().start(tmp_path, request.param))
        yield runner, place
        runner.run(place.close())


def test_whatever_user_code_asks_or_returns_is_a_fate_of_its_rollout(place: tuple[asyncio.Runner, Place]) -> None:
    runner, workers = place
    seen: defaultdict[str, int] = defaultdict(int)

    @hypothesis.settings(max_examples=8, phases=[hypothesis.Phase.generate])
    @given(st.lists(PLANS, min_size=NUM_AT_ONCE - 1, max_size=NUM_AT_ONCE - 1))
    def check(plans: list[Plan]) -> None:
        *results, other = runner.run(workers.rolled_out(plans))
        assert other.failure is None  # who asked for nothing of the kind
        for plan, result in zip(plans, results, strict=True):
            seen["" if result.failure is None else result.failure.reason] += 1
            expected = REASONS | ({"env_timeout"} if plan[0] == "delayed" else set())
            assert result.failure is None or result.failure.reason in expected, (plan, result.failure)
            if result.failure is None:
                assert unfit(finish_group(ScoredGroup([result]), group_credit, group="0").samples) is None, plan

    check()
    assert seen[""] > 20
    assert seen["env_error"] > 10

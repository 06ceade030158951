"""What is taken off rewards, and advantages of a batch, with numbers worked by hand."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from grpo.configs.rollouts import ReinforcePlusPlus, RunningBaseline
from grpo.orchestrator.monitoring.metrics import Figures
from grpo.orchestrator.samples import ScoredGroup
from grpo.orchestrator.shaping import BASELINES, BatchAdvantages, OverlongPenalty, overlong_penalty, values_of
from grpo.transport.records import TrainingSample
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.orchestrator.fakes import FakeServer, settings_for
from tests.orchestrator.made import sample
from tests.orchestrator.questions import result
from tests.orchestrator.running import rows_of, run

# --- rewards ---


def test_an_answer_loses_up_to_1_over_the_interval_before_the_longest() -> None:
    # From 12 - 4 = 8 tokens on: 9 lose 1/4, 12 lose all, 20 no more.
    penalties = [overlong_penalty(n, max_tokens=12, interval=4) for n in (3, 8, 9, 12, 20)]
    assert penalties == [0, 0, -0.25, -1, -1]


def penalty() -> OverlongPenalty:
    chosen = {"reward_shaping": {"overlong_interval": 2}, "client": {"base_url": ["http://server"]}}
    return OverlongPenalty(settings_for(Path("run"), sampling={"max_tokens": 6}, **chosen))


async def test_long_answers_lose_in_the_rewards_that_credit_sees() -> None:
    # "abc" and "abcd" with their ends are 4 and 5 tokens: of 6 with an interval of 2, 0 and -1/2.
    group = ScoredGroup([result("0/0", "q", "abc", reward=1.0), result("0/1", "q", "abcd", reward=0.0)])
    by_length = penalty()
    await by_length.before_credit(group)
    assert ([one.reward for one in group.credited], group.dropped) == ([1.0, -0.5], {})
    assert [one.reward for one in group.results] == [1.0, 0.0]
    assert by_length.figures().since(Figures()) == {"reward/overlong_penalty": -0.25}
    # Of two answers of 5 and 4 tokens the longer one counts.
    twice = ScoredGroup([result("0/2", "q", "abcd", "abc", reward=1.0)])
    await by_length.before_credit(twice)
    assert twice.credited[0].reward == 0.5


async def test_a_rollout_whose_reward_gets_too_large_is_dropped() -> None:
    results = [result("0/0", "q", "abcd", reward=-1e6), result("0/1", "q", "abd")]
    group = ScoredGroup(results, withheld={"0/0": "gibberish"})
    await penalty().before_credit(group)
    assert ([one.id for one in group.results], [one.id for one in group.credited]) == (["0/1"], ["0/1"])
    assert (group.dropped, group.withheld) == ({"0/0": "reward_too_large"}, {})


# --- advantages of a batch ---


def rewarded(*rewards: float, env: str = "e", lengths: Sequence[int] = ()) -> ScoredGroup:
    samples: list[TrainingSample] = []
    for number, reward in enumerate(rewards):
        made = sample(str(number), range(1 + (lengths[number] if lengths else 1)))
        samples.append(replace(made, advantages=reward, env=env))
    return ScoredGroup(results=(), samples=samples, found=(), withheld={})


def advantages(groups: Sequence[ScoredGroup], batch: BatchAdvantages) -> list[list[float]]:
    batch.apply(groups)
    return [[float(values_of(one)[0]) for one in group.samples] for group in groups]


def test_a_running_baseline_is_of_each_environment_and_goes_on_after_a_restart() -> None:
    settings = RunningBaseline(type="running_baseline", decay=0.75)
    first = BatchAdvantages(settings)
    # It begins as the first batch's means, 0.5 of a and 4 of b.
    assert advantages([rewarded(0, 1, env="a"), rewarded(4, env="b")], first) == [[-0.5, 0.5], [0]]
    # The batch before left 0.5; this one leaves 0.75 · 0.5 + 0.25 · 1 = 0.625, and b's stays.
    assert advantages([rewarded(1, 1, env="a")], first) == [[0.5, 0.5]]
    again = BatchAdvantages(settings, first.state())
    assert advantages([rewarded(1, env="a"), rewarded(5, env="b")], again) == [[0.375], [1]]


def test_reinforce_plus_plus_normalises_over_the_tokens_of_the_batch() -> None:
    # Rewards 1 over 3 tokens and 0 over 1: mean 0.75, std sqrt(0.75 · 0.25) = 0.4330: 0.25 / std and -0.75 / std.
    std = math.sqrt(0.1875)
    settings = ReinforcePlusPlus(type="reinforce_plus_plus")
    found = advantages([rewarded(1, lengths=[3]), rewarded(0, lengths=[1])], BatchAdvantages(settings))
    assert found == [[pytest.approx(0.25 / std)], [pytest.approx(-0.75 / std)]]
    assert advantages([rewarded(0.1 + 0.2, 0.3)], BatchAdvantages(settings)) == [[0, 0]]


@given(st.floats(-1e6, 1e6), st.lists(st.integers(1, 7), min_size=1, max_size=16), st.floats(0.0, 0.99))
def test_equal_rewards_of_batches_give_advantages_of_exactly_0(reward: float, lengths: list[int], decay: float) -> None:
    def batch() -> list[ScoredGroup]:
        return [rewarded(*[reward] * len(lengths), lengths=lengths), rewarded(reward, reward)]

    zeros = [[0.0] * len(lengths), [0.0] * 2]
    running = BatchAdvantages(RunningBaseline(type="running_baseline", decay=decay))
    assert [advantages(batch(), running) for _ in range(4)] == [zeros] * 4
    assert advantages(batch(), BatchAdvantages(ReinforcePlusPlus(type="reinforce_plus_plus"))) == zeros


async def test_a_run_with_a_running_baseline_keeps_it_with_its_batches(tmp_path: Path, server: FakeServer) -> None:
    advantage = {"advantage": {"type": "running_baseline"}, "rollouts_per_example": 1}
    made = await run(tmp_path, server, eval={"num_examples": 0}, **advantage)
    assert sum(x for batch in made.batches[1] for x in batch.advantages.tolist()) == pytest.approx(0, abs=1e-5)
    [(state,)] = rows_of(tmp_path, "SELECT state FROM steps WHERE step = 3")
    assert list(json.loads(state)[BASELINES]) == ["words"]

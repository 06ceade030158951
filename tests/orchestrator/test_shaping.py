"""What is taken off rewards, and advantages of a batch, with numbers worked by hand."""

import itertools
import json
import math
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from aiohttp import web
from grpo.configs.rollouts import ReinforcePlusPlus, RunningBaseline
from grpo.orchestrator.advantage import group_credit
from grpo.orchestrator.auxiliary.teacher.scoring import Teaching
from grpo.orchestrator.endpoints import EndpointError
from grpo.orchestrator.rollouts.records import EpisodeResult
from grpo.orchestrator.samples import FinishedGroup, finish_group
from grpo.orchestrator.shaping import (
    BASELINES,
    BatchAdvantages,
    RewardShaping,
    kl_estimates,
    overlong_penalty,
    values_of,
)
from grpo.transport.records import Float32, Int32, TrainingSample
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.orchestrator.auxiliary.preferences.rollouts import result
from tests.orchestrator.auxiliary.teacher.test_scoring import sample
from tests.orchestrator.fakes import FakeServer, settings_for
from tests.orchestrator.running import run

# --- rewards ---


def test_an_answer_loses_up_to_1_over_the_interval_before_the_longest() -> None:
    # From 12 - 4 = 8 tokens on: 9 lose 1/4, 12 lose all, 20 no more.
    penalties = [overlong_penalty(n, max_tokens=12, interval=4) for n in (3, 8, 9, 12, 20)]
    assert penalties == [0, 0, -0.25, -1, -1]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    # d = -1 - -2 = 1 and -1 - -0.5 = -0.5: d² / 2 = 0.5 and 0.125; exp(-1) - 1 + 1 and exp(0.5) - 1 - 0.5.
    [("k1", [1, -0.5]), ("k2", [0.5, 0.125]), ("k3", [math.exp(-1), math.exp(0.5) - 1.5])],
)
def test_estimates_of_the_kl(estimator: Any, expected: list[float]) -> None:
    policy, reference = np.array([-1, -1], np.float32), np.array([-2, -0.5], np.float32)
    assert kl_estimates(policy, reference, estimator).tolist() == pytest.approx(expected)


class Reference:
    """A token's log-probability is -0.7; it does not score what ends with `unscored`."""

    name, num_requests = "reference", 0

    def __init__(self, unscored: Sequence[int] = ()) -> None:
        self.unscored = list(unscored)

    async def score(self, token_ids: Int32, temperature: float) -> Float32:
        if self.unscored and token_ids[-len(self.unscored) :].tolist() == self.unscored:
            raise EndpointError("timeout", "no")
        return np.full(len(token_ids), -0.7, np.float32)


def shaping(reference: Reference | None = None, **chosen: Any) -> RewardShaping:
    client = {"base_url": ["http://server"]}
    settings = settings_for(Path("run"), sampling={"max_tokens": 6}, reward_shaping=chosen, client=client)
    return RewardShaping(settings, None if reference is None else Teaching(reference))


async def test_long_answers_and_the_kl_are_taken_off_the_rewards_that_advantages_are_made_of() -> None:
    # "abc" and "abcd" with their ends are 4 and 5 tokens: of 6 with an interval of 2, 0 and -1/2.
    group = [result("0/0", "q", "abc", reward=1.0), result("0/1", "q", "abcd", reward=0.0)]
    by_length = shaping(overlong_interval=2)
    shaped, failed = await by_length.shaped(group)
    assert ([one.reward for one in shaped], failed) == ([1.0, -0.5], {})
    assert by_length.metrics() == {"reward/overlong_penalty": -0.25}
    # Of two answers of 5 and 4 tokens the longer one counts.
    [twice], _ = await by_length.shaped([result("0/2", "q", "abcd", "abc", reward=1.0)])
    assert twice.reward == 0.5
    # The policy sampled each token with -0.5, the reference has -0.7: k1 is 0.2 a token, of 4 and 5 tokens.
    by_kl = shaping(Reference(), reference_kl=0.1)
    shaped, _ = await by_kl.shaped(group)
    assert [one.reward for one in shaped] == pytest.approx([1 - 0.1 * 0.8, -0.1 * 1.0])
    assert by_kl.metrics()["reward/reference_kl_penalty"] == pytest.approx(-0.09)
    assert [one.reward for one in group] == [1.0, 0.0]


async def test_a_rollout_that_the_reference_does_not_score_is_left_out_with_its_reason() -> None:
    group = [result("0/0", "q", "abc"), result("0/1", "q", "abd")]
    unscored = group[1].rows[0].token_ids[-2:].tolist()
    shaped, failed = await shaping(Reference(unscored), reference_kl=0.1).shaped(group)
    assert ([one.id for one in shaped], failed) == (["0/0"], {"0/1": "reference_timeout"})


async def test_each_rollout_that_has_no_reward_left_keeps_its_own_reason() -> None:
    group = [result("0/0", "q", "abcd", reward=-1e6), result("0/1", "q", "abd"), result("0/2", "q", "abc")]
    unscored = group[1].rows[0].token_ids[-2:].tolist()
    shaped, failed = await shaping(Reference(unscored), reference_kl=0.1, overlong_interval=2).shaped(group)
    assert [one.id for one in shaped] == ["0/2"]
    assert failed == {"0/0": "reward_too_large", "0/1": "reference_timeout"}


# --- advantages of a batch ---


def rewarded(*rewards: float, env: str = "e", lengths: Sequence[int] = ()) -> FinishedGroup:
    samples: list[TrainingSample] = []
    for number, reward in enumerate(rewards):
        made = sample(str(number), *range(1 + (lengths[number] if lengths else 1)))
        samples.append(replace(made, advantages=reward, env=env))
    return FinishedGroup(results=(), samples=samples, found=(), withheld={})


def advantages(groups: Sequence[FinishedGroup]) -> list[list[float]]:
    return [[float(values_of(one)[0]) for one in group.samples] for group in groups]


def test_a_running_baseline_is_of_each_environment_and_goes_on_after_a_restart() -> None:
    settings = RunningBaseline(type="running_baseline", decay=0.75)
    first = BatchAdvantages(settings)
    # It begins as the first batch's means, 0.5 of a and 4 of b.
    assert advantages(first.applied([rewarded(0, 1, env="a"), rewarded(4, env="b")])) == [[-0.5, 0.5], [0]]
    # The batch before left 0.5; this one leaves 0.75 · 0.5 + 0.25 · 1 = 0.625, and b's stays.
    assert advantages(first.applied([rewarded(1, 1, env="a")])) == [[0.5, 0.5]]
    again = BatchAdvantages(settings, first.state())
    assert advantages(again.applied([rewarded(1, env="a"), rewarded(5, env="b")])) == [[0.375], [1]]


def test_reinforce_plus_plus_normalises_over_the_tokens_of_the_batch() -> None:
    # Rewards 1 over 3 tokens and 0 over 1: mean 0.75, std sqrt(0.75 · 0.25) = 0.4330: 0.25 / std and -0.75 / std.
    std = math.sqrt(0.1875)
    settings = ReinforcePlusPlus(type="reinforce_plus_plus")
    found = advantages(BatchAdvantages(settings).applied([rewarded(1, lengths=[3]), rewarded(0, lengths=[1])]))
    assert found == [[pytest.approx(0.25 / std)], [pytest.approx(-0.75 / std)]]
    assert advantages(BatchAdvantages(settings).applied([rewarded(0.1 + 0.2, 0.3)])) == [[0, 0]]


@given(st.floats(-1e6, 1e6), st.lists(st.integers(1, 7), min_size=1, max_size=16), st.floats(0.0, 0.99))
def test_equal_rewards_of_whole_batches_give_advantages_of_exactly_0(
    reward: float, lengths: list[int], decay: float
) -> None:
    batch = [rewarded(*[reward] * len(lengths), lengths=lengths), rewarded(reward, reward)]
    zeros = [[0.0] * len(lengths), [0.0] * 2]
    running = BatchAdvantages(RunningBaseline(type="running_baseline", decay=decay))
    assert [advantages(running.applied(batch)) for _ in range(4)] == [zeros] * 4
    assert advantages(BatchAdvantages(ReinforcePlusPlus(type="reinforce_plus_plus")).applied(batch)) == zeros
    grouped = ReinforcePlusPlus(type="reinforce_plus_plus", group_baseline=True)
    group = [result(f"0/{number}", "q", "a" * length, reward=reward) for number, length in enumerate(lengths)]
    [found] = advantages(BatchAdvantages(grouped).applied([finish_group(group, group_credit, group="0")]))
    assert found == zeros[0]


def test_a_baseline_of_the_group_is_subtracted_before() -> None:
    group: list[EpisodeResult] = [result("0/0", "q", "a", reward=3.0), result("0/1", "q", "b", reward=1.0)]
    settings = ReinforcePlusPlus(type="reinforce_plus_plus", group_baseline=True)
    found = advantages(BatchAdvantages(settings).applied([finish_group(group, group_credit, group="0")]))
    assert found == [[1, -1]]  # 3 and 1 less 2, over a deviation of 1


async def test_a_run_with_the_kl_in_the_reward_and_a_running_baseline(tmp_path: Path, server: FakeServer) -> None:
    shaped = {"reference_kl": 0.5, "reference_kl_estimator": "k2"}
    advantage = {"advantage": {"type": "running_baseline"}, "rollouts_per_example": 1}
    made = await run(tmp_path, server, reward_shaping=shaped, eval={"num_examples": 0}, **advantage)
    assert {body["version"] for body in server.scores} == {None}
    assert all(batch.teacher_logprobs is None for batches in made.batches.values() for batch in batches)
    assert sum(x for batch in made.batches[1] for x in batch.advantages.tolist()) == pytest.approx(0, abs=1e-5)
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as database:
        [(state,)] = database.execute("SELECT state FROM steps WHERE step = 3")
    assert list(json.loads(state)[BASELINES]) == ["words"]
    assert all(line["reward/reference_kl_penalty"] < 0 for line in made.steps)


class RefusesOnce(FakeServer):
    """Refuses the first request for log-probabilities."""

    async def _score(self, request: web.Request) -> web.Response:
        if self.num_refused == 0:
            self.num_refused += 1
            return web.json_response({"error": {"type": "bad_request", "message": "no"}}, status=400)
        return await super()._score(request)

    num_refused = 0


async def test_rollouts_that_the_reference_does_not_score_are_in_the_traces(tmp_path: Path) -> None:
    answers = itertools.cycle(["a", "b", "ab", "ba"])  # four in each group, of which one is refused
    server = await RefusesOnce(lambda prompt, version: next(answers)).start()
    made = await run(tmp_path, server, reward_shaping={"reference_kl": 0.5}, eval={"num_examples": 0})
    await server.stop()
    [(reason, num)] = made.summary.rollouts_dropped.items()
    assert reason == "reference_refused"
    reasons = [
        one for path in (tmp_path / "traces").glob("step_*") for one in pq.read_table(path)["drop_reason"].to_pylist()
    ]
    assert reasons.count(reason) == num

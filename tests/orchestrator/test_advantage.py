"""Credit on trees of rollouts, with numbers worked by hand, and what users bring."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from grpo.orchestrator.advantage import (
    CreditAssigner,
    StepKey,
    checked_credit,
    constant_credit,
    custom_advantage,
    episodic_credit,
    group_credit,
    group_relative,
    leave_one_out,
    length_weighted,
    make_credit,
    normalised,
)
from grpo.orchestrator.rollouts.records import EpisodeResult
from grpo.transport.importing import FunctionFailed
from hypothesis import given
from hypothesis import strategies as st

from tests.orchestrator import made
from tests.orchestrator.fakes import settings_for
from tests.orchestrator.made import step


def result(name: str, rewards: Mapping[str, float], *children: EpisodeResult, steps: str = "") -> EpisodeResult:
    """`steps` are roles of one letter, one letter a step; by default each role acts once."""
    return made.result(name, *map(step, steps or rewards), rewards=rewards, children=children)


def two_levels() -> list[EpisodeResult]:
    """Two proposers (P), whose questions three and two solvers (S) tried; the first proposer took two steps."""
    first = [result(f"a/{number}", {"S": reward}) for number, reward in enumerate([1.0, 0.0, 0.0])]
    second = [result(f"b/{number}", {"S": reward}) for number, reward in enumerate([1.0, 1.0])]
    return [result("a", {"P": 0.75}, *first, steps="PP"), result("b", {"P": 0.25}, *second)]


# --- by hand ---


@pytest.mark.parametrize(
    ("advantage", "proposers", "solvers"),
    [
        # Proposers: 0.75 and 0.25, mean 0.5. Solvers of a: 1, 0, 0, mean 1/3; of b: 1, 1. With all five solvers as one
        # group the mean would be 3/5 instead.
        (group_relative, [0.25, -0.25], [2 / 3, -1 / 3, -1 / 3, 0, 0]),
        # Proposers: deviation 0.25. Solvers of a: variance (4/9 + 1/9 + 1/9) / 3 = 2/9, deviation sqrt(2)/3.
        (normalised, [1, -1], [math.sqrt(2), -1 / math.sqrt(2), -1 / math.sqrt(2), 0, 0]),
        # Proposers: 0.75 - 0.25 and 0.25 - 0.75. Solvers of a: 1 - 0, 0 - 1/2, 0 - 1/2; of b: 1 - 1 twice.
        (leave_one_out, [0.5, -0.5], [1, -0.5, -0.5, 0, 0]),
    ],
)
def test_each_level_is_a_group(advantage: Any, proposers: list[float], solvers: list[float]) -> None:
    first, second = proposers
    names = [("a", 0), ("a", 1), ("b", 0), ("a/0", 0), ("a/1", 0), ("a/2", 0), ("b/0", 0), ("b/1", 0)]
    expected = dict(zip(names, [first, first, second, *solvers], strict=True))
    assert group_credit(two_levels(), advantage=advantage) == pytest.approx(expected)


def test_a_role_is_compared_where_it_acted() -> None:
    # The helper (H) acted in the first and third rollout alone: 1 and 3, mean 2. Its reward in the second is none.
    trees = [
        result("0", {"A": 0.0, "H": 1.0}),
        result("1", {"A": 3.0, "H": 100.0}, steps="A"),
        result("2", {"A": 0.0, "H": 3.0}),
    ]
    assert group_credit(trees) == {("0", 0): -1.0, ("0", 1): -1.0, ("1", 0): 2.0, ("2", 0): -1.0, ("2", 1): 1.0}


def test_a_length_weighted_mean_counts_each_reward_as_often_as_its_role_has_tokens() -> None:
    # (1·10 + 0·30) / 40 = 0.25, where the plain mean is 0.5; and 10·0.75 - 30·0.25 = 0.
    assert length_weighted([1, 0], [10, 30]) == [0.75, -0.25]
    with pytest.raises(ValueError, match="tokens"):
        length_weighted([1, 0], [0, 0])
    for function in (group_relative, length_weighted):
        with pytest.raises(ValueError, match="rewards"):
            function([], [])
    steps = [step("A", [2]), step("B", [2] * 50), step("A", [2, 2])]
    trees = [made.result("0", *steps, rewards={"A": 1.0, "B": 0.0}), made.result("1", step("A"), rewards={"A": 0.0})]
    # A sampled 3 tokens with reward 1 and 1 with reward 0: baseline 3/4.
    credit = group_credit(trees, advantage=length_weighted)
    assert credit == {("0", 0): 0.25, ("0", 1): 0.0, ("0", 2): 0.25, ("1", 0): -0.75}


@given(st.floats(-9e5, 9e5), st.integers(1, 16), st.integers(1, 9))
def test_rewards_that_differ_by_rounding_give_advantages_of_exactly_0(reward: float, num: int, length: int) -> None:
    rewards = [reward * (1 + 1e-12) if number % 3 == 2 else reward for number in range(num)]
    trees = [result(str(n), {"A": one, "B": -one}, steps="AB" * (n + length)) for n, one in enumerate(rewards)]
    for advantage in (group_relative, normalised, leave_one_out, length_weighted):
        assert set(group_credit(trees, advantage=advantage).values()) == {0.0}


# --- what settings name ---

OWN = """
from tests.orchestrator.test_advantage import Always, doubled

def ranked(rewards, lengths, *, scale=1.0):
    order = sorted(range(len(rewards)), key=rewards.__getitem__)
    return [scale * order.index(i) for i in range(len(rewards))]

def too_few(rewards, lengths):
    return rewards[1:]

def infinite(rewards, lengths):
    return [float("inf")] * len(rewards)

def nothing(rewards, lengths):
    return None

def huge(rewards, lengths):
    return [2e6] * len(rewards)

def words(rewards, lengths):
    return ["a"] * len(rewards)
"""


def doubled(results: Sequence[EpisodeResult], *, factor: float = 2.0) -> dict[StepKey, float]:
    return {key: factor * value for key, value in episodic_credit(results).items()}


class Always(CreditAssigner):
    def __init__(self, *, value: float) -> None:
        self.value = value

    def compute(self, results: Sequence[EpisodeResult]) -> dict[StepKey, float]:
        return constant_credit(results, value=self.value)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        # The rewards 0, 1 and 2 of 1, 1 and 4 tokens: mean 1, deviation sqrt(2/3), weighted mean (1 + 2·4) / 6 = 3/2.
        ({}, [-1, 0, 1]),
        ({"positive_only": True}, [0, 0, 1]),
        ({"length_weighted_mean": True}, [-1.5, -0.5, 0.5]),
        ({"type": "normalized"}, [-math.sqrt(1.5), 0, math.sqrt(1.5)]),
        ({"type": "leave_one_out"}, [-1.5, 0, 1.5]),
        ({"type": "episodic"}, [0, 1, 2]),
        # The batch makes the rest of these.
        ({"type": "reinforce_plus_plus"}, [0, 1, 2]),
        ({"type": "reinforce_plus_plus", "group_baseline": True}, [-1, 0, 1]),
        ({"type": "running_baseline"}, [0, 1, 2]),
        ({"type": "constant", "value": 0.25}, [0.25] * 3),
        ({"type": "custom", "import_path": "{own}:ranked", "kwargs": {"scale": 0.5}}, [0, 0.5, 1]),
        ({"type": "custom_credit", "import_path": "{own}:doubled"}, [0, 2, 4]),
        ({"type": "custom_credit", "import_path": "{own}:doubled", "kwargs": {"factor": 4.0}}, [0, 4, 8]),
        ({"type": "custom_credit", "import_path": "{own}:Always", "kwargs": {"value": 3.0}}, [3, 3, 3]),
    ],
)
def test_settings_name_a_kind_of_credit(own: Path, chosen: dict[str, Any], expected: list[float]) -> None:
    path = {"import_path": chosen["import_path"].format(own=own)} if "import_path" in chosen else {}
    lengths = (1, 1, 4)
    group = [made.result(str(n), step(ids=[2] * num), rewards=float(n)) for n, num in enumerate(lengths)]
    credit = make_credit(settings_for(own.parent, client={}, advantage=chosen | path))(group)
    assert [credit[str(n), 0] for n in range(3)] == pytest.approx(expected)


@pytest.mark.parametrize("name", ["too_few", "infinite", "nothing", "huge", "words"])
def test_what_is_no_advantage_for_every_rollout_is_an_error(own: Path, name: str) -> None:
    with pytest.raises(FunctionFailed, match=rf"own\.py:{name}"):
        custom_advantage(f"{own}:{name}", {})([1, 0], [1, 1])


@pytest.mark.parametrize(
    "received",
    [
        {("0", 0): 1.0},
        {("0", 0): 1.0, ("0", 1): 1.0, ("1", 0): 1.0},
        {("0", 0): 1.0, ("0", 1): math.nan},
        {("0", 0): 1.0, ("0", 1): -2e6},
        {("0", 0): 1.0, ("0", 1): "much"},
        [1.0, 1.0],
    ],
)
def test_credit_of_a_user_that_is_wrong_is_refused(received: Any) -> None:
    with pytest.raises(FunctionFailed, match="mine"):
        checked_credit(lambda results: received, "mine", [result("0", {"A": 1.0}, steps="AA")])

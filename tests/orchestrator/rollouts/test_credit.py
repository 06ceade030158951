"""Credit on trees, with numbers worked by hand."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.advantage import (
    CreditAssigner,
    StepKey,
    checked_credit,
    constant_credit,
    custom_credit,
    episodic_credit,
    group_credit,
    group_relative,
    leave_one_out,
    length_weighted,
    normalised,
)
from orchestrator.rollouts.records import Completion, EpisodeResult, Step, Task
from transport.importing import NotFound

TASK = Task(env="test", split="train", index=0, messages=())


def step(role: str, num_tokens: int = 1) -> Step:
    return Step(
        role=role,
        temperature=1.0,
        completion=Completion(token_ids=[2] * num_tokens, logprobs=[0.0] * num_tokens, finish_reason="stop"),
        text="",
        version=0,
    )


def result(name: str, rewards: Mapping[str, float], *children: EpisodeResult, steps: str = "") -> EpisodeResult:
    """`steps` are roles of one letter, one letter a step; by default each role acts once."""
    acted = tuple(step(role) for role in steps or rewards)
    return EpisodeResult(id=name, task=TASK, steps=acted, rewards=rewards, children=tuple(children))


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


def test_roles_of_one_rollout_are_compared_each_with_its_own() -> None:
    # A debate, affirmative (A) and negative (N) by turns, zero-sum: A has 1, -1, 1, mean 1/3; N has -1, 1, -1.
    games = [result(str(number), {"A": won, "N": -won}, steps="ANAN") for number, won in enumerate([1.0, -1.0, 1.0])]
    credit = group_credit(games)
    assert [credit["0", index] for index in range(4)] == pytest.approx([2 / 3, -2 / 3, 2 / 3, -2 / 3])
    assert [credit["1", index] for index in range(4)] == pytest.approx([-4 / 3, 4 / 3, -4 / 3, 4 / 3])


def test_a_role_is_compared_where_it_acted() -> None:
    # The helper (H) acted in the first and third rollout alone: 1 and 3, mean 2. Its reward in the second is no
    # reward for anything.
    trees = [
        result("0", {"A": 0.0, "H": 1.0}),
        result("1", {"A": 3.0, "H": 100.0}, steps="A"),
        result("2", {"A": 0.0, "H": 3.0}),
    ]
    assert group_credit(trees) == {
        ("0", 0): -1.0,
        ("0", 1): -1.0,
        ("1", 0): 2.0,
        ("2", 0): -1.0,
        ("2", 1): 1.0,
    }


def test_a_baseline_by_tokens_counts_those_of_the_role() -> None:
    def with_lengths(name: str, reward: float, *lengths: tuple[str, int]) -> EpisodeResult:
        steps = tuple(step(role, num) for role, num in lengths)
        rewards = {"A": reward, "B": 0.0}
        return EpisodeResult(id=name, task=TASK, steps=steps, rewards=rewards)

    trees = [with_lengths("0", 1.0, ("A", 1), ("B", 50), ("A", 2)), with_lengths("1", 0.0, ("A", 1))]
    # A sampled 3 tokens with reward 1 and 1 with reward 0: baseline 3/4.
    credit = group_credit(trees, advantage=length_weighted)
    assert credit == {("0", 0): 0.25, ("0", 1): 0.0, ("0", 2): 0.25, ("1", 0): -0.75}


@pytest.mark.parametrize("advantage", [normalised, leave_one_out, group_relative])
def test_groups_of_one_and_groups_that_do_not_differ_have_no_advantage(advantage: Any) -> None:
    assert group_credit([result("0", {"A": 5.0})], advantage=advantage) == {("0", 0): 0.0}
    # 0.1 three times has a mean that is not 0.1, in floating point.
    trees = [result(str(number), {"A": 0.1}) for number in range(3)]
    assert list(group_credit(trees, advantage=advantage).values()) == pytest.approx([0.0] * 3, abs=1e-15)


def test_a_rollout_without_steps_only_carries_its_children() -> None:
    below = [result(f"0/0/{number}", {"B": float(number)}) for number in range(2)]
    children = (result("0/0", {"A": 1.0}, *below), result("0/1", {"A": 0.0}))
    tree = EpisodeResult(id="0", task=TASK, rewards={}, children=children)
    own = {("0/0", 0): 0.5, ("0/1", 0): -0.5}
    assert group_credit([tree]) == own | {("0/0/0", 0): -0.5, ("0/0/1", 0): 0.5}
    assert group_credit([]) == {}


# --- invariances ---

REWARDS = st.lists(st.floats(-100, 100), min_size=1, max_size=8)


@given(REWARDS)
def test_advantages_of_a_group_sum_to_zero(rewards: list[float]) -> None:
    trees = [result(str(number), {"A": reward}) for number, reward in enumerate(rewards)]
    for advantage in (group_relative, normalised, leave_one_out):
        assert sum(group_credit(trees, advantage=advantage).values()) == pytest.approx(0.0, abs=1e-4)


@given(REWARDS, st.randoms())
def test_the_order_of_results_does_not_matter(rewards: list[float], shuffler: Any) -> None:
    trees = [result(str(number), {"A": reward}) for number, reward in enumerate(rewards)]
    shuffled = list(trees)
    shuffler.shuffle(shuffled)
    assert group_credit(shuffled) == pytest.approx(group_credit(trees), abs=1e-9)


# --- what users bring ---


def doubled(results: Sequence[EpisodeResult], *, factor: float = 2.0) -> dict[StepKey, float]:
    return {key: factor * value for key, value in episodic_credit(results).items()}


class Always(CreditAssigner):
    def __init__(self, *, value: float) -> None:
        self.value = value

    def compute(self, results: Sequence[EpisodeResult]) -> dict[StepKey, float]:
        return constant_credit(results, value=self.value)


def test_credit_may_be_a_users(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("from tests.orchestrator.rollouts.test_credit import Always, doubled as own\nnumber = 3\n")
    trees = [result("0", {"A": 1.5})]
    assert custom_credit(f"{path}:own", {}, setting="s")(trees) == {("0", 0): 3.0}
    assert custom_credit(f"{path}:own", {"factor": 4.0}, setting="s")(trees) == {("0", 0): 6.0}
    assert custom_credit(f"{path}:Always", {"value": 3.0}, setting="s")(trees) == {("0", 0): 3.0}
    with pytest.raises(NotFound):
        custom_credit(f"{path}:number", {}, setting="s")


@pytest.mark.parametrize(
    "received",
    [
        {("0", 0): 1.0},
        {("0", 0): 1.0, ("0", 1): 1.0, ("1", 0): 1.0},
        {("0", 0): 1.0, ("0", 1): math.nan},
        [1.0, 1.0],
    ],
)
def test_credit_of_a_user_that_is_wrong_is_refused(received: Any) -> None:
    with pytest.raises(ValueError, match="mine"):
        checked_credit(lambda results: received, "mine", [result("0", {"A": 1.0}, steps="AA")])

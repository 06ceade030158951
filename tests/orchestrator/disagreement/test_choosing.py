"""Which turns teachers are asked about."""

import pytest

from orchestrator.disagreement.choosing import (
    Chooser,
    TraceFacts,
    TurnFacts,
    all_turns,
    errors,
    first_divergence,
    low_reward,
)


def trace(name: str, reward: float, *turns: str) -> TraceFacts:
    """Turns as `state:did`, with ! behind where there was an error."""
    facts = []
    for turn in turns:
        state, _, did = turn.rstrip("!").partition(":")
        facts.append(TurnFacts(state=state, did=did, failed=turn.endswith("!")))
    return TraceFacts(id=name, reward=reward, turns=facts)


GROUP = [
    trace("0/0", 1.0, "s:x", "sx:y", "sxy:z"),
    trace("0/1", 0.0, "s:x", "sx:w!", "sxw:z"),
    trace("0/2", 0.5, "s:x", "sx:y", "sxy:z"),
]


def test_strategies_name_turns() -> None:
    assert len(all_turns(GROUP)) == 9
    assert errors(GROUP) == {(1, 1)}
    assert low_reward(GROUP) == {(1, 0), (1, 1), (1, 2)}  # the mean is 0.5, and 0.5 is not below it
    assert low_reward(GROUP, below=0.75) == {(i, j) for i in (1, 2) for j in range(3)}
    assert first_divergence(GROUP) == {(0, 1), (1, 1), (2, 1)}


@pytest.mark.parametrize(
    ("rewards", "low"), [([0.1] * 3, set()), ([0.4] * 6, set()), ([0.1, 0.2, -0.3, 0.0], {(2, 0)})]
)
def test_rounding_makes_no_reward_a_low_one(rewards: list[float], low: set[tuple[int, int]]) -> None:
    assert low_reward([trace(f"0/{n}", reward, "s:x") for n, reward in enumerate(rewards)]) == low


def test_siblings_that_do_the_same_do_not_diverge_and_one_alone_has_nobody_to() -> None:
    assert first_divergence([GROUP[0], GROUP[2]]) == set()
    assert first_divergence(GROUP[:1]) == set()
    assert first_divergence([trace("a", 0, "s:x", "s:y")]) == set()
    assert low_reward([]) == set()


def test_only_the_same_state_makes_a_divergence() -> None:
    group = [trace("a", 0, "s:x", "sx:y", "sxy:q"), trace("b", 0, "t:w", "sx:y", "sxy:r")]
    assert first_divergence(group) == {(0, 2), (1, 2)}


def test_any_of_the_strategies_is_enough() -> None:
    assert Chooser(["errors", "low_reward"]).choose(GROUP) == [(1, 0), (1, 1), (1, 2)]
    assert Chooser(["all"], max_per_trace=1).choose(GROUP) == [(0, 0), (1, 0), (2, 0)]
    assert Chooser(["low_reward"], below=-1).choose(GROUP) == []


def test_a_share_is_drawn_by_seed_rollout_and_turn_alone() -> None:
    groups = [[trace(f"{n}/{i}", 0, *(f"{j}:x" for j in range(5))) for i in range(4)] for n in range(100)]
    chooser = Chooser(["all"], share=0.25, seed=7)
    drawn = [chooser.choose(group) for group in groups]
    assert 420 <= sum(map(len, drawn)) <= 580  # 2000 turns: 500, and four standard deviations are 77
    again = Chooser(["all"], share=0.25, seed=7)
    assert [again.choose(group) for group in reversed(groups)] == drawn[::-1]
    assert [Chooser(["all"], share=0.25, seed=8).choose(group) for group in groups] != drawn
    assert Chooser(["all"], share=0.0).choose(GROUP) == []
    assert len(Chooser(["all"], share=1.0).choose(GROUP)) == 9


def test_what_cannot_be_chosen_by_is_an_error() -> None:
    with pytest.raises(ValueError, match="no strategy 'hard'; there are all, errors, low_reward, first_divergence"):
        Chooser(["errors", "hard"])
    with pytest.raises(ValueError, match="no strategies were given"):
        Chooser([])
    with pytest.raises(ValueError, match=r"share is 1.5, expected 0 to 1"):
        Chooser(["all"], share=1.5)
    with pytest.raises(ValueError, match="max_per_trace is 0"):
        Chooser(["all"], max_per_trace=0)
    with pytest.raises(ValueError, match=r"below is 0.5, and no strategy is low_reward"):
        Chooser(["all"], below=0.5)

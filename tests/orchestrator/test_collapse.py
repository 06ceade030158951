"""What is said when self-play fails."""

import pytest
from grpo.orchestrator.monitoring.collapse import CollapseWatch, winner_of
from grpo.orchestrator.rollouts.players import PlayerId
from grpo.orchestrator.rollouts.records import EpisodeResult, Step, Task

TASK = Task(env="nim", split="train", index=0, messages=())


def game(first: float, second: float, *, opponent: bool = False) -> EpisodeResult:
    """Of the policy as `a`, against itself or an opponent as `b`."""
    players = {"b": PlayerId(name="v1"), "a": PlayerId(name="v2")} if opponent else {}
    steps = [Step(role="a")] if opponent else [Step(role="a"), Step(role="b")]
    return EpisodeResult(task=TASK, steps=tuple(steps), rewards={"a": first, "b": second}, players=players)


def test_the_winner_is_the_side_with_the_higher_reward() -> None:
    assert winner_of(game(1, -1)) == "a"
    assert winner_of(game(-2, 2)) == "b"
    assert winner_of(game(0, 0)) == ""
    assert winner_of(game(1, 0.5)) is None  # no game of what one wins and the other loses
    assert winner_of(game(1, -1, opponent=True)) == "the policy"
    assert winner_of(game(-1, 1, opponent=True)) == "the opponent"


def test_one_side_that_wins_every_game_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = CollapseWatch()
    watch.batch(1, [game(1, -1)] * 15 + [game(0, 0)])
    watch.batch(2, [game(1, -1)] * 15)
    assert caplog.messages == []
    for step in (3, 4):
        watch.batch(step, [game(1, -1)] * 16)
    assert len(caplog.messages) == 1
    assert "a won all 16 games of nim in batch 3" in caplog.messages[0]
    watch.batch(5, [game(1, -1)] * 15 + [game(-1, 1)])
    watch.batch(6, [game(-1, 1, opponent=True)] * 16)
    assert "the opponent won all 16 games of nim in batch 6" in caplog.messages[1]


def test_illegal_answers_that_rise_and_entropy_that_falls_are_told(caplog: pytest.LogCaptureFixture) -> None:
    watch = CollapseWatch()
    watch.batch(1, [game(1, -1), game(-1, 1)])
    for step in range(40):
        illegal, entropy = 0.02 + 0.01 * max(0, step - 20), 0.5 * 0.92**step
        watch.step({"reward/measure/illegal_answers/a/nim": illegal, "policy/entropy/nim": entropy})
        watch.step({"policy/entropy/reverse-text": entropy})  # no game
    rules, tries = sorted(caplog.messages, key=lambda message: "entropy" in message)
    assert "illegal answer" in rules
    assert "the entropy of nim has fallen" in tries

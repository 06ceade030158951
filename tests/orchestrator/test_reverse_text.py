"""The built-in `reverse-text`."""

import pytest

from orchestrator.envs.registry import make_environment
from orchestrator.envs.reverse_text import ReverseText, in_place
from tests.orchestrator.rollouts.contexts import score_of


def test_training_and_evaluation_share_no_word() -> None:
    environment = make_environment("reverse-text", {"num_train": 2000, "num_eval": 200})
    train, held_out = ({example["word"] for example in environment.dataset(split)} for split in ("train", "eval"))
    assert len(environment.dataset("eval")) == 200
    assert not train & held_out


def test_letters_in_place_are_counted_of_the_longer_text() -> None:
    # abc backwards is cba: "cbx" has 2 of 3 in place, "cbaxx" 3 of 5.
    assert in_place("cbx", {"word": "abc"}) == pytest.approx(2 / 3)
    assert in_place("cbaxx", {"word": "abc"}) == pytest.approx(3 / 5)
    assert in_place("", {"word": "abc"}) == 0


async def test_the_partial_reward_is_the_mean_of_right_and_in_place_and_accuracy_stays_strict() -> None:
    rubric = ReverseText(reward="partial").rubric
    score = await score_of(rubric, "cbx", {"word": "abc"})
    # 0.5 · 0 + 0.5 · 2/3
    assert score.reward == pytest.approx(1 / 3)
    assert score.accuracy == 0
    assert (await score_of(rubric, " cba ", {"word": "abc"})).accuracy == 1


def test_an_unknown_reward_says_which_there_are() -> None:
    with pytest.raises(ValueError, match="odd"):
        ReverseText(reward="odd")  # type: ignore[arg-type]

"""The built-in `reverse-text`."""

import hashlib

import pytest
from grpo.environments import reverse_text as task
from grpo.environments.reverse_text import ReverseText
from grpo.orchestrator.rollouts.registry import make_environment

from tests.orchestrator.rollouts.contexts import score_of


def test_a_tenth_of_all_words_is_held_out_by_their_hash_and_no_split_shares_one() -> None:
    words = task.words(0, 3000, 2, 8, "train") + task.words(0, 3000, 2, 8, "eval")
    for word in words:
        held_out = int(hashlib.sha256(word.encode()).hexdigest(), 16) % 10 == 0
        assert task.split_of(word) == ("eval" if held_out else "train")
    environment = make_environment("reverse-text", {"num_train": 2000, "num_eval": 200})
    train, evaluated = ({example["word"] for example in environment.dataset(split)} for split in ("train", "eval"))
    assert len(environment.dataset("eval")) == 200
    assert not train & evaluated


def test_words_are_a_function_of_the_seed_and_a_longer_list_begins_with_the_shorter() -> None:
    words = task.words(1, 50, 3, 8, "train")
    assert words == task.words(1, 80, 3, 8, "train")[:50]
    assert words != task.words(2, 50, 3, 8, "train")
    assert words[:3] == ["oubd", "mjfmxk", "talsfyx"]  # a run that is resumed must see the words it has seen before
    assert {len(word) for word in words} == {3, 4, 5, 6, 7, 8}


async def test_the_partial_reward_is_the_mean_of_right_and_in_place_and_accuracy_stays_strict() -> None:
    rubric = ReverseText(reward="partial").rubric
    # abc backwards is cba: "cbx" has 2 of 3 letters in place, "cbaxx" 3 of 5; 0.5 · 0 + 0.5 · 2/3, and 0.5 · 3/5.
    for answer, reward in (("cbx", 1 / 3), ("cbaxx", 0.3), ("", 0)):
        score = await score_of(rubric, answer, {"word": "abc"})
        assert (score.reward, score.accuracy) == (pytest.approx(reward), 0)
    assert (await score_of(rubric, " cba ", {"word": "abc"})).accuracy == 1

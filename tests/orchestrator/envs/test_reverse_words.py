import hashlib

import pytest

from orchestrator.envs import _reverse_words as task


def test_a_tenth_of_all_words_is_held_out_by_their_hash() -> None:
    words = task.words(0, 3000, 2, 8, "train") + task.words(0, 3000, 2, 8, "eval")
    for word in words:
        held_out = int(hashlib.sha256(word.encode()).hexdigest(), 16) % 10 == 0
        assert task.split_of(word) == ("eval" if held_out else "train")
    letters = [first + second for first in "abcdefghijklmnopqrstuvwxyz" for second in "abcdefghijklmnopqrstuvwxyz"]
    assert 0.05 < sum(task.split_of(word) == "eval" for word in letters) / len(letters) < 0.15


def test_splits_are_disjoint() -> None:
    train, held_out = (task.words(0, 5000, 3, 4, split) for split in ("train", "eval"))
    assert not set(train) & set(held_out)


def test_words_are_a_function_of_the_seed_and_a_longer_list_begins_with_the_shorter() -> None:
    words = task.words(1, 50, 3, 8, "train")
    assert words == task.words(1, 50, 3, 8, "train")
    assert words == task.words(1, 80, 3, 8, "train")[:50]
    assert words != task.words(2, 50, 3, 8, "train")
    assert words[:3] == PINNED


# Not to change: a run that is resumed must see the words it has seen before.
PINNED = ["oubd", "mjfmxk", "talsfyx"]


def test_words_have_each_length_asked_for_and_only_small_letters() -> None:
    words = task.words(0, 500, 3, 5, "eval")
    assert {len(word) for word in words} == {3, 4, 5}
    assert all(word.isascii() and word.isalpha() and word.islower() for word in words)


@pytest.mark.parametrize(("min_len", "max_len"), [(1, 8), (0, 0), (5, 4)])
def test_lengths_that_make_no_sense_are_refused(min_len: int, max_len: int) -> None:
    with pytest.raises(ValueError, match=f"min_len={min_len}, max_len={max_len}"):
        task.words(0, 1, min_len, max_len, "train")


def test_the_prompt_is_a_short_instruction() -> None:
    assert task.prompt("hello") == "Reverse: hello"


@pytest.mark.parametrize("text", ["olleh", " olleh\n"])
def test_the_reversed_word_is_correct_whatever_white_space_is_around_it(text: str) -> None:
    assert task.is_correct(text, "hello")


@pytest.mark.parametrize("text", ["", "hello", "olle", "ollehh", "Olleh", "o lleh", "The answer is olleh", "olleh."])
def test_anything_else_is_wrong(text: str) -> None:
    assert not task.is_correct(text, "hello")

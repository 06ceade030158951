"""Advantages: built in, weighted by length, and a user's own."""

from pathlib import Path
from typing import Any

import pytest

from orchestrator.advantage import AdvantageFunction, custom_advantage, group_relative, length_weighted
from transport.importing import NotFound

OWN = """
limit = 3

def ranked(rewards, lengths, *, scale=1.0):
    order = sorted(range(len(rewards)), key=rewards.__getitem__)
    return [scale * order.index(i) for i in range(len(rewards))]

def shorter(rewards, lengths):
    return [-float(length) for length in lengths]

def too_few(rewards, lengths):
    return rewards[1:]

def infinite(rewards, lengths):
    return [float("inf")] * len(rewards)

def nothing(rewards, lengths):
    return None
"""


def custom(folder: Path, name: str, **kwargs: Any) -> AdvantageFunction:
    path = folder / "own.py"
    path.write_text(OWN)
    return custom_advantage(f"{path}:{name}", kwargs)


def test_advantages_are_rewards_minus_their_mean() -> None:
    # mean(1, 0, 0, 3) = 1
    assert group_relative([1, 0, 0, 3]) == [0, -1, -1, 2]


def test_an_empty_group_is_an_error() -> None:
    for function in (group_relative, length_weighted):
        with pytest.raises(ValueError, match="rewards"):
            function([], [])


def test_a_length_weighted_mean_counts_each_reward_as_often_as_its_rollout_has_tokens() -> None:
    # (1·10 + 0·30) / 40 = 0.25, where the plain mean is 0.5; and 10·0.75 - 30·0.25 = 0.
    assert length_weighted([1, 0], [10, 30]) == [0.75, -0.25]


def test_a_group_without_tokens_has_no_length_weighted_mean() -> None:
    with pytest.raises(ValueError, match="tokens"):
        length_weighted([1, 0], [0, 0])


def test_a_function_of_the_users_gets_rewards_lengths_and_keyword_arguments(tmp_path: Path) -> None:
    assert custom(tmp_path, "ranked", scale=0.5)([0.2, 0.9, 0.1], [1, 1, 1]) == [0.5, 1.0, 0.0]
    assert custom(tmp_path, "shorter")([0, 0], [4, 6]) == [-4, -6]


@pytest.mark.parametrize("name", ["too_few", "infinite", "nothing"])
def test_what_is_no_advantage_for_every_rollout_is_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=rf"own\.py:{name}"):
        custom(tmp_path, name)([1, 0], [1, 1])


@pytest.mark.parametrize("location", ["own", "no_such_module:f", "no_such_file.py:f", "json:f", "json:__doc__"])
def test_a_path_that_leads_to_no_function_is_an_error(location: str) -> None:
    with pytest.raises(NotFound):
        custom_advantage(location, {})

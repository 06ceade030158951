"""Advantages of a group: rewards in, advantages out.

Legend: `G` rollouts of one group.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from orchestrator.importing import NotFound, find

AdvantageFunction = Callable[[Sequence[float], Sequence[int]], Sequence[float]]
"""`(rewards [G], numbers of sampled tokens [G]) -> advantages [G]`"""


def group_relative(rewards_G: Sequence[float], lengths_G: Sequence[int] = ()) -> list[float]:
    """A_i = r_i - mean(r), the baseline of GRPO without the division by the standard deviation.

    Dividing would weigh groups whose rewards hardly differ as much as those that differ most (Liu et al. 2025,
    "Understanding R1-Zero-Like Training", section 3). Equal rewards give advantages of 0. `lengths_G` are not used.
    """
    if not rewards_G:
        raise ValueError("a group without rewards has no advantages; give at least one")
    mean = sum(rewards_G) / len(rewards_G)
    return [reward - mean for reward in rewards_G]


def length_weighted(rewards_G: Sequence[float], lengths_G: Sequence[int]) -> list[float]:
    """A_i = r_i - sum_j(l_j r_j) / sum_j(l_j), where l are the numbers of sampled tokens.

    The loss is a sum over tokens, each with its rollout's advantage. With this baseline the advantages of the group's
    tokens sum to 0, sum_i(l_i A_i) = 0, where those of its rollouts do with the plain mean. For rollouts of equal
    length both are the same.
    """
    if not rewards_G:
        raise ValueError("a group without rewards has no advantages; give at least one")
    if (total := sum(lengths_G)) <= 0:
        raise ValueError(f"the rollouts of a group sampled {list(lengths_G)} tokens, expected at least one in all")
    baseline = sum(length * reward for length, reward in zip(lengths_G, rewards_G, strict=True)) / total
    return [reward - baseline for reward in rewards_G]


def custom_advantage(import_path: str, kwargs: Mapping[str, Any]) -> AdvantageFunction:
    """The user's function that `advantage.import_path` names. Raises ValueError where it is no function."""
    function = find(import_path, setting="advantage.import_path")
    if not callable(function):
        raise NotFound(f"advantage.import_path = {import_path!r} is {function!r}, expected a function")
    return partial(_checked, partial(function, **kwargs), import_path)


def _checked(
    function: AdvantageFunction, name: str, rewards_G: Sequence[float], lengths_G: Sequence[int]
) -> list[float]:
    """What a user's function says, as numbers. Raises ValueError where they are too many, too few, or not finite."""
    received = function(list(rewards_G), list(lengths_G))
    try:
        advantages_G = [float(advantage) for advantage in received]
    except TypeError:
        advantages_G = []
    if len(advantages_G) != len(rewards_G) or not all(map(math.isfinite, advantages_G)):
        raise ValueError(
            f"advantage.import_path = {name!r} returned {received!r}, expected {len(rewards_G)} finite numbers for "
            f"the rewards {list(rewards_G)}"
        )
    return advantages_G

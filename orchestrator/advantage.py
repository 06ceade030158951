"""Advantages of a group: rewards in, advantages out."""

from collections.abc import Sequence


def group_relative(rewards_G: Sequence[float]) -> list[float]:
    """A_i = r_i - mean(r), the baseline of GRPO without the division by the standard deviation.

    Dividing would weigh groups whose rewards hardly differ as much as those that differ most (Liu et al. 2025,
    "Understanding R1-Zero-Like Training", section 3). Equal rewards give advantages of 0.
    """
    if not rewards_G:
        raise ValueError("a group without rewards has no advantages; give at least one")
    mean = sum(rewards_G) / len(rewards_G)
    return [reward - mean for reward in rewards_G]

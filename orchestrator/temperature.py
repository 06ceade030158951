"""The sampling temperature of each policy version."""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal


def temperature_schedule(
    shape: Literal["linear", "cosine"], *, start_temperature: float, end_temperature: float, max_steps: int
) -> Callable[[int], float]:
    """Temperature by policy version: start + (end - start) · f(x), with x = version / (max_steps - 1), at most 1;
    f(x) = x for `linear` and (1 - cos(π x)) / 2 for `cosine`.

    Version max_steps - 1 is the newest that the last batch can be sampled under, so `max_steps` must be at least 2.
    """
    if max_steps < 2:
        raise ValueError(f"max_steps is {max_steps}, expected at least 2 for a schedule of the temperature")
    return partial(_at, _SHAPES[shape], start_temperature, end_temperature, max_steps - 1)


def _at(shape: Callable[[float], float], start: float, end: float, last_version: int, version: int) -> float:
    return start + (end - start) * shape(min(version / last_version, 1.0))


def _linear(share: float) -> float:
    return share


def _cosine(share: float) -> float:
    return (1 - math.cos(math.pi * share)) / 2


_SHAPES = {"linear": _linear, "cosine": _cosine}

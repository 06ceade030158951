"""Rubrics: weighted reward functions, plain or async. Runs in the environment's process."""

import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from orchestrator.episodes.types import Score

RewardFunction = Callable[[str, Any], float | Awaitable[float]]
"""`(completion, example) -> reward`; the example is what the environment's dataset holds."""


class RewardNotFinite(ValueError):
    """A reward function returned something that cannot be a reward."""


class Rubric:
    """Scores a completion: the weighted sum of reward functions.

    Example: ``Rubric([exact, in_place], weights=[0.5, 0.5], accuracy=exact)``
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        weights: Sequence[float] | None = None,
        *,
        accuracy: RewardFunction | None = None,
    ) -> None:
        """`weights` default to 1 each; `accuracy`, which evaluation reports, defaults to the first function."""
        if not functions:
            raise ValueError("a rubric without reward functions cannot score; give at least one")
        self._weights = [1.0] * len(functions) if weights is None else [float(weight) for weight in weights]
        if len(self._weights) != len(functions):
            raise ValueError(f"{len(self._weights)} weights for {len(functions)} reward functions; give one each")
        self._names = [_name(function) for function in functions]
        if len(set(self._names)) != len(self._names):
            raise ValueError(f"reward functions {self._names} do not have different names; rename one")
        self._functions = list(functions)
        self._accuracy = accuracy or functions[0]

    async def score(self, completion: str, example: Any) -> Score:
        """Raises what a reward function raises, and RewardNotFinite."""
        values = [await _call(function, completion, example) for function in self._functions]
        metrics = dict(zip(self._names, values, strict=True))
        if (name := _name(self._accuracy)) in metrics:
            accuracy = metrics[name]
        else:
            accuracy = await _call(self._accuracy, completion, example)
        reward = sum(weight * value for weight, value in zip(self._weights, values, strict=True))
        return Score(reward=reward, accuracy=accuracy, metrics=metrics)


def _name(function: RewardFunction) -> str:
    return getattr(function, "__name__", type(function).__name__)


async def _call(function: RewardFunction, completion: str, example: Any) -> float:
    result = function(completion, example)
    value = await result if inspect.isawaitable(result) else result
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise RewardNotFinite(f"{_name(function)} returned {value!r}, expected a finite number") from None
    if not math.isfinite(number):
        raise RewardNotFinite(f"{_name(function)} returned {number}, expected a finite number")
    return number

"""Metrics that reduce correctly over micro-batches and ranks: how a number is reduced is part of its type.

Values are scalar tensors, so that nothing waits for the device until `as_floats`. docs/metrics.md lists them all.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import torch

State = tuple[str, float, float]
"""A metric as plain values, to be sent to another rank: its kind, and two numbers (the second is 0 where it has one).
Example: ``("mean", 3.0, 12.0)``"""


@dataclass(frozen=True, slots=True)
class Total:
    """A sum. Example: ``Total(torch.tensor(3.0))``"""

    value: torch.Tensor

    def merged(self, other: Self) -> "Total":
        """Over both parts."""
        return Total(self.value + other.value)

    def number(self) -> float:
        """As a number."""
        return float(self.value)

    def state(self) -> State:
        """As plain values; `from_state` is the inverse."""
        return "total", float(self.value), 0.0


@dataclass(frozen=True, slots=True)
class Mean:
    """A sum with the count (or sum of weights, at least 0) that it is divided by; 0 where nothing was counted."""

    total: torch.Tensor
    count: torch.Tensor

    def merged(self, other: Self) -> "Mean":
        """Over both parts."""
        return Mean(self.total + other.total, self.count + other.count)

    def number(self) -> float:
        """As a number."""
        return float(self.total / torch.where(self.count == 0, 1.0, self.count))

    def state(self) -> State:
        """As plain values; `from_state` is the inverse."""
        return "mean", float(self.total), float(self.count)


@dataclass(frozen=True, slots=True)
class Smallest:
    """A minimum."""

    value: torch.Tensor

    def merged(self, other: Self) -> "Smallest":
        """Over both parts."""
        return Smallest(torch.minimum(self.value, other.value))

    def number(self) -> float:
        """As a number."""
        return float(self.value)

    def state(self) -> State:
        """As plain values; `from_state` is the inverse."""
        return "smallest", float(self.value), 0.0


@dataclass(frozen=True, slots=True)
class Largest:
    """A maximum."""

    value: torch.Tensor

    def merged(self, other: Self) -> "Largest":
        """Over both parts."""
        return Largest(torch.maximum(self.value, other.value))

    def number(self) -> float:
        """As a number."""
        return float(self.value)

    def state(self) -> State:
        """As plain values; `from_state` is the inverse."""
        return "largest", float(self.value), 0.0


Metric = Total | Mean | Smallest | Largest

_OF_ONE_NUMBER: dict[str, type[Total | Smallest | Largest]] = {"total": Total, "smallest": Smallest, "largest": Largest}


def from_state(state: State) -> Metric:
    """The metric of which this is the `state()`, on the CPU. Raises ValueError for a kind that is unknown."""
    kind, first, second = state
    value = torch.tensor(first, dtype=torch.float64)
    if kind == "mean":
        return Mean(value, torch.tensor(second, dtype=torch.float64))
    if kind not in _OF_ONE_NUMBER:
        raise ValueError(f"a metric of the kind {kind!r}, expected one of {sorted([*_OF_ONE_NUMBER, 'mean'])}")
    return _OF_ONE_NUMBER[kind](value)


def merge(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """One set of metrics for all parts; a key that some parts lack is reduced over those that have it."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for key, metric in part.items():
            earlier = merged.get(key)
            merged[key] = metric if earlier is None else earlier.merged(metric)  # type: ignore[arg-type]
    return merged


def as_floats(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Each metric as one number."""
    return {key: metric.number() for key, metric in metrics.items()}

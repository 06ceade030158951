"""Metrics that reduce correctly over micro-batches: how a number is reduced is part of its type.

Values are scalar tensors, so that nothing waits for the device until `as_floats`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import torch


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


@dataclass(frozen=True, slots=True)
class Mean:
    """A sum with the count that it is divided by; 0 where nothing was counted."""

    total: torch.Tensor
    count: torch.Tensor

    def merged(self, other: Self) -> "Mean":
        """Over both parts."""
        return Mean(self.total + other.total, self.count + other.count)

    def number(self) -> float:
        """As a number."""
        return float(self.total / self.count.clamp(min=1))


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


Metric = Total | Mean | Smallest | Largest


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

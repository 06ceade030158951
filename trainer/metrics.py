"""Metrics that reduce correctly over micro-batches and ranks, because each says how it is reduced; and times.

Values are scalar tensors, and nothing waits for the device until `states_of`. docs/metrics.md lists them all.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

Op = Literal["sum", "mean", "min", "max"]
State = tuple[Op, float, float]
"""A metric as plain values: how it is reduced, its value, and the count of a mean. Example: ``("mean", 3.0, 12.0)``"""


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of one micro-batch. Example: ``Mean(torch.tensor(3.0), torch.tensor(12.0))``"""

    op: Op
    value: torch.Tensor
    """[] the value; for a mean the sum that is to be divided."""
    count: torch.Tensor | None = None
    """[] for a mean how many values there are, or the sum of their weights, at least 0."""


Sum, Mean, Min, Max = (partial(Metric, op) for op in ("sum", "mean", "min", "max"))
"""Metrics that reduce to a sum, a sum over a count (0 if the count is 0), the smallest, the largest."""


def states_of(parts: Sequence[Mapping[str, Metric]]) -> list[dict[str, State]]:
    """Returns the metrics of every micro-batch as plain values, which come from the device in one transfer."""
    tensors = [tensor for part in parts for metric in part.values() for tensor in (metric.value, metric.count)]
    numbers = iter(torch.stack([t.detach().double() for t in tensors if t is not None]).tolist() if tensors else [])
    return [
        {
            key: (metric.op, next(numbers), 0.0 if metric.count is None else next(numbers))
            for key, metric in part.items()
        }
        for part in parts
    ]


def reduced(parts: Iterable[Mapping[str, State]]) -> dict[str, State]:
    """Returns one set of states for all parts; a key that some parts lack is reduced over those that have it."""
    together: dict[str, State] = {}
    for part in parts:
        for key, (op, value, count) in part.items():
            if key in together:
                _, earlier, earlier_count = together[key]
                value, count = _combined(op, earlier, value), earlier_count + count
            together[key] = (op, value, count)
    return together


def _combined(op: Op, one: float, other: float) -> float:
    """Returns both as one value, which is not a number if either is not."""
    if op in ("sum", "mean") or one != one or other != other:
        return one + other
    return min(one, other) if op == "min" else max(one, other)


def numbers_of(states: Mapping[str, State]) -> dict[str, float]:
    """Returns each metric as one number."""
    return {key: value / (count or 1.0) if op == "mean" else value for key, (op, value, count) in states.items()}


@contextmanager
def timed(times_s: dict[str, float], name: str) -> Iterator[None]:
    """Notes in `times_s` when what is within began, as `time/NAME_at_s`, and how long it took, as `time/NAME_s`."""
    times_s[f"time/{name}_at_s"], started_s = time.time(), time.perf_counter()
    yield
    times_s[f"time/{name}_s"] = time.perf_counter() - started_s

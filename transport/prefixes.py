"""Finds the beginnings that samples have in common: a tree of runs of tokens, of which each is computed once."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.integer[Any]]


def tree_order(samples: Sequence[Ids], adapters: Sequence[int] | None = None) -> tuple[list[int], list[int]]:
    """Returns an order of S samples, and [S] how many first tokens each of it shares with the one right before it (0
    for the first): no other sample before it shares more, so that the rest are the tokens to compute for it. Samples
    of different `adapters` [S] share nothing.

    A sample comes after those that begin with all of it. Example: [[5, 6], [7], [5, 6, 8], [5, 9]]: order
    [1, 3, 2, 0], of which [0, 0, 1, 2] tokens are shared.
    """
    # Big-endian bytes are ordered as the tokens are.
    data, ends = np.concatenate(samples).astype(">i4").tobytes(), np.cumsum([4 * len(ids) for ids in samples]).tolist()
    keys = [data[start:end] for start, end in pairwise([0, *ends])]
    of = adapters or [0] * len(samples)
    order = sorted(range(len(samples)), key=lambda one: (of[one], keys[one]), reverse=True)
    shared = [
        _in_common(samples[before], samples[one]) if of[before] == of[one] else 0 for before, one in pairwise(order)
    ]
    return order, [0, *shared]


def _in_common(left: Ids, right: Ids) -> int:
    """Returns how many first tokens are the same."""
    if not (length := min(len(left), len(right))) or left[0] != right[0]:
        return 0
    differ = left[:length] != right[:length]
    first = int(differ.argmax())
    return first if differ[first] else length

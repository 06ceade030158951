"""Prompts that several samples have in common, found so that they are computed once.

A group's samples share their prompt, and a causal model gives equal prefixes equal hidden states. Pure NumPy.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


def shared_prefixes(
    token_ids: NDArray[np.integer[Any]],
    lengths: NDArray[np.integer[Any]],
    loss_mask: NDArray[np.bool_],
    adapters: NDArray[np.integer[Any]] | None = None,
) -> tuple[Indices, Indices]:
    """Which of T packed tokens to compute, and where each finds its result.

    A sample's prompt is what comes before its first loss token (all of it where it has none). Samples with the same
    prompt, and of `adapters` [S] the same, use the first one's.

    Returns `kept` [U], ascending indices into T, and `source` [T], indices into `kept`.
    Example: ids [5, 6, 7, 5, 6, 8] of two samples with prompts [5, 6]: kept [0, 1, 2, 5], source [0, 1, 2, 0, 1, 3].
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = ends - lengths
    prompt_lengths = _prompt_lengths(starts, ends, loss_mask)
    first: dict[tuple[int, bytes], int] = {}
    of_samples = np.zeros_like(starts) if adapters is None else adapters
    owners = np.empty(len(lengths), dtype=np.int64)
    for sample, (start, length) in enumerate(zip(starts.tolist(), prompt_lengths.tolist(), strict=True)):
        prompt = int(of_samples[sample]), token_ids[start : start + length].tobytes()
        owners[sample] = first.setdefault(prompt, sample)

    sample_of = np.repeat(np.arange(len(lengths)), lengths)
    offset = np.arange(len(token_ids)) - starts[sample_of]
    in_prompt = offset < prompt_lengths[sample_of]
    representative = np.where(in_prompt, starts[owners[sample_of]], starts[sample_of]) + offset
    is_kept = representative == np.arange(len(token_ids))
    kept = np.flatnonzero(is_kept)
    place = np.cumsum(is_kept) - 1
    return kept, place[representative]


def _prompt_lengths(starts: Indices, ends: Indices, loss_mask: NDArray[np.bool_]) -> Indices:
    """[S] tokens before each sample's first loss token."""
    targets = np.append(np.flatnonzero(loss_mask), len(loss_mask))
    first_target = targets[np.searchsorted(targets, starts)]
    lengths: Indices = np.minimum(first_target, ends) - starts
    return lengths

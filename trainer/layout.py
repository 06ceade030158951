"""Where the samples of a packed sequence lie, and how similar lengths are put together.

Legend: `T` packed tokens, `U` of them that are computed (prompts in common once), `S` samples, `P` slots of the padded
buckets, `S_b` and `L_b` samples and length of one bucket.

A bucket's samples are padded on the right to its longest. Right padding is exact under a causal mask: no real token
attends to what comes after it. Its cost grows with Σ L² of the samples and not with T².
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_BUCKET_SPAN = 0.8
_BUCKET_SLACK = 16
"""A bucket takes lengths down to 0.8 of its longest, or to 16 tokens less where that is lower: few calls, few gaps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the samples of a packed sequence lie.

    Example: lengths [2, 3] with nothing in common are one bucket of shape (2, 3), longest first: slots
    [2, 3, 4, 0, 1, 1], where the second 1 is padding, and slot_of [3, 4, 0, 1, 2].
    """

    boundaries: torch.Tensor
    """[S + 1] i32 cumulative lengths, from 0."""
    longest: int
    """Tokens of the longest sample."""
    kept: torch.Tensor
    """[U] i64 the packed tokens that are computed."""
    source: torch.Tensor
    """[T] i64 the computed token that each packed token is equal to."""
    slots: torch.Tensor
    """[P] i64 the computed token in each slot; padding repeats the sample's last token."""
    slot_of: torch.Tensor
    """[U] i64 the slot of each computed token (one of them where samples share it)."""
    buckets: tuple[tuple[int, int], ...]
    """(S_b, L_b) of each bucket, in the order of the slots."""

    @property
    def shares(self) -> bool:
        """Whether a packed token is computed for several samples."""
        return len(self.kept) < len(self.source)


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Returns the array on the device. A GPU copies it from pinned memory, beside what it computes."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def layout_of(
    lengths: NDArray[np.integer[Any]],
    device: torch.device,
    *,
    kept: NDArray[np.int64],
    source: NDArray[np.int64],
) -> Layout:
    """The layout of samples with these `lengths` [S], each at least 1.

    `kept` [U] and `source` [T] are those of `shared_prefixes`.
    """
    boundaries = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    buckets, packed_of_slot, slot_of_packed = _slots(lengths.astype(np.int64), boundaries)

    return Layout(
        boundaries=to_device(boundaries.astype(np.int32), device),
        longest=int(lengths.max()),
        kept=to_device(kept, device),
        source=to_device(source, device),
        slots=to_device(source[packed_of_slot], device),
        slot_of=to_device(slot_of_packed[kept], device),
        buckets=buckets,
    )


def _slots(
    lengths: NDArray[np.int64], boundaries: NDArray[np.int64]
) -> tuple[tuple[tuple[int, int], ...], NDArray[np.int64], NDArray[np.int64]]:
    """Buckets, [P] the packed token of each slot, [T] the slot of each packed token."""
    order = np.argsort(-lengths, kind="stable")
    buckets = _buckets(lengths[order])
    widths = np.repeat([length for _, length in buckets], [count for count, _ in buckets])
    offsets = np.arange(widths.sum()) - np.repeat(np.cumsum(widths) - widths, widths)
    sample = np.repeat(order, widths)
    packed_of_slot = boundaries[sample] + np.minimum(offsets, lengths[sample] - 1)
    real = np.flatnonzero(offsets < lengths[sample])
    slot_of_packed = np.empty(boundaries[-1], dtype=np.int64)
    slot_of_packed[packed_of_slot[real]] = real
    return buckets, packed_of_slot, slot_of_packed


def _buckets(descending: NDArray[np.int64]) -> tuple[tuple[int, int], ...]:
    """(samples, length) of each bucket, for lengths sorted from the longest."""
    buckets = []
    start = 0
    while start < len(descending):
        longest = int(descending[start])
        shortest = min(int(_BUCKET_SPAN * longest), longest - _BUCKET_SLACK)
        end = int(np.searchsorted(-descending, -shortest, side="right"))
        buckets.append((end - start, longest))
        start = end
    return tuple(buckets)

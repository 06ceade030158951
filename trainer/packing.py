"""Packs samples one after the other as tensors on the device; prompts that they share are computed once.

Legend: `T` packed tokens, `U` of them that are computed (prompts in common once), `S` samples, `K` targets, `P` slots
of the padded buckets, `S_b` and `L_b` samples and length of one bucket.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from grpo.transport.records import Bool, Float32, Int32, MicroBatch
from numpy.typing import NDArray

Indices = NDArray[np.int64]
_BUCKET_SPAN = 0.8
_BUCKET_SLACK = 16
"""A bucket takes lengths down to 0.8 of its longest, or to 16 tokens less where that is lower: few calls, few gaps."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """Samples of similar length, padded on the right to the longest. Right padding is exact under a causal mask: no
    real token attends to what comes after it. Its cost grows with Σ L² of the samples and not with T².

    Example: lengths [2, 3] with nothing in common are one bucket of shape (2, 3), longest first: slots
    [2, 3, 4, 0, 1, 1], where the second 1 is padding, and slot_of [3, 4, 0, 1, 2].
    """

    slots: torch.Tensor
    """[P] i64 the computed token in each slot; padding repeats the sample's last token."""
    slot_of: torch.Tensor
    """[U] i64 the slot of each computed token (one of them where samples share it)."""
    shapes: tuple[tuple[int, int], ...]
    """(S_b, L_b) of each bucket, in the order of the slots."""


class Layout:
    """The positions of a packed sequence's samples."""

    _parts: "Sequence[Layout]" = ()
    """Those that it was joined of; samples of different ones are in one bucket only where these are equally long."""

    def __init__(
        self, lengths: NDArray[np.integer[Any]], unique: Indices, inverse: Indices, device: torch.device
    ) -> None:
        """`lengths` [S], each at least 1; `unique` and `inverse` are those of `shared_prefixes`."""
        self._lengths, self._unique, self._inverse, self._device = lengths.astype(np.int64), unique, inverse, device
        ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        self.boundaries = to_device(ends, device)
        """[S + 1] i32 cumulative lengths, from 0."""
        self.longest = int(lengths.max())
        """Tokens of the longest sample."""
        self.shares = len(unique) < len(inverse)
        """True if a packed token is computed for several samples."""
        self.unique = to_device(unique, device)
        """[U] i64 the packed tokens that are computed."""
        self.inverse = to_device(inverse, device)
        """[T] i64 the computed token that each packed token is equal to."""

    @staticmethod
    def joined(parts: "Sequence[Layout]") -> "Layout":
        """Returns the layout of packed sequences one after the other."""
        num_packed = np.cumsum([0, *(len(part._inverse) for part in parts)])
        num_computed = np.cumsum([0, *(len(part._unique) for part in parts)])
        whole = Layout(
            np.concatenate([part._lengths for part in parts]),
            np.concatenate([part._unique + start for part, start in zip(parts, num_packed, strict=False)]),
            np.concatenate([part._inverse + start for part, start in zip(parts, num_computed, strict=False)]),
            parts[0]._device,
        )
        whole._parts = tuple(parts)
        return whole

    @cached_property
    def buckets(self) -> Buckets:
        """The samples as padded rows, for attention or models that need them; made when first asked for."""
        if self._parts:
            return _joined_buckets([part.buckets for part in self._parts])
        order = np.argsort(-self._lengths, kind="stable")
        shapes = _bucket_shapes(self._lengths[order])
        widths = np.repeat([length for _, length in shapes], [count for count, _ in shapes])
        offsets = np.arange(widths.sum()) - np.repeat(np.cumsum(widths) - widths, widths)
        sample = np.repeat(order, widths)
        starts = np.cumsum(self._lengths) - self._lengths
        packed_of_slot = starts[sample] + np.minimum(offsets, self._lengths[sample] - 1)
        real = np.flatnonzero(offsets < self._lengths[sample])
        slot_of_packed = np.empty(self._lengths.sum(), dtype=np.int64)
        slot_of_packed[packed_of_slot[real]] = real
        slots, slot_of = self._inverse[packed_of_slot], slot_of_packed[self._unique]
        return Buckets(to_device(slots, self._device), to_device(slot_of, self._device), shapes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTokens:
    """The inputs of a forward pass."""

    token_ids: torch.Tensor
    """[U] i64"""
    position_ids: torch.Tensor
    """[U] i64 from 0 in each sample."""
    adapters: torch.Tensor | None
    """[U] i64 the adapter of each token; None if all use the first."""
    layout: Layout
    """Boundaries of the samples, and the prompts that they share."""
    before_targets: torch.Tensor
    """[K] i64 indices into U of the tokens before the targets."""
    targets: torch.Tensor
    """[K] i64 ids of the tokens whose log-probability is wanted."""
    temperatures: torch.Tensor
    """[K] f32"""
    parts: "Sequence[PackedTokens]" = ()
    """Those that it was joined of, whose numbers do not depend on each other."""


def joined(parts: Sequence[PackedTokens]) -> PackedTokens:
    """Returns packs one after the other, for one pass in which each has the same results, to the bit, as alone."""
    if len(parts) == 1:
        return parts[0]
    counts = [len(part.token_ids) for part in parts]
    starts = torch.tensor([sum(counts[:number]) for number in range(len(parts))]).repeat_interleave(
        torch.tensor([len(part.before_targets) for part in parts])
    )
    token_ids, position_ids, before_targets, targets, temperatures = (
        torch.cat([getattr(part, name) for part in parts])
        for name in ("token_ids", "position_ids", "before_targets", "targets", "temperatures")
    )
    return PackedTokens(
        token_ids=token_ids,
        position_ids=position_ids,
        adapters=None,
        layout=Layout.joined([part.layout for part in parts]),
        before_targets=before_targets + starts.to(before_targets.device),
        targets=targets,
        temperatures=temperatures,
        parts=tuple(parts),
    )


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Returns the array on the device. A GPU copies it from pinned memory, beside what it computes."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def pack(
    token_ids: Int32,
    lengths: Int32,
    *,
    loss_mask: Bool,
    temperatures: Float32 | None = None,
    adapters: Int32 | None = None,
    device: torch.device,
) -> PackedTokens:
    """Returns samples of `lengths` [S] one after the other, whose targets are the tokens of `loss_mask` [T], at
    `temperatures` [T] (None: 1), with `adapters` [S] (None: the first). No sample's first token may be a target."""
    unique, inverse = shared_prefixes(token_ids, lengths, loss_mask, adapters)
    targets = np.flatnonzero(loss_mask)
    positions = np.arange(len(token_ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    temperatures = np.ones(len(token_ids), np.float32) if temperatures is None else temperatures
    of_tokens = None if adapters is None else np.repeat(adapters, lengths)[unique].astype(np.int64)
    return PackedTokens(
        token_ids=to_device(token_ids[unique].astype(np.int64), device),
        position_ids=to_device(positions[unique].astype(np.int64), device),
        adapters=None if of_tokens is None else to_device(of_tokens, device),
        layout=Layout(lengths, unique, inverse, device),
        before_targets=to_device(inverse[targets - 1], device),
        targets=to_device(token_ids[targets].astype(np.int64), device),
        temperatures=to_device(temperatures[targets], device),
    )


def packed_tokens(batch: MicroBatch, device: torch.device) -> PackedTokens:
    """Returns a micro-batch's samples, whose targets are its loss tokens."""
    return pack(
        batch.token_ids,
        batch.sequence_lengths,
        loss_mask=batch.loss_mask,
        temperatures=batch.per_token(batch.temperatures),
        adapters=batch.adapters,
        device=device,
    )


def pack_rows(
    rows: Sequence[tuple[Int32, NDArray[np.integer[Any]]]], adapters: Sequence[int], device: torch.device
) -> PackedTokens:
    """Returns sequences of (token ids, places of the targets) at temperature 1, each with its adapter."""
    lengths = np.array([len(token_ids) for token_ids, _ in rows], np.int32)
    loss_mask: Bool = np.zeros(lengths.sum(), np.bool_)
    for start, (_, places) in zip(np.cumsum(lengths) - lengths, rows, strict=True):
        loss_mask[start + places] = True
    token_ids = np.concatenate([token_ids for token_ids, _ in rows])
    of_rows = np.array(adapters, np.int32) if any(adapters) else None
    return pack(token_ids, lengths, loss_mask=loss_mask, adapters=of_rows, device=device)


def first_fit(sizes: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Returns indices by bin: each goes into the first bin with room for it, in their order.

    A size above `capacity` has a bin of its own. Example: sizes [3, 4, 2], capacity 5: [[0, 2], [1]].
    """
    bins: list[list[int]] = []
    free: list[int] = []
    for index, size in enumerate(sizes):
        fitting = (b for b, room in enumerate(free) if size <= room)
        if (b := next(fitting, None)) is None:
            bins.append([index])
            free.append(capacity - size)
        else:
            bins[b].append(index)
            free[b] -= size
    return bins


def shared_prefixes(
    token_ids: NDArray[np.integer[Any]],
    lengths: NDArray[np.integer[Any]],
    loss_mask: NDArray[np.bool_],
    adapters: NDArray[np.integer[Any]] | None = None,
) -> tuple[Indices, Indices]:
    """Returns which of T packed tokens to compute, and where each finds its result: a group's samples share their
    prompt, and a causal model gives equal prefixes equal hidden states.

    A sample's prompt is what comes before its first loss token (all of it where it has none). Samples with the same
    prompt, and of `adapters` [S] the same, use the first one's.

    `unique` [U] are ascending indices into T, `inverse` [T] indices into `unique`.
    Example: ids [5, 6, 7, 5, 6, 8] of two samples with prompts [5, 6]: unique [0, 1, 2, 5], inverse [0, 1, 2, 0, 1, 3].
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = ends - lengths
    targets = np.append(np.flatnonzero(loss_mask), len(loss_mask))
    prompt_lengths = np.minimum(targets[np.searchsorted(targets, starts)], ends) - starts
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
    is_unique = representative == np.arange(len(token_ids))
    place = np.cumsum(is_unique) - 1
    return np.flatnonzero(is_unique), place[representative]


def _bucket_shapes(descending: Indices) -> tuple[tuple[int, int], ...]:
    """Returns (samples, length) of each bucket, for lengths sorted from the longest."""
    shapes = []
    start = 0
    while start < len(descending):
        longest = int(descending[start])
        shortest = min(int(_BUCKET_SPAN * longest), longest - _BUCKET_SLACK)
        end = int(np.searchsorted(-descending, -shortest, side="right"))
        shapes.append((end - start, longest))
        start = end
    return tuple(shapes)


def _joined_buckets(parts: Sequence[Buckets]) -> Buckets:
    """Returns the buckets of several layouts, longest first; those of the same length are one."""
    pieces = []  # (length, samples, part, first slot there)
    for number, part in enumerate(parts):
        start = 0
        for count, length in part.shapes:
            pieces.append((length, count, number, start))
            start += count * length
    pieces.sort(key=lambda piece: -piece[0])  # stable: a part's own stay in their order
    shapes: list[tuple[int, int]] = []
    moved = [part.slot_of.clone() for part in parts]
    computed = np.cumsum([0, *(len(part.slot_of) for part in parts)])
    slots, start = [], 0
    for length, count, number, old in pieces:
        size = count * length
        slots.append(parts[number].slots[old : old + size] + int(computed[number]))
        inside = (parts[number].slot_of >= old) & (parts[number].slot_of < old + size)
        moved[number][inside] += start - old
        start += size
        if shapes and shapes[-1][1] == length:
            shapes[-1] = shapes[-1][0] + count, length
        else:
            shapes.append((count, length))
    return Buckets(torch.cat(slots), torch.cat(moved), tuple(shapes))

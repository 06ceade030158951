"""Packs samples one after the other as tensors on the device, as a tree: beginnings that they share are computed once.

A sample's *run* are its tokens after those that it shares with another one. A causal model gives equal beginnings
equal hidden states, so that only runs are computed, and each attends to its own past and to what is before it in its
sample. The samples of a group fork where their prompt ends, turns of a conversation wherever they do.

Legend: `T` packed tokens, `U` of them that are computed, `S` samples, `K` targets, `P` slots of padded rows, `S_b`
rows of one bucket, `L_q` and `L_k` its queries and keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from grpo.transport.prefixes import tree_order
from grpo.transport.records import Bool, Float32, Int32, MicroBatch
from numpy.typing import NDArray

Indices = NDArray[np.int64]
_LOW = np.float32(-1e30)
"""Added to a score that counts for nothing. A row that is padding alone has no finite result with -inf."""
_BUCKET_SPAN = 0.9
_BUCKET_SLACK = 16
"""A bucket takes lengths down to 0.9 of its longest, or to 16 tokens less where that is lower: few calls, few gaps."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """Rows of similar length, padded to the longest. The cost of attention grows with Σ L² of the rows and not with T².

    Example: rows of [2, 3] tokens with nothing in common, padded on the right, are one bucket of shape (2, 3, 3),
    longest first: queries and keys [2, 3, 4, 0, 1, 1], where the second 1 is padding, and slot_of [3, 4, 0, 1, 2].
    """

    queries: torch.Tensor
    """[P] i64 the computed token in each slot; padding repeats the row's token beside it."""
    keys: torch.Tensor
    """[P'] i64 the same for keys, of which a row has at least as many as queries."""
    slot_of: torch.Tensor
    """[U] i64 the slot of each computed token among the queries (one of them where samples share it)."""
    shapes: tuple[tuple[int, int, int], ...]
    """(S_b, L_q, L_k) of each bucket, in the order of the slots."""
    masks: tuple[torch.Tensor | None, ...]
    """[S_b, 1, L_k] f32 of each bucket padded on the left, so low at keys that are padding that they count for nothing;
    None where no key is, or on the right."""

    @property
    def padding(self) -> torch.Tensor:
        """[P] bool True for the slots of queries that are padding."""
        return torch.ones(len(self.queries), dtype=torch.bool).index_fill_(0, self.slot_of, False)

    @property
    def query_sizes(self) -> list[tuple[int, int]]:
        """S_b and L_q of each bucket."""
        return [(count, num_queries) for count, num_queries, _ in self.shapes]


class Layout:
    """The positions of a packed sequence's samples, and the tree that they are."""

    _parts: "Sequence[Layout]" = ()
    """Those that it was joined of; rows of different ones are in one bucket only where these have the same shape."""

    def __init__(
        self, lengths: NDArray[np.integer[Any]], unique: Indices, inverse: Indices, device: torch.device
    ) -> None:
        """`lengths` [S], each at least 1; `unique` and `inverse` are those of `shared_prefixes`."""
        self._lengths, self._unique, self._inverse, self._device = lengths.astype(np.int64), unique, inverse, device
        self._starts = np.cumsum(self._lengths) - self._lengths
        ends = np.searchsorted(unique, self._starts + self._lengths)
        self._runs = np.diff(ends, prepend=0)
        """[S] tokens of each sample's run, the last ones of the sample; 0 if another one begins with all of it."""
        self.longest = int(lengths.max())
        """Tokens of the longest sample."""
        self.shares = len(unique) < len(inverse)
        """True if a packed token is computed for several samples."""
        has_run = self._runs > 0
        self.boundaries = self._cumulative(self._runs[has_run])
        """[R + 1] i32 cumulative lengths of the R runs that are not empty, from 0."""
        self.key_boundaries = self._cumulative(self._lengths[has_run]) if self.shares else self.boundaries
        """[R + 1] i32 cumulative lengths of the samples that they are the ends of."""
        self.longest_run = int(self._runs.max())
        self.unique = to_device(unique, device)
        """[U] i64 the packed tokens that are computed."""
        self.keys = to_device(inverse[np.repeat(has_run, self._lengths)], device)
        """[sum of these samples' tokens] i64 the computed token that each of their tokens is equal to."""

    def _cumulative(self, lengths: Indices) -> torch.Tensor:
        return to_device(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), self._device)

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
    def rows(self) -> Buckets:
        """Whole samples as rows that are padded on the right, which is exact under a causal mask: no real token attends
        to what comes after it. Those that others begin with are left out. Made when first asked for."""
        if self._parts:
            return self._joined([part.rows for part in self._parts])
        has_run = self._runs > 0
        starts, lengths = self._starts[has_run], self._lengths[has_run]
        order, shapes, widths, _ = _in_buckets(lengths, lengths)
        places, real = _slots(starts[order], lengths[order], widths, left=False)
        slot_of = np.empty(len(self._inverse), np.int64)
        slot_of[places[real]] = real
        return self._made(self._inverse[places], None, slot_of[self._unique], shapes, (None,) * len(shapes))

    @cached_property
    def runs(self) -> Buckets:
        """The samples' runs as rows of queries, with the whole samples as their keys. Both are padded on the left, so
        that each query attends to as many keys as its row's last one, less the queries after it. Made when first asked
        for."""
        if self._parts:
            return self._joined([part.runs for part in self._parts])
        has_run = self._runs > 0
        starts, lengths, runs = self._starts[has_run], self._lengths[has_run], self._runs[has_run]
        order, shapes, query_widths, key_widths = _in_buckets(lengths, runs)
        firsts = np.cumsum(runs) - runs
        queries, real = _slots(firsts[order], runs[order], query_widths, left=True)
        slot_of = np.empty(len(self._unique), np.int64)
        slot_of[queries[real]] = real
        masks, keys = self._masks(lengths[order], shapes), None
        if self.shares:
            keys = self._inverse[_slots(starts[order], lengths[order], key_widths, left=True)[0]]
        return self._made(queries, keys, slot_of, shapes, masks)

    def _made(
        self,
        queries: Indices,
        keys: Indices | None,
        slot_of: Indices,
        shapes: tuple[tuple[int, int, int], ...],
        masks: tuple[torch.Tensor | None, ...],
    ) -> Buckets:
        """Moves the rows to the device. `keys`: None if they are the queries."""
        taken = to_device(queries, self._device)
        of_keys = taken if keys is None else to_device(keys, self._device)
        return Buckets(taken, of_keys, to_device(slot_of, self._device), shapes, masks)

    def _masks(self, lengths: Indices, shapes: Sequence[tuple[int, int, int]]) -> tuple[torch.Tensor | None, ...]:
        """Returns the masks of rows of these lengths, padded on the left."""
        ends = np.cumsum([count for count, *_ in shapes])
        masks = list[torch.Tensor | None]()
        for (count, _, width), end in zip(shapes, ends, strict=True):
            is_padding = np.arange(width) < width - lengths[end - count : end, None]
            low = np.where(is_padding, _LOW, np.float32(0))[:, None]
            masks.append(to_device(low, self._device) if is_padding.any() else None)
        return tuple(masks)

    def _joined(self, parts: Sequence[Buckets]) -> Buckets:
        """Returns the parts' rows, longest first; buckets of the same shape without masks are one."""
        pieces = list[tuple[tuple[int, int, int], torch.Tensor | None, torch.Tensor, torch.Tensor]]()
        slot_of, num_slots, first = list[torch.Tensor](), 0, 0
        for part, layout in zip(parts, self._parts, strict=True):
            sizes = ([n * q for n, q, _ in part.shapes], [n * k for n, _, k in part.shapes])
            both = ((part.queries + first).split(sizes[0]), (part.keys + first).split(sizes[1]))
            pieces += zip(part.shapes, part.masks, *both, strict=True)
            slot_of.append(part.slot_of + num_slots)
            num_slots += len(part.queries)
            first += len(layout.unique)
        order = sorted(range(len(pieces)), key=lambda one: pieces[one][0][:0:-1], reverse=True)
        starts = np.cumsum([0, *(len(queries) for _, _, queries, _ in pieces)])
        moved = torch.cat([torch.arange(int(starts[one]), int(starts[one + 1])) for one in order]).to(self._device)
        new_slot = torch.empty_like(moved)
        new_slot[moved] = torch.arange(len(moved), device=self._device)
        shapes, masks = list[tuple[int, int, int]](), list[torch.Tensor | None]()
        for shape, mask, _, _ in (pieces[one] for one in order):
            if shapes and shapes[-1][1:] == shape[1:] and mask is None and masks[-1] is None:
                shapes[-1] = shapes[-1][0] + shape[0], *shape[1:]
            else:
                shapes.append(shape)
                masks.append(mask)
        queries, keys = (torch.cat([pieces[one][place] for one in order]) for place in (2, 3))  # type: ignore[misc]
        return Buckets(queries, keys, new_slot[torch.cat(slot_of)], tuple(shapes), tuple(masks))


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
    """Boundaries of the samples, and the beginnings that they share."""
    before_targets: torch.Tensor
    """[K] i64 indices into U of the tokens before the targets."""
    targets: torch.Tensor
    """[K] i64 ids of the tokens whose log-probability is wanted."""
    temperatures: torch.Tensor
    """[K] f32"""
    distinct: tuple[torch.Tensor, torch.Tensor] | None = None
    """[D] i64 the targets that are computed, and [K] i64 which of them each is equal to, where samples share targets;
    None where all are computed."""
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
    targets: Int32 | None = None,
    device: torch.device,
) -> PackedTokens:
    """Returns samples of `lengths` [S] one after the other, whose targets are the tokens of `loss_mask` [T], at
    `temperatures` [T] (None: 1), with `adapters` [S] (None: the first). No sample's first token may be a target.
    `targets`, a multiple of as many, take these tokens' place as targets."""
    unique, inverse = shared_prefixes(token_ids, lengths, adapters)
    places = np.flatnonzero(loss_mask)
    positions = np.arange(len(token_ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    temperatures = np.ones(len(token_ids), np.float32) if temperatures is None else temperatures
    of_tokens = None if adapters is None else np.repeat(adapters, lengths)[unique].astype(np.int64)
    ids = (token_ids[places] if targets is None else targets).astype(np.int64)
    before, at = inverse[places - 1], temperatures[places]
    if len(ids) > len(places):
        each = len(ids) // len(places)
        before, at = np.repeat(before, each), np.repeat(at, each)
    distinct = _distinct(before, ids, at) if len(unique) < len(inverse) else None
    return PackedTokens(
        token_ids=to_device(token_ids[unique].astype(np.int64), device),
        position_ids=to_device(positions[unique].astype(np.int64), device),
        adapters=None if of_tokens is None else to_device(of_tokens, device),
        layout=Layout(lengths, unique, inverse, device),
        before_targets=to_device(before, device),
        targets=to_device(ids, device),
        temperatures=to_device(at, device),
        distinct=None if distinct is None else (to_device(distinct[0], device), to_device(distinct[1], device)),
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
    adapters: NDArray[np.integer[Any]] | None = None,
) -> tuple[Indices, Indices]:
    """Returns which of T packed tokens to compute, and where each finds its result. Samples share the tokens up to
    where they differ, those of `adapters` [S] that are the same; of one that another begins with none is computed.

    `unique` [U] are ascending indices into T, `inverse` [T] indices into `unique`.
    Example: ids [5, 6, 7, 5, 6, 8] of two samples of 3: unique [2, 3, 4, 5], inverse [1, 2, 0, 1, 2, 3].
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = (ends - lengths).tolist()
    samples = np.split(token_ids, ends[:-1])
    order, shared = tree_order(samples, None if adapters is None else adapters.tolist())
    source = np.arange(len(token_ids))
    before = 0
    for sample, num in zip(order, shared, strict=True):
        if num:
            source[starts[sample] : starts[sample] + num] = source[starts[before] : starts[before] + num]
        before = sample
    is_unique = source == np.arange(len(token_ids))
    place = np.cumsum(is_unique) - 1
    return np.flatnonzero(is_unique), place[source]


def _distinct(before: Indices, targets: Indices, temperatures: Float32) -> tuple[Indices, Indices] | None:
    """Returns `PackedTokens.distinct` of targets that follow computed tokens."""
    keys = before * (targets.max(initial=0) + 1) + targets
    if (temperatures != temperatures[:1]).any():
        values, numbers = np.unique(temperatures, return_inverse=True)
        keys = keys * len(values) + numbers
    _, first, same = np.unique(keys, return_index=True, return_inverse=True)
    return None if len(first) == len(keys) else (first, same)


def _in_buckets(lengths: Indices, runs: Indices) -> tuple[Indices, tuple[tuple[int, int, int], ...], Indices, Indices]:
    """Divides rows of `runs` [R] queries and `lengths` [R] keys into buckets, longest first. Returns the order of the
    rows, the buckets' shapes, and by that order the width of each row's queries and keys."""
    buckets = [inner for outer in _alike(lengths, np.arange(len(lengths))) for inner in _alike(runs, outer)]
    buckets.sort(key=lambda rows: (lengths[rows].max(), runs[rows].max()), reverse=True)
    shapes = tuple((len(rows), int(runs[rows].max()), int(lengths[rows].max())) for rows in buckets)
    counts, query_widths, key_widths = zip(*shapes, strict=True)
    return np.concatenate(buckets), shapes, np.repeat(query_widths, counts), np.repeat(key_widths, counts)


def _alike(lengths: Indices, rows: Indices) -> list[Indices]:
    """Returns the rows by buckets, longest first, that each take rows of similar length."""
    rows = rows[np.argsort(-lengths[rows], kind="stable")]
    descending, buckets, start = lengths[rows], [], 0
    while start < len(rows):
        longest = int(descending[start])
        shortest = min(int(_BUCKET_SPAN * longest), longest - _BUCKET_SLACK)
        end = int(np.searchsorted(-descending, -shortest, side="right"))
        buckets.append(rows[start:end])
        start = end
    return buckets


def _slots(starts: Indices, lengths: Indices, widths: Indices, *, left: bool) -> tuple[Indices, Indices]:
    """Returns the place in each slot of rows that are padded to `widths`, on the left or the right, and the slots that
    are not padding."""
    offsets = np.arange(widths.sum()) - np.repeat(np.cumsum(widths) - widths, widths)
    if left:
        offsets -= np.repeat(widths - lengths, widths)
    starts, lengths = np.repeat(starts, widths), np.repeat(lengths, widths)
    return starts + np.clip(offsets, 0, lengths - 1), np.flatnonzero((offsets >= 0) & (offsets < lengths))

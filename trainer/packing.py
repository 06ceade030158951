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
_BUCKET_SPAN = 0.8
_BUCKET_SLACK = 16
"""A bucket takes lengths down to 0.8 of its longest, or to 16 tokens less where that is lower: few calls, few gaps."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """Rows of similar length, padded on the right to the longest. Right padding is exact under a causal mask: no real
    token attends to what comes after it. Its cost grows with Σ L² of the rows and not with T².

    Example: rows of [2, 3] tokens with nothing in common are one bucket of shape (2, 3, 3), longest first: queries and
    keys [2, 3, 4, 0, 1, 1], where the second 1 is padding, and slot_of [3, 4, 0, 1, 2].
    """

    queries: torch.Tensor
    """[P] i64 the computed token in each slot; padding repeats the row's last token."""
    keys: torch.Tensor
    """[P] i64 the same for keys, of which a row has as many as queries where it attends to itself."""
    tokens: torch.Tensor | None
    """[N] i64 the computed tokens that have a slot; None: all [U]."""
    slot_of: torch.Tensor
    """[N] i64 the slot of each (one of them where samples share it)."""
    shapes: tuple[tuple[int, int, int], ...]
    """(S_b, L_q, L_k) of each bucket, in the order of the slots."""
    masks: tuple[torch.Tensor | None, ...]
    """[S_b, 1, 1, L_k] f32 of each bucket, -inf at keys that are padding, if its rows attend to others; None where no
    key is."""
    repeats: bool
    """True if a computed token is in several rows' keys."""


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
        """Whole samples as padded rows, but for those that others begin with; made when first asked for."""
        if self._parts:
            return self._joined([part.rows for part in self._parts])
        return self._causal(np.zeros_like(self._starts))

    @cached_property
    def runs(self) -> Buckets:
        """The samples as padded rows, of those that `before` has what comes after it; made when first asked for."""
        if not self._is_split.any():
            return self.rows
        if self._parts:
            return self._joined([part.runs for part in self._parts])
        return self._causal(np.where(self._is_split, self._lengths - self._runs, 0))

    @cached_property
    def before(self) -> Buckets | None:
        """The runs that attend to what is before them apart from themselves, one row for all that fork at one place,
        with the tokens up to there as keys; None without such runs."""
        if not self._is_split.any():
            return None
        if self._parts:
            return self._joined([part.before for part in self._parts])
        split = np.flatnonzero(self._is_split)
        forks = self._starts[split] + self._lengths[split] - self._runs[split]
        by_place = np.argsort(self._inverse[forks - 1], kind="stable")
        split, forks = split[by_place], forks[by_place]
        _, firsts = np.unique(self._inverse[forks - 1], return_index=True)
        ends = np.cumsum(self._runs)
        queries = np.concatenate([np.arange(ends[sample] - self._runs[sample], ends[sample]) for sample in split])
        counts = np.add.reduceat(self._runs[split], firsts)
        return self._bucketed(
            *(queries, np.cumsum(counts) - counts, counts, np.arange(len(queries))),
            *(self._starts[split[firsts]], forks[firsts] - self._starts[split[firsts]]),
            tokens=queries,
        )

    @cached_property
    def _is_split(self) -> NDArray[np.bool_]:
        """[S] whose run attends to what is before it apart from itself. Of L tokens that share F, a row of all of them
        has L² / 2 scores, and F² / 2 less so: not worth another pass unless F is more than half."""
        return (self._runs > 0) & (2 * self._runs < self._lengths)

    def _causal(self, begins: Indices) -> Buckets:
        """Returns samples from these tokens on as rows that attend to themselves."""
        chosen = self._runs > 0
        starts, lengths = (self._starts + begins)[chosen], (self._lengths - begins)[chosen]
        return self._bucketed(self._inverse, starts, lengths, self._unique)

    def _bucketed(
        self,
        source: Indices,
        starts: Indices,
        lengths: Indices,
        wanted: Indices,
        key_starts: Indices | None = None,
        key_lengths: Indices | None = None,
        *,
        tokens: Indices | None = None,
    ) -> Buckets:
        """Returns rows of `lengths` [R] tokens of `source` from `starts` [R] on, which attend to themselves or to other
        packed tokens. `wanted` [N] are the places in `source` whose slots are asked for."""
        of_keys = lengths if key_lengths is None else key_lengths
        buckets = [inner for outer in _alike(of_keys, np.arange(len(lengths))) for inner in _alike(lengths, outer)]
        buckets.sort(key=lambda rows: (of_keys[rows].max(), lengths[rows].max()), reverse=True)
        shapes = tuple((len(rows), int(lengths[rows].max()), int(of_keys[rows].max())) for rows in buckets)
        order, counts = np.concatenate(buckets), [count for count, _, _ in shapes]
        places, real = _slots(starts[order], lengths[order], np.repeat([length for _, length, _ in shapes], counts))
        slot_of = np.empty(len(source), dtype=np.int64)
        slot_of[places[real]] = real
        queries = keys = to_device(source[places], self._device)
        masks: list[torch.Tensor | None] = [None] * len(shapes)
        if key_starts is not None and key_lengths is not None:
            widths = np.repeat([length for _, _, length in shapes], counts)
            keys = to_device(self._inverse[_slots(key_starts[order], key_lengths[order], widths)[0]], self._device)
            masks = [self._mask(key_lengths[rows]) for rows in buckets]
        repeats = tokens is not None or len(real) > len(wanted)
        slots = to_device(slot_of[wanted], self._device)
        with_slots = None if tokens is None else to_device(tokens, self._device)
        return Buckets(queries, keys, with_slots, slots, shapes, tuple(masks), repeats)

    def _mask(self, lengths: Indices) -> torch.Tensor | None:
        if (lengths == lengths[0]).all():
            return None
        is_padding = np.arange(lengths.max()) >= lengths[:, None]
        return to_device(np.where(is_padding, -np.inf, 0.0).astype(np.float32)[:, None, None], self._device)

    def _joined(self, parts: Sequence[Buckets | None]) -> Buckets:
        """Returns the parts' rows, longest first; buckets of the same shape without masks are one."""
        pieces = list[tuple[tuple[int, int, int], torch.Tensor | None, torch.Tensor, torch.Tensor]]()
        tokens, slot_of, num_slots, first = list[torch.Tensor](), list[torch.Tensor](), 0, 0
        for part, layout in zip(parts, self._parts, strict=True):
            if part is not None:
                sizes = ([n * q for n, q, _ in part.shapes], [n * k for n, _, k in part.shapes])
                both = ((part.queries + first).split(sizes[0]), (part.keys + first).split(sizes[1]))
                pieces += zip(part.shapes, part.masks, *both, strict=True)
                tokens.append(
                    torch.arange(len(layout.unique), device=self._device) if part.tokens is None else part.tokens
                )
                tokens[-1] = tokens[-1] + first
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
        every = all(part is not None and part.tokens is None for part in parts)
        return Buckets(
            queries,
            keys,
            None if every else torch.cat(tokens),
            new_slot[torch.cat(slot_of)],
            tuple(shapes),
            tuple(masks),
            any(part.repeats for part in parts if part is not None),
        )


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


def _slots(starts: Indices, lengths: Indices, widths: Indices) -> tuple[Indices, Indices]:
    """Returns the place in each slot of rows that are padded to `widths`, and the slots that are not padding."""
    offsets = np.arange(widths.sum()) - np.repeat(np.cumsum(widths) - widths, widths)
    starts, lengths = np.repeat(starts, widths), np.repeat(lengths, widths)
    return starts + np.minimum(offsets, lengths - 1), np.flatnonzero(offsets < lengths)

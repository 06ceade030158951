"""Hints and preference pairs as packed sequences of their own, beside the samples that a micro-batch holds.

Legend: `K` aligned or continued tokens of one pack, `P` pairs of one pack. No pack has more than `sequence_len` tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.batch import PackedTokens, pack
from trainer.layout import to_device
from transport.records import Bool, Hint, Int32, MicroBatch, PreferencePair


@dataclass(frozen=True, slots=True, kw_only=True)
class HintedSample:
    """One hint with the tokens of its sample."""

    token_ids: Int32
    """[L] of the sample, up to the last token that is compared."""
    hint: Hint
    adapter: int = 0
    """That of the sample, with which both contexts are computed."""

    @property
    def teacher_token_ids(self) -> Int32:
        """[L'] of the context with the hint, up to the last token that is compared."""
        return self.hint.teacher_token_ids[: int(self.hint.teacher_index[-1]) + 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class HintPack:
    """What the self-distillation loss needs: the same tokens in both contexts, in the same order."""

    student: PackedTokens
    """The samples; the aligned tokens are the targets."""
    teacher: PackedTokens
    """The contexts with the hints."""
    weights: torch.Tensor
    """[K] f32 weight of each aligned token's hint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPack:
    """What the preference loss needs."""

    tokens: PackedTokens
    """Prompt and chosen, then prompt and rejected continuation of each pair; the continuations are the targets."""
    continuation_ids: torch.Tensor
    """[K] i64: 2p for the chosen one of pair p, 2p + 1 for the rejected one."""
    chosen_ref_logprobs: torch.Tensor
    """[P] f32"""
    rejected_ref_logprobs: torch.Tensor
    """[P] f32"""

    def continuation_logprobs(self, logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[K] → [P], [P]: sums over the chosen and over the rejected continuations."""
        sums = logprobs.new_zeros(2 * len(self.chosen_ref_logprobs)).index_add(0, self.continuation_ids, logprobs)
        return sums[0::2], sums[1::2]


def plan_hints(batch: MicroBatch, *, sequence_len: int) -> list[list[HintedSample]]:
    """The micro-batch's hints, by pack. Sample and context take at most `sequence_len` tokens each."""
    starts, hinted = batch.starts, []
    for sample, hint in batch.hints:
        start = int(starts[sample])
        token_ids = batch.token_ids[start : start + int(hint.student_index[-1]) + 1]
        adapter = 0 if batch.adapters is None else int(batch.adapters[sample])
        hinted.append(HintedSample(token_ids=token_ids, hint=hint, adapter=adapter))
    sizes = [max(len(one.token_ids), len(one.teacher_token_ids)) for one in hinted]
    return [[hinted[i] for i in chosen] for chosen in first_fit(sizes, capacity=sequence_len)]


def plan_pairs(batch: MicroBatch, *, sequence_len: int) -> list[list[PreferencePair]]:
    """The micro-batch's pairs, by pack. A pair's prompt counts once, because it is computed once."""
    sizes = [len(pair.prompt_ids) + len(pair.chosen_ids) + len(pair.rejected_ids) for pair in batch.pairs]
    return [[batch.pairs[i] for i in chosen] for chosen in first_fit(sizes, capacity=sequence_len)]


def first_fit(sizes: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Indices by bin: each goes into the first bin with room for it, in their order.

    A size above `capacity` has a bin of its own. Example: sizes [3, 4, 2], capacity 5: [[0, 2], [1]].
    """
    bins: list[list[int]] = []
    rooms: list[int] = []
    for index, size in enumerate(sizes):
        fitting = (b for b, room in enumerate(rooms) if size <= room)
        if (b := next(fitting, None)) is None:
            bins.append([index])
            rooms.append(capacity - size)
        else:
            bins[b].append(index)
            rooms[b] -= size
    return bins


def hint_pack(hinted: Sequence[HintedSample], *, device: torch.device) -> HintPack:
    """Tensors of one pack."""
    counts = [len(one.hint.student_index) for one in hinted]
    weights = np.repeat(np.array([one.hint.weight for one in hinted], np.float32), counts)
    adapters = [one.adapter for one in hinted]
    return HintPack(
        student=_packed([(one.token_ids, one.hint.student_index) for one in hinted], adapters, device),
        teacher=_packed([(one.teacher_token_ids, one.hint.teacher_index) for one in hinted], adapters, device),
        weights=to_device(weights, device),
    )


def pair_pack(pairs: Sequence[PreferencePair], *, device: torch.device) -> PairPack:
    """Tensors of one pack."""
    rows, counts = [], []
    for pair in pairs:
        for continuation in (pair.chosen_ids, pair.rejected_ids):
            start, count = len(pair.prompt_ids), len(continuation)
            rows.append((np.concatenate([pair.prompt_ids, continuation]), np.arange(start, start + count)))
            counts.append(count)
    references = np.array([(pair.chosen_ref_logprob, pair.rejected_ref_logprob) for pair in pairs], np.float32)
    chosen, rejected = to_device(references, device).unbind(1)
    return PairPack(
        tokens=_packed(rows, [pair.adapter for pair in pairs for _ in range(2)], device),
        continuation_ids=to_device(np.repeat(np.arange(len(counts)), counts), device),
        chosen_ref_logprobs=chosen,
        rejected_ref_logprobs=rejected,
    )


def idle_tokens(device: torch.device) -> PackedTokens:
    """The shortest sequence that has a target, for a pass that only keeps the ranks in step."""
    return _packed([(np.ones(2, np.int32), np.array([1]))], [0], device)


def _packed(
    rows: Sequence[tuple[Int32, NDArray[np.integer[Any]]]], adapters: Sequence[int], device: torch.device
) -> PackedTokens:
    """Sequences of (token ids, places of the targets) at temperature 1, each with its adapter."""
    lengths = np.array([len(token_ids) for token_ids, _ in rows], np.int32)
    loss_mask: Bool = np.zeros(lengths.sum(), np.bool_)
    for start, (_, places) in zip(np.cumsum(lengths) - lengths, rows, strict=True):
        loss_mask[start + places] = True
    return pack(
        np.concatenate([token_ids for token_ids, _ in rows]),
        lengths,
        loss_mask=loss_mask,
        position_ids=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        temperatures=np.ones(len(loss_mask), np.float32),
        adapters=np.array(adapters, np.int32) if any(adapters) else None,
        device=device,
    )

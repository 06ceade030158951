"""Packing samples into micro-batches: bounded in tokens, balanced over ranks, nothing lost.

Legend: `S` samples, `B` micro-batches of one rank, `R` ranks, `T` tokens of one micro-batch. Pure: no I/O, no settings.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from transport.types import Float32, Int32, MicroBatch, TrainingSample


def pack(
    samples: Sequence[TrainingSample], *, seq_len: int, num_ranks: int, run_id: str, step: int
) -> list[list[MicroBatch]]:
    """`samples` as micro-batches [R][B] of at most `seq_len` tokens. Every rank has the same number B, unless samples
    are too few for that.

    Raises ValueError for a sample longer than `seq_len`, and where there are fewer samples than ranks.
    """
    lengths = [len(sample.token_ids) for sample in samples]
    plan = spread(plan_bins(lengths, capacity=seq_len, num_ranks=num_ranks), lengths, num_ranks=num_ranks)
    num_loss_tokens = int(sum(np.count_nonzero(sample.loss_mask) for sample in samples))
    return [
        [
            _micro_batch(
                [samples[s] for s in chosen],
                run_id=run_id,
                step=step,
                rank=rank,
                index=index,
                num_micro_batches=len(bins),
                num_loss_tokens=num_loss_tokens,
            )
            for index, chosen in enumerate(bins)
        ]
        for rank, bins in enumerate(plan)
    ]


def plan_bins(lengths: Sequence[int], *, capacity: int, num_ranks: int) -> list[list[int]]:
    """Indices of samples by bin: as few bins as possible in multiples of `num_ranks`, none over `capacity` tokens.

    First the longest to the emptiest bin, which balances; where that leaves a sample without room, the longest to
    the fullest bin that still takes it, which packs tighter; then more bins. No bin is empty, so where samples are too
    few for the next multiple, each has a bin of its own.
    """
    if len(lengths) < num_ranks:
        raise ValueError(f"{len(lengths)} samples cannot be spread over {num_ranks} ranks; raise batch_size")
    if (longest := max(lengths)) > capacity:
        raise ValueError(f"a sample of {longest} tokens does not fit into seq_len = {capacity}; raise seq_len")
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    lower_bound = -(-sum(lengths) // capacity)
    num_bins = -(-lower_bound // num_ranks) * num_ranks
    while num_bins < len(lengths):
        bins = (
            _emptiest_first(order, lengths, capacity, num_bins)
            or _tightest_first(order, lengths, capacity, num_bins, num_seeded=num_bins)
            or _tightest_first(order, lengths, capacity, num_bins, num_seeded=0)
        )
        if bins is not None:
            return bins
        num_bins += num_ranks
    return [[sample] for sample in order]


def _emptiest_first(order: list[int], lengths: Sequence[int], capacity: int, num_bins: int) -> list[list[int]] | None:
    """Every bin gets a sample before any gets two."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, b) for b in range(num_bins)]
    for sample in order:
        used, b = heap[0]
        used += lengths[sample]
        if used > capacity:
            return None
        bins[b].append(sample)
        heapq.heapreplace(heap, (used, b))
    return bins


def _tightest_first(
    order: list[int], lengths: Sequence[int], capacity: int, num_bins: int, *, num_seeded: int
) -> list[list[int]] | None:
    """Best fit decreasing, after the `num_seeded` longest have a bin each: neither start is always the better one.
    Bins that stay empty take a sample each from the others."""
    bins = [[sample] for sample in order[:num_seeded]] + [[] for _ in range(num_bins - num_seeded)]
    rooms = sorted((capacity - sum(lengths[sample] for sample in chosen), b) for b, chosen in enumerate(bins))
    for sample in order[num_seeded:]:
        position = bisect_left(rooms, (lengths[sample], -1))
        if position == len(rooms):
            return None
        room, b = rooms.pop(position)
        bins[b].append(sample)
        insort(rooms, (room - lengths[sample], b))
    for chosen in bins:
        if not chosen:
            chosen.append(max(bins, key=len).pop())
    return bins


def spread(bins: Sequence[Sequence[int]], lengths: Sequence[int], *, num_ranks: int) -> list[list[Sequence[int]]]:
    """Bins [R][B] by rank: as equal a number each as can be, and bins of like size side by side, because ranks wait
    for each other at every micro-step. Within a micro-step the rank with the fewest tokens so far takes the fullest."""
    sizes = [sum(lengths[sample] for sample in chosen) for chosen in bins]
    order = sorted(range(len(bins)), key=sizes.__getitem__, reverse=True)
    ranks: list[list[Sequence[int]]] = [[] for _ in range(num_ranks)]
    totals = [0] * num_ranks
    for start in range(0, len(order), num_ranks):
        emptiest = sorted(range(num_ranks), key=totals.__getitem__)
        for rank, b in zip(emptiest, order[start : start + num_ranks], strict=False):
            ranks[rank].append(bins[b])
            totals[rank] += sizes[b]
    return ranks


def _micro_batch(
    samples: Sequence[TrainingSample],
    *,
    run_id: str,
    step: int,
    rank: int,
    index: int,
    num_micro_batches: int,
    num_loss_tokens: int,
) -> MicroBatch:
    lengths = np.array([len(sample.token_ids) for sample in samples], np.int32)
    return MicroBatch(
        run_id=run_id,
        step=step,
        rank=rank,
        index=index,
        num_micro_batches=num_micro_batches,
        num_loss_tokens=num_loss_tokens,
        token_ids=np.concatenate([sample.token_ids for sample in samples]),
        sequence_lengths=lengths,
        loss_mask=np.concatenate([sample.loss_mask for sample in samples]),
        inference_logprobs=np.concatenate([sample.inference_logprobs for sample in samples]),
        advantages=_stream([sample.advantages for sample in samples], lengths),
        temperatures=_stream([sample.temperatures for sample in samples], lengths),
        version_runs=_version_runs(samples),
        teacher_logprobs=_teacher(samples),
        rollout_ids=tuple(sample.rollout_id for sample in samples),
    )


def _stream(values: Sequence[Float32 | float], lengths: Int32) -> Float32:
    """[S] where each sample has one number, [T] otherwise."""
    if all(isinstance(value, float) for value in values):
        return np.array(values, np.float32)
    rows = zip(values, lengths, strict=True)
    return np.concatenate([np.broadcast_to(np.asarray(v, np.float32), (length,)) for v, length in rows])


def _version_runs(samples: Sequence[TrainingSample]) -> Int32:
    """[R, 2] runs of (version, number of tokens); neighbours of one version are one run."""
    runs = np.array([run for sample in samples for run in sample.policy_versions], np.int32)
    starts = np.flatnonzero(np.diff(runs[:, 0], prepend=runs[0, 0] - 1))
    return np.stack([runs[starts, 0], np.add.reduceat(runs[:, 1], starts)], axis=1).astype(np.int32)


def _teacher(samples: Sequence[TrainingSample]) -> Float32 | None:
    streams = [sample.teacher_logprobs for sample in samples if sample.teacher_logprobs is not None]
    if not streams:
        return None
    if len(streams) != len(samples):
        raise ValueError(f"{len(streams)} of {len(samples)} samples have teacher log-probabilities; give all or none")
    return np.concatenate(streams)

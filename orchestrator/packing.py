"""Packing samples into micro-batches: bounded in tokens, balanced over ranks, nothing lost. Samples that begin with the
same tokens are kept together, because the trainer computes those once in a micro-batch, and they count once.

Legend: `S` samples, `B` micro-batches of one rank, `R` ranks, `T` tokens; of the whole step, where not said otherwise.
A bin is the list of a micro-batch's samples by index. Pure: no I/O, no settings.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import numpy as np
from grpo.transport.prefixes import tree_order
from grpo.transport.records import Float32, Int32, MicroBatch, PreferencePair, Tolerance, TrainingSample
from numpy.typing import NDArray

FILLER_ID = "filler"
"""Stands in `rollout_ids` for the one token without loss that a rank gets which would have nothing to do."""

LEAST_SHARED = 0.02
"""Share of a batch's tokens below which samples that share go wherever they fit best."""
Bin = list[int]


def pack(
    samples: Sequence[TrainingSample],
    *,
    capacity: int,
    num_ranks: int,
    run_id: str,
    step: int,
    pairs: Sequence[PreferencePair] = (),
    tolerances: Mapping[str, Tolerance] = MappingProxyType({}),
) -> list[list[MicroBatch]]:
    """`samples` as micro-batches [R][B] of at most `capacity` tokens that are computed. Every rank has the same number
    B: where samples are too few for that, a micro-batch of one token without loss takes the place of a missing one.
    `pairs` go with the first micro-batch of each rank, in which they are sequences of their own, each to the rank that
    has the fewest tokens of them. `tolerances` are of the servers that sampled.

    Raises ValueError without samples, and for a sample longer than `capacity`: nothing is ever cut off.
    """
    if 0 < (num_taught := sum(sample.teacher_logprobs is not None for sample in samples)) < len(samples):
        raise ValueError(f"{num_taught} of {len(samples)} samples have teacher log-probabilities; give all or none")
    ids, adapters = [sample.token_ids for sample in samples], [sample.adapter for sample in samples]
    ranks = plan_tree(ids, adapters, capacity=capacity, num_ranks=num_ranks)
    pairs_of_rank = _spread_pairs(pairs, num_ranks)
    common: dict[str, Any] = {
        "run_id": run_id,
        "step": step,
        "num_micro_batches": len(ranks[0]),
        "tolerances": _tolerances({sample.server for sample in samples}, tolerances),
    }
    return [
        [
            _micro_batch(
                [samples[one] for one in chosen] or [_filler(samples[0])],
                rank=rank,
                index=index,
                pairs=() if index else pairs_of_rank[rank],
                **common,
            )
            for index, chosen in enumerate(bins)
        ]
        for rank, bins in enumerate(ranks)
    ]


def _micro_batch(samples: Sequence[TrainingSample], **fields: Any) -> MicroBatch:
    lengths = np.array([len(sample.token_ids) for sample in samples], np.int32)
    taught = [sample.teacher_logprobs for sample in samples if sample.teacher_logprobs is not None]
    adapters = np.array([sample.adapter for sample in samples], np.int32)
    return MicroBatch(
        token_ids=np.concatenate([sample.token_ids for sample in samples]),
        sequence_lengths=lengths,
        loss_mask=np.concatenate([sample.loss_mask for sample in samples]),
        inference_logprobs=np.concatenate([sample.inference_logprobs for sample in samples]),
        advantages=_stream([sample.advantages for sample in samples], lengths),
        temperatures=_stream([sample.temperatures for sample in samples], lengths),
        teacher_logprobs=np.concatenate(taught) if taught else None,
        adapters=adapters if adapters.any() else None,
        version_runs=_version_runs(samples),
        hints=tuple((index, sample.hint) for index, sample in enumerate(samples) if sample.hint is not None),
        rollout_ids=tuple(sample.rollout_id for sample in samples),
        envs=tuple(sample.env for sample in samples),
        servers=tuple(sample.server for sample in samples),
        **fields,
    )


def _tolerances(servers: Iterable[str], known: Mapping[str, Tolerance]) -> dict[str, Tolerance]:
    """Returns the tolerances of the servers of samples; for several servers of one sample the widest of theirs."""
    found = {}
    for server in sorted(servers):
        if server and all(name in known for name in server.split()):
            found[server] = max((known[name] for name in server.split()), key=lambda one: (one.measure, one.gap))
    return found


def _stream(values: Sequence[Float32 | float], lengths: Int32) -> Float32:
    """[S] where each sample has one number, [T] otherwise."""
    if all(isinstance(value, float) for value in values):
        return np.array(values, np.float32)
    rows = zip(values, lengths, strict=True)
    return np.concatenate([np.broadcast_to(np.asarray(v, np.float32), (length,)) for v, length in rows])


def _version_runs(samples: Sequence[TrainingSample]) -> Int32:
    """[runs, 2] of (version, number of tokens), in which neighbours of one version are one run."""
    runs = np.array([run for sample in samples for run in sample.policy_versions], np.int32)
    starts = np.flatnonzero(np.diff(runs[:, 0], prepend=-1))
    return np.stack([runs[starts, 0], np.add.reduceat(runs[:, 1], starts)], axis=1).astype(np.int32)


def _filler(sample: TrainingSample) -> TrainingSample:
    """The first token of `sample`, which no loss can reach."""
    return TrainingSample(
        token_ids=sample.token_ids[:1],
        loss_mask=np.zeros(1, np.bool_),
        inference_logprobs=np.zeros(1, np.float32),
        advantages=0.0,
        temperatures=1.0,
        teacher_logprobs=None if sample.teacher_logprobs is None else np.zeros(1, np.float32),
        policy_versions=((sample.policy_versions[0][0], 1),),
        env=sample.env,
        group_id=FILLER_ID,
        rollout_id=FILLER_ID,
        reward=0.0,
        stop_reason=sample.stop_reason,
    )


# --- which sample goes where ---


def plan_tree(samples: Sequence[Int32], adapters: Sequence[int], *, capacity: int, num_ranks: int) -> list[list[Bin]]:
    """Bins [R][B] of at most `capacity` computed tokens. What shares goes as one into a bin; how much is taken for one
    is what leaves the ranks the least to do, each micro-step as long as its fullest bin. Raises as `plan` does."""
    lengths = [len(ids) for ids in samples]
    apart = plan(lengths, capacity=capacity, num_ranks=num_ranks)
    order, shared = tree_order(samples, adapters)
    if sum(shared) < LEAST_SHARED * sum(lengths):
        return apart
    in_order, of_shared = [lengths[sample] for sample in order], np.array(shared)
    place = {sample: number for number, sample in enumerate(order)}
    found = [[[[place[sample] for sample in chosen] for chosen in bins] for bins in apart]]
    for limit in (capacity, capacity // 4, capacity // 16):
        units, sizes = _units(in_order, shared, limit)
        ranks = plan(sizes, capacity=capacity, num_ranks=num_ranks)
        found.append([[[one for unit in chosen for one in units[unit]] for chosen in bins] for bins in ranks])

    def busiest(ranks: Sequence[Sequence[Bin]]) -> int:
        sizes = [[_num_computed(chosen, in_order, of_shared) for chosen in bins] for bins in ranks]
        return sum(map(max, zip(*sizes, strict=True)))

    best = min(found, key=busiest)
    return [[[order[one] for one in sorted(chosen)] for chosen in bins] for bins in best]


def _units(lengths: Sequence[int], shared: Sequence[int], limit: int) -> tuple[list[range], list[int]]:
    """Neighbours in the tree's order [S] that go into one bin, of at most `limit` computed tokens, and how many these
    are. Those join first that share most, if that is an eighth of the smaller one."""
    first, last, sizes = list(range(len(lengths))), list(range(len(lengths))), list(lengths)
    # first[l] of a unit's last sample l, last[f] and sizes[f] of its first one f
    for right in sorted(range(1, len(lengths)), key=lambda one: -shared[one]):
        left = first[right - 1]
        total = sizes[left] + sizes[right] - shared[right]
        if total <= limit and 8 * shared[right] >= min(sizes[left], sizes[right]):
            first[last[right]], last[left], sizes[left] = left, last[right], total
            last[right] = -1
    kept = [one for one in range(len(lengths)) if last[one] >= 0]
    return [range(one, last[one] + 1) for one in kept], [sizes[one] for one in kept]


def _num_computed(chosen: Bin, lengths: Sequence[int], shared: NDArray[np.int64]) -> int:
    """Tokens that are computed of samples at these places in the tree's order: two share what all between them do."""
    places = np.sort(np.array(chosen, np.int64))
    total = sum(lengths[one] for one in chosen)
    if len(places) < 2:
        return total
    return total - int(np.minimum.reduceat(shared[: places[-1] + 1], places[:-1] + 1).sum())


def plan(lengths: Sequence[int], *, capacity: int, num_ranks: int) -> list[list[Bin]]:
    """Bins [R][B] of at most `capacity` tokens. Samples go longest first into the fullest bin that takes them, which
    tells how many bins there are; then into the emptiest of so many, which balances them, where they fit so as well.
    Where samples are too few for B bins a rank, the last bins are empty.

    Raises ValueError without samples, and for a sample longer than `capacity`.
    """
    if not lengths:
        raise ValueError("a batch without samples cannot be packed; give at least one")
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    if (longest := lengths[order[0]]) > capacity:
        raise ValueError(
            f"a sample of {longest} tokens does not fit into a micro-batch of {capacity}; raise micro_batch_tokens"
        )
    bins = _fullest_first(order, lengths, capacity)
    num_bins = min(-(-len(bins) // num_ranks) * num_ranks, len(lengths))
    while len(bins) < num_bins:
        bins.append([max(bins, key=len).pop()])
    return _spread(_emptiest_first(order, lengths, capacity, num_bins) or bins, lengths, num_ranks)


def _fullest_first(order: Sequence[int], lengths: Sequence[int], capacity: int) -> list[Bin]:
    bins: list[Bin] = []
    rooms: list[tuple[int, int]] = []
    for sample in order:
        position = bisect_left(rooms, (lengths[sample], -1))
        room, b = rooms.pop(position) if position < len(rooms) else (capacity, len(bins))
        if b == len(bins):
            bins.append([])
        bins[b].append(sample)
        insort(rooms, (room - lengths[sample], b))
    return bins


def _emptiest_first(order: Sequence[int], lengths: Sequence[int], capacity: int, num_bins: int) -> list[Bin] | None:
    """None where a sample finds no room so."""
    bins: list[Bin] = [[] for _ in range(num_bins)]
    heap = [(0, b) for b in range(num_bins)]
    for sample in order:
        used, b = heap[0]
        if used + lengths[sample] > capacity:
            return None
        bins[b].append(sample)
        heapq.heapreplace(heap, (used + lengths[sample], b))
    return bins


def _spread(bins: Sequence[Bin], lengths: Sequence[int], num_ranks: int) -> list[list[Bin]]:
    """Bins [R][B], those of like size side by side, because ranks wait for each other at every micro-step, and the
    fullest of a micro-step to the rank with the fewest tokens so far."""
    sized = [(sum(lengths[sample] for sample in chosen), chosen) for chosen in bins]
    sized.sort(key=itemgetter(0), reverse=True)
    sized += [(0, [])] * (-len(sized) % num_ranks)
    ranks: list[list[Bin]] = [[] for _ in range(num_ranks)]
    totals = [0] * num_ranks
    for start in range(0, len(sized), num_ranks):
        emptiest = sorted(range(num_ranks), key=totals.__getitem__)
        for rank, (size, chosen) in zip(emptiest, sized[start : start + num_ranks], strict=True):
            ranks[rank].append(chosen)
            totals[rank] += size
    return ranks


def _spread_pairs(pairs: Sequence[PreferencePair], num_ranks: int) -> list[tuple[PreferencePair, ...]]:
    """[R] longest first, each to the rank that has the fewest tokens so far."""
    ranks: list[list[PreferencePair]] = [[] for _ in range(num_ranks)]
    num_tokens = [0] * num_ranks
    for pair in sorted(pairs, key=pair_len, reverse=True):
        rank = num_tokens.index(min(num_tokens))
        ranks[rank].append(pair)
        num_tokens[rank] += pair_len(pair)
    return [tuple(chosen) for chosen in ranks]


def pair_len(pair: PreferencePair) -> int:
    """Tokens that the trainer computes: the prompt once."""
    return len(pair.prompt_ids) + len(pair.chosen_ids) + len(pair.rejected_ids)

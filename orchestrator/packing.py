"""Packing samples into micro-batches: bounded in tokens, balanced over ranks, nothing lost.

Legend: `S` samples, `B` micro-batches of one rank, `R` ranks, `T` tokens; of the whole step, where not said otherwise.
A bin is the list of a micro-batch's samples by index. Pure: no I/O, no settings.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from transport.records import Bool, Float32, Hint, Int32, MicroBatch, PreferencePair, TrainingSample

FILLER_ID = "filler"
"""Stands in `rollout_ids` for the one token without loss that a rank gets which would have nothing to do."""

Bin = list[int]


def pack(
    samples: Sequence[TrainingSample],
    *,
    seq_len: int,
    num_ranks: int,
    run_id: str,
    step: int,
    pairs: Sequence[PreferencePair] = (),
) -> list[list[MicroBatch]]:
    """`samples` as micro-batches [R][B] of at most `seq_len` tokens. Every rank has the same number B: where samples
    are too few for that, a micro-batch of one token without loss takes the place of a missing one. `pairs` go with the
    first micro-batch of each rank, in which they are sequences of their own, each to the rank that has the fewest
    tokens of them.

    Raises ValueError without samples, and for a sample longer than `seq_len`: nothing is ever cut off.
    """
    ranks = plan([len(sample.token_ids) for sample in samples], capacity=seq_len, num_ranks=num_ranks)
    filler = len(samples)
    bins = [chosen or [filler] for bins_of_rank in ranks for chosen in bins_of_rank]
    packed = _Packed.of([*samples, _filler(samples[0])], bins)
    num_micro_batches, num_loss_tokens = len(ranks[0]), int(np.count_nonzero(packed.loss_mask))
    num_hint_tokens = sum(len(hint.student_index) for _, hint in packed.hints)
    by_rank = _spread_pairs(pairs, num_ranks)
    batches = [
        packed.micro_batch(
            b,
            run_id=run_id,
            step=step,
            rank=b // num_micro_batches,
            index=b % num_micro_batches,
            num_micro_batches=num_micro_batches,
            num_loss_tokens=num_loss_tokens,
            num_hint_tokens=num_hint_tokens,
            num_pairs=len(pairs),
            pairs=() if b % num_micro_batches else by_rank[b // num_micro_batches],
        )
        for b in range(len(bins))
    ]
    return [batches[start : start + num_micro_batches] for start in range(0, len(batches), num_micro_batches)]


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
        raise ValueError(f"a sample of {longest} tokens does not fit into seq_len = {capacity}; raise seq_len")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Packed:
    """All samples of a step one after the other, in the order of their micro-batches, which are views of it: one copy
    a stream and few calls, however many micro-batches."""

    samples_at: list[int]
    """[number of micro-batches + 1] where each one's samples begin, and where the last one's end."""
    tokens_at: list[int]
    runs_at: list[int]
    token_ids: Int32
    """[T]"""
    sequence_lengths: Int32
    """[S]"""
    loss_mask: Bool
    """[T]"""
    inference_logprobs: Float32
    """[T]"""
    advantages: Float32
    """[S] where each sample has one, or [T]."""
    temperatures: Float32
    """[S] where each sample has one, or [T]."""
    teacher_logprobs: Float32 | None
    """[T]"""
    adapters: Int32 | None
    """[S]; None where all samples are of the first."""
    version_runs: Int32
    """[runs, 2] of (version, number of tokens); none reaches over the end of a micro-batch."""
    hints: list[tuple[int, Hint]]
    """(index of the sample, its hint), ascending."""
    rollout_ids: tuple[str, ...]
    """[S]"""
    envs: tuple[str, ...]
    """[S]"""

    @classmethod
    def of(cls, samples: Sequence[TrainingSample], bins: Sequence[Sequence[int]]) -> "_Packed":
        """`bins` of indices into `samples`."""
        ordered = [samples[index] for chosen in bins for index in chosen]
        lengths = np.array([len(sample.token_ids) for sample in ordered], np.int32)
        samples_at = _ends([len(chosen) for chosen in bins])
        runs, runs_at = _version_runs(ordered, samples_at)
        return cls(
            samples_at=samples_at.tolist(),
            tokens_at=_ends(lengths)[samples_at].tolist(),
            runs_at=runs_at.tolist(),
            token_ids=np.concatenate([sample.token_ids for sample in ordered]),
            sequence_lengths=lengths,
            loss_mask=np.concatenate([sample.loss_mask for sample in ordered]),
            inference_logprobs=np.concatenate([sample.inference_logprobs for sample in ordered]),
            advantages=_stream([sample.advantages for sample in ordered], lengths),
            temperatures=_stream([sample.temperatures for sample in ordered], lengths),
            teacher_logprobs=_teacher(ordered),
            adapters=_adapters([sample.adapter for sample in ordered]),
            version_runs=runs,
            hints=[(index, sample.hint) for index, sample in enumerate(ordered) if sample.hint is not None],
            rollout_ids=tuple(sample.rollout_id for sample in ordered),
            envs=tuple(sample.env for sample in ordered),
        )

    def micro_batch(
        self,
        b: int,
        *,
        run_id: str,
        step: int,
        rank: int,
        index: int,
        num_micro_batches: int,
        num_loss_tokens: int,
        num_hint_tokens: int,
        num_pairs: int,
        pairs: tuple[PreferencePair, ...],
    ) -> MicroBatch:
        """The `b`-th of the step."""
        first, last = self.samples_at[b : b + 2]
        of_samples, of_tokens = slice(first, last), slice(*self.tokens_at[b : b + 2])

        def own(stream: Float32) -> Float32:
            return stream[of_samples if len(stream) == len(self.sequence_lengths) else of_tokens]

        return MicroBatch(
            run_id=run_id,
            step=step,
            rank=rank,
            index=index,
            num_micro_batches=num_micro_batches,
            num_loss_tokens=num_loss_tokens,
            num_hint_tokens=num_hint_tokens,
            num_pairs=num_pairs,
            token_ids=self.token_ids[of_tokens],
            sequence_lengths=self.sequence_lengths[of_samples],
            loss_mask=self.loss_mask[of_tokens],
            inference_logprobs=self.inference_logprobs[of_tokens],
            advantages=own(self.advantages),
            temperatures=own(self.temperatures),
            teacher_logprobs=None if self.teacher_logprobs is None else self.teacher_logprobs[of_tokens],
            adapters=None if self.adapters is None else _adapters(self.adapters[of_samples]),
            version_runs=self.version_runs[slice(*self.runs_at[b : b + 2])],
            hints=tuple((sample - first, hint) for sample, hint in self._hints_of(first, last)),
            pairs=pairs,
            rollout_ids=self.rollout_ids[of_samples],
            envs=self.envs[of_samples],
        )

    def _hints_of(self, first: int, last: int) -> list[tuple[int, Hint]]:
        """Those of the samples from `first` to before `last`."""
        begin, end = (bisect_left(self.hints, sample, key=itemgetter(0)) for sample in (first, last))
        return self.hints[begin:end]


def _ends(counts: Sequence[int] | Int32) -> NDArray[np.int64]:
    """[len(counts) + 1] their running sum from 0."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


def _stream(values: Sequence[Float32 | float], lengths: Int32) -> Float32:
    """[S] where each sample has one number, [T] otherwise."""
    if all(isinstance(value, float) for value in values):
        return np.array(values, np.float32)
    rows = zip(values, lengths, strict=True)
    return np.concatenate([np.broadcast_to(np.asarray(v, np.float32), (length,)) for v, length in rows])


def _version_runs(samples: Sequence[TrainingSample], samples_at: NDArray[np.int64]) -> tuple[Int32, NDArray[np.int64]]:
    """Runs [N, 2] of (version, number of tokens), in which neighbours of one version in one micro-batch are one run;
    and where each micro-batch's begin."""
    runs = np.array([run for sample in samples for run in sample.policy_versions], np.int32)
    firsts = _ends([len(sample.policy_versions) for sample in samples])[samples_at]
    begins = np.diff(runs[:, 0], prepend=runs[0, 0]) != 0
    begins[firsts[:-1]] = True
    starts = np.flatnonzero(begins)
    merged = np.stack([runs[starts, 0], np.add.reduceat(runs[:, 1], starts)], axis=1).astype(np.int32)
    return merged, np.searchsorted(starts, firsts)


def _adapters(places: Sequence[int] | Int32) -> Int32 | None:
    """None where all are the first."""
    return np.asarray(places, np.int32) if np.any(places) else None


def _teacher(samples: Sequence[TrainingSample]) -> Float32 | None:
    streams = [sample.teacher_logprobs for sample in samples if sample.teacher_logprobs is not None]
    if not streams:
        return None
    if len(streams) != len(samples):
        raise ValueError(f"{len(streams)} of {len(samples)} samples have teacher log-probabilities; give all or none")
    return np.concatenate(streams)

"""Which samples share a micro-batch, and which rank gets it: plans over lengths alone.

Legend: `S` samples, `B` micro-batches of one rank, `R` ranks. A bin is the list of a micro-batch's samples by index.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

Bin = list[int]

NUM_FRACTIONS = 6
"""Fractions of a bin, from a half on, that the lower bound looks at."""
NUM_TRIES = 4
"""Numbers of bins, from the lower bound on, at which more than best fit is tried."""
NUM_PASSES = 3
MAX_DEALS = 1000
"""Pairs of bins that are dealt out anew at most for one number of bins; some 0.1 ms each."""


def plan(lengths: Sequence[int], *, capacity: int, num_ranks: int) -> list[list[Bin]]:
    """Bins [R][B] of at most `capacity` tokens, as few a rank as can be found, balanced over the ranks at each of the
    B micro-steps. Where samples are too few for that, the last bins are empty.

    Raises ValueError for a sample longer than `capacity`.
    """
    bins = plan_bins(lengths, capacity=capacity, num_ranks=num_ranks)
    return spread(bins, lengths, num_ranks=num_ranks)


def plan_bins(lengths: Sequence[int], *, capacity: int, num_ranks: int) -> list[Bin]:
    """As few bins as can be found in multiples of `num_ranks`, none over `capacity` tokens and none empty: so where
    samples are too few for the next multiple, each has a bin of its own.

    First the longest to the emptiest bin, which balances; where that leaves a sample without room, the longest to
    the fullest bin that still takes it, and bins dealt out anew in pairs for what that leaves, which packs tightest;
    then more bins.
    """
    if not lengths:
        raise ValueError("a batch without samples cannot be packed; give at least one")
    if (longest := max(lengths)) > capacity:
        raise ValueError(f"a sample of {longest} tokens does not fit into seq_len = {capacity}; raise seq_len")
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    fewest = _multiple_of(num_ranks, lower_bound(lengths, capacity=capacity))
    for num_bins in range(fewest, min(len(lengths), fewest + NUM_TRIES * num_ranks), num_ranks):
        bins = _emptiest_first(order, lengths, capacity, num_bins) or _tightest(order, lengths, capacity, num_bins)
        if bins is not None:
            return bins
    best_fit, _ = _best_fit(order, lengths, capacity, num_seeded=0, max_bins=len(lengths))
    if (num_bins := _multiple_of(num_ranks, len(best_fit))) >= len(lengths):
        return [[sample] for sample in order]
    return _emptiest_first(order, lengths, capacity, num_bins) or _without_empty(best_fit, num_bins)


def _multiple_of(num_ranks: int, num: int) -> int:
    return -(-num // num_ranks) * num_ranks


def lower_bound(lengths: Sequence[int], *, capacity: int) -> int:
    """Bins that are needed at least: for all tokens together, and for the samples of more than a k-th of `capacity`, of
    which k do not fit together."""
    bounds = [-(-sum(lengths) // capacity)]
    for k in range(2, NUM_FRACTIONS):
        num_long = sum(length * k > capacity for length in lengths)
        bounds.append(-(-num_long // (k - 1)))
    return max(bounds)


def _emptiest_first(order: list[int], lengths: Sequence[int], capacity: int, num_bins: int) -> list[Bin] | None:
    """Every bin gets a sample before any gets two."""
    bins: list[Bin] = [[] for _ in range(num_bins)]
    heap = [(0, b) for b in range(num_bins)]
    for sample in order:
        used, b = heap[0]
        used += lengths[sample]
        if used > capacity:
            return None
        bins[b].append(sample)
        heapq.heapreplace(heap, (used, b))
    return bins


def _best_fit(
    order: list[int], lengths: Sequence[int], capacity: int, *, num_seeded: int, max_bins: int
) -> tuple[list[Bin], Bin]:
    """Each sample to the fullest bin that takes it, or to a new one, after the `num_seeded` longest have one each; and
    what finds no room."""
    bins: list[Bin] = [[sample] for sample in order[:num_seeded]]
    rooms = sorted((capacity - lengths[sample], b) for b, sample in enumerate(order[:num_seeded]))
    left_over: Bin = []
    for sample in order[num_seeded:]:
        position = bisect_left(rooms, (lengths[sample], -1))
        if position < len(rooms):
            room, b = rooms.pop(position)
        elif len(bins) < max_bins:
            room, b = capacity, len(bins)
            bins.append([])
        else:
            left_over.append(sample)
            continue
        bins[b].append(sample)
        insort(rooms, (room - lengths[sample], b))
    return bins, left_over


def _without_empty(bins: list[Bin], num_bins: int) -> list[Bin]:
    """`bins`, and as many more as are asked for, which take a sample each from those that have the most."""
    while len(bins) < num_bins:
        bins.append([max(bins, key=len).pop()])
    return bins


def _tightest(order: list[int], lengths: Sequence[int], capacity: int, num_bins: int) -> list[Bin] | None:
    """Best fit, with room made for what it leaves over."""
    bins, left_over = _best_fit(order, lengths, capacity, num_seeded=num_bins, max_bins=num_bins)
    rooms = [capacity - sum(lengths[sample] for sample in chosen) for chosen in bins]
    num_deals = 0
    for sample in left_over:
        needed = lengths[sample]
        for b in _gather(bins, rooms, lengths, capacity):
            if rooms[b] >= needed:
                break
            if (num_deals := num_deals + 1) > MAX_DEALS:
                return None
        else:
            return None
        bins[b].append(sample)
        rooms[b] -= needed
    return _without_empty(bins, num_bins)


def _gather(bins: list[Bin], rooms: list[int], lengths: Sequence[int], capacity: int) -> Iterator[int]:
    """Moves room from bin to bin, and yields where there is more of it, the roomiest bin first.

    Two bins are dealt out anew so that one is as full as can be and the other has the room of both. That is always the
    one with the most samples, because short samples can be dealt out in the most ways; as it loses them, another has
    the most, and the bins are gone through once more.
    """
    for _ in range(NUM_PASSES):
        for other in sorted(range(len(bins)), key=rooms.__getitem__, reverse=True):
            yield other
            counts = [*map(len, bins)]
            gathering = counts.index(max(counts))
            if other == gathering or rooms[other] == 0:
                continue
            both, room = bins[other] + bins[gathering], rooms[other] + rooms[gathering]
            both.sort(key=lengths.__getitem__, reverse=True)
            bins[other], bins[gathering] = _fullest(both, lengths, capacity)
            rooms[other] = capacity - sum(lengths[sample] for sample in bins[other])
            rooms[gathering] = room - rooms[other]
            yield gathering


def _fullest(samples: Bin, lengths: Sequence[int], capacity: int) -> tuple[Bin, Bin]:
    """The samples that fill `capacity` best, and the rest, which has the last of `samples` where there is a choice.
    Bit n of a number says that some of the samples so far have n tokens together."""
    reachable, up_to = [1], (1 << (capacity + 1)) - 1
    for sample in samples:
        reachable.append((reachable[-1] | reachable[-1] << lengths[sample]) & up_to)
    total = reachable.pop().bit_length() - 1
    chosen, rest = [], []
    for sample in reversed(samples):
        if reachable.pop() >> total & 1:
            rest.append(sample)
        else:
            chosen.append(sample)
            total -= lengths[sample]
    return chosen, rest


def spread(bins: Sequence[Bin], lengths: Sequence[int], *, num_ranks: int) -> list[list[Bin]]:
    """Bins [R][B] by rank, bins of like size side by side, because ranks wait for each other at every micro-step.
    Within a micro-step the rank with the fewest tokens so far takes the fullest. In the last micro-step, ranks for
    which none is left get an empty one."""
    sizes = [sum(lengths[sample] for sample in chosen) for chosen in bins]
    order = sorted(range(len(bins)), key=sizes.__getitem__, reverse=True)
    ranks: list[list[Bin]] = [[] for _ in range(num_ranks)]
    totals = [0] * num_ranks
    for start in range(0, len(order), num_ranks):
        emptiest = sorted(range(num_ranks), key=totals.__getitem__)
        step = order[start : start + num_ranks]
        for rank, b in zip(emptiest, step, strict=False):
            ranks[rank].append(bins[b])
            totals[rank] += sizes[b]
        for rank in emptiest[len(step) :]:
            ranks[rank].append([])
    return ranks

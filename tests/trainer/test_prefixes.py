from typing import Any

import numpy as np
import pytest
from grpo.trainer.packing import first_fit, shared_prefixes
from grpo.transport.prefixes import tree_order


@pytest.mark.parametrize(
    ("ids", "lengths", "adapters", "unique", "inverse"),
    [
        ([5, 6, 7, 5, 6, 8], [3, 3], None, [2, 3, 4, 5], [1, 2, 0, 1, 2, 3]),
        ([5, 6, 7, 5, 6, 8, 5, 6, 9], [3, 3, 3], [1, 0, 1], [2, 3, 4, 5, 6, 7, 8], [4, 5, 0, 1, 2, 3, 4, 5, 6]),
        ([5, 7, 5, 7, 8], [2, 3], None, [2, 3, 4], [0, 1, 0, 1, 2]),
        ([5, 7, 5, 7], [2, 2], None, [0, 1], [0, 1, 0, 1]),
        ([5, 7, 9, 5, 8, 9, 5, 7, 4], [3, 3, 3], None, [1, 2, 3, 4, 5, 8], [2, 0, 1, 2, 3, 4, 2, 0, 5]),
    ],
    ids=["the same prompt", "of different adapters", "all of one", "twice the same", "forks at two depths"],
)
def test_samples_share_what_they_begin_with_if_their_adapter_is_the_same(
    ids: list[int], lengths: list[int], adapters: Any, unique: list[int], inverse: list[int]
) -> None:
    of = None if adapters is None else np.array(adapters)
    found = shared_prefixes(np.array(ids, np.int32), np.array(lengths), of)
    assert [part.tolist() for part in found] == [unique, inverse]


def test_every_token_finds_the_one_with_the_same_tokens_before_it() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 9, 40)
    ids = rng.integers(0, 2, lengths.sum()).astype(np.int32)
    starts = np.cumsum(lengths) - lengths
    unique, inverse = shared_prefixes(ids, lengths)
    sample = np.repeat(np.arange(len(lengths)), lengths)
    histories = [tuple(ids[starts[sample[t]] : t + 1].tolist()) for t in range(len(ids))]
    assert [histories[t] for t in unique[inverse]] == histories
    assert len(unique) == len(set(histories))


def test_a_sample_comes_after_the_one_that_it_shares_most_with() -> None:
    samples = [np.array(ids, np.int32) for ids in ([5, 6], [70_000], [5, 6, 8], [5, 9])]
    assert tree_order(samples) == ([1, 3, 2, 0], [0, 0, 1, 2])
    assert tree_order(samples, [0, 0, 0, 1]) == ([3, 1, 2, 0], [0, 0, 0, 2])


def test_bins_hold_what_fits_in_order_and_what_is_too_large_is_alone() -> None:
    assert first_fit([3, 4, 2], capacity=5) == [[0, 2], [1]]
    assert first_fit([4, 1, 2, 1], capacity=5) == [[0, 1], [2, 3]]
    assert first_fit([9, 1, 7, 5], capacity=5) == [[0], [1], [2], [3]]
    assert first_fit([], capacity=5) == []

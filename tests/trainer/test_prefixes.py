from typing import Any

import numpy as np
import pytest
from grpo.trainer.packing import first_fit, shared_prefixes


@pytest.mark.parametrize(
    ("ids", "lengths", "mask", "adapters", "unique", "inverse"),
    [
        ([5, 6, 7, 5, 6, 8], [3, 3], [0, 0, 1] * 2, None, [0, 1, 2, 5], [0, 1, 2, 0, 1, 3]),
        ([5, 6, 7] * 3, [3, 3, 3], [0, 0, 1] * 3, [1, 0, 1], [0, 1, 2, 3, 4, 5, 8], [0, 1, 2, 3, 4, 5, 0, 1, 6]),
        ([5, 7, 5, 6, 7], [2, 3], [0, 1, 0, 0, 1], None, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
        # the second turn's prompt (9) follows different answers and must stay each sample's own
        ([5, 7, 9, 7, 5, 8, 9, 7], [4, 4], [0, 1] * 4, None, [0, 1, 2, 3, 5, 6, 7], [0, 1, 2, 3, 0, 4, 5, 6]),
    ],
    ids=["the same prompt", "of different adapters", "only the start of another", "several turns"],
)
def test_samples_with_the_same_prompt_and_adapter_use_the_first_ones(
    ids: list[int], lengths: list[int], mask: list[int], adapters: Any, unique: list[int], inverse: list[int]
) -> None:
    of = None if adapters is None else np.array(adapters)
    found = shared_prefixes(np.array(ids, np.int32), np.array(lengths), np.array(mask, bool), of)
    assert [part.tolist() for part in found] == [unique, inverse]


def test_every_token_finds_one_with_the_same_tokens_before_it() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 6, 12)
    ids = rng.integers(0, 2, lengths.sum()).astype(np.int32)
    mask = rng.random(len(ids)) < 0.4
    starts = np.cumsum(lengths) - lengths
    mask[starts] = False
    unique, inverse = shared_prefixes(ids, lengths, mask)
    sample = np.repeat(np.arange(len(lengths)), lengths)
    for t, original in enumerate(unique[inverse]):
        history = ids[starts[sample[t]] : t + 1].tolist()
        assert ids[starts[sample[original]] : original + 1].tolist() == history
    assert (unique[inverse[mask]] == np.flatnonzero(mask)).all()


def test_bins_hold_what_fits_in_order_and_what_is_too_large_is_alone() -> None:
    assert first_fit([3, 4, 2], capacity=5) == [[0, 2], [1]]
    assert first_fit([4, 1, 2, 1], capacity=5) == [[0, 1], [2, 3]]
    assert first_fit([9, 1, 7, 5], capacity=5) == [[0], [1], [2], [3]]
    assert first_fit([], capacity=5) == []

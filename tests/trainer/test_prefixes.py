import numpy as np
from grpo.trainer.packing import first_fit, shared_prefixes


def prefixes_of(ids: list[int], lengths: list[int], mask: list[int]) -> tuple[list[int], list[int]]:
    unique, inverse = shared_prefixes(np.array(ids, np.int32), np.array(lengths), np.array(mask, bool))
    return unique.tolist(), inverse.tolist()


def test_samples_with_the_same_prompt_use_the_first_ones() -> None:
    # prompts [5, 6] twice, answers 7 and 8
    assert prefixes_of([5, 6, 7, 5, 6, 8], [3, 3], [0, 0, 1, 0, 0, 1]) == ([0, 1, 2, 5], [0, 1, 2, 0, 1, 3])


def test_samples_of_different_adapters_share_no_prompt() -> None:
    ids, lengths, mask = np.array([5, 6, 7] * 3, np.int32), np.array([3, 3, 3]), np.array([0, 0, 1] * 3, bool)
    unique, inverse = shared_prefixes(ids, lengths, mask, np.array([1, 0, 1]))
    # the third sample finds its prompt in the first, the second has its own
    assert unique.tolist() == [0, 1, 2, 3, 4, 5, 8]
    assert inverse.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 6]


def test_a_prompt_that_is_only_the_start_of_another_is_not_shared() -> None:
    assert prefixes_of([5, 7, 5, 6, 7], [2, 3], [0, 1, 0, 0, 1]) == ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])


def test_a_prompt_ends_at_the_first_loss_token_of_several_turns() -> None:
    # the second turn's prompt (9) follows different answers and must stay each sample's own
    ids, mask = [5, 7, 9, 7, 5, 8, 9, 7], [0, 1, 0, 1] * 2
    assert prefixes_of(ids, [4, 4], mask) == ([0, 1, 2, 3, 5, 6, 7], [0, 1, 2, 3, 0, 4, 5, 6])


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

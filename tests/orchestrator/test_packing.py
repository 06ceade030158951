"""Packing: bounded, balanced, nothing lost."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.packing import pack, plan_bins, spread
from transport.types import TrainingSample


def sample(number: int, length: int, version: int = 3) -> TrainingSample:
    mask = np.zeros(length, np.bool_)
    mask[1:] = True
    return TrainingSample(
        token_ids=np.full(length, number, np.int32),
        loss_mask=mask,
        inference_logprobs=np.full(length, -0.25, np.float32),
        advantages=float(number),
        temperatures=0.5,
        policy_versions=((version, length),),
        env="e",
        group_id="0",
        rollout_id=str(number),
        reward=0.0,
        stop_reason="stop",
    )


def test_two_samples_become_one_stream_with_their_boundaries() -> None:
    [[batch]] = pack([sample(1, 3), sample(2, 2, version=4)], seq_len=8, num_ranks=1, run_id="r", step=7)
    assert batch.token_ids.tolist() == [1, 1, 1, 2, 2]
    assert batch.sequence_lengths.tolist() == [3, 2]
    assert batch.loss_mask.tolist() == [False, True, True, False, True]
    assert batch.per_token(batch.advantages).tolist() == [1, 1, 1, 2, 2]
    assert batch.temperatures.tolist() == [0.5] * 2
    assert batch.policy_versions.tolist() == [3, 3, 3, 4, 4]
    assert batch.rollout_ids == ("1", "2")
    assert batch.teacher_logprobs is None
    assert (batch.run_id, batch.step, batch.rank, batch.index, batch.num_micro_batches) == ("r", 7, 0, 0, 1)


def test_the_number_of_loss_tokens_is_that_of_the_whole_step() -> None:
    ranks = pack([sample(n, 4) for n in range(6)], seq_len=8, num_ranks=2, run_id="r", step=1)
    assert {batch.num_loss_tokens for batches in ranks for batch in batches} == {6 * 3}


def test_a_sample_longer_than_a_micro_batch_is_an_error() -> None:
    with pytest.raises(ValueError, match="sample of 9 tokens does not fit into seq_len = 8"):
        plan_bins([9], capacity=8, num_ranks=1)


def test_fewer_samples_than_ranks_are_an_error() -> None:
    with pytest.raises(ValueError, match="1 samples cannot be spread over 2 ranks"):
        plan_bins([1], capacity=8, num_ranks=2)


def test_a_tight_fit_is_found_where_balancing_alone_fails() -> None:
    # 3+3 | 2+2+2 fills two bins of 6; the emptiest-first order would put 3+2 | 3+2 and leave no room for the last 2.
    bins = plan_bins([3, 3, 2, 2, 2], capacity=6, num_ranks=1)
    assert len(bins) == 2


@given(lengths=st.lists(st.integers(1, 64), min_size=8, max_size=120), num_ranks=st.integers(1, 8))
def test_nothing_is_lost_and_no_bin_is_over_its_capacity(lengths: list[int], num_ranks: int) -> None:
    bins = plan_bins(lengths, capacity=64, num_ranks=num_ranks)
    assert sorted(index for chosen in bins for index in chosen) == list(range(len(lengths)))
    assert all(0 < sum(lengths[index] for index in chosen) <= 64 for chosen in bins)
    ranks = spread(bins, lengths, num_ranks=num_ranks)
    assert {len(rank) for rank in ranks} <= {len(bins) // num_ranks, -(-len(bins) // num_ranks)}
    assert sorted(map(tuple, bins)) == sorted(tuple(chosen) for rank in ranks for chosen in rank)


@pytest.mark.parametrize(("num", "num_ranks"), [(1024, 8), (4096, 32), (16384, 1)])
def test_long_tailed_lengths_pack_to_the_lower_bound_and_balance_to_a_percent(num: int, num_ranks: int) -> None:
    # Log-normal, median 600, 99th percentile 6,000.
    drawn = np.random.default_rng(0).lognormal(np.log(600), np.log(10) / 2.326, num)
    lengths = [int(length) for length in np.clip(drawn, 1, 8192)]
    began_s = time.perf_counter()
    ranks = spread(plan_bins(lengths, capacity=8192, num_ranks=num_ranks), lengths, num_ranks=num_ranks)
    seconds = time.perf_counter() - began_s
    lower_bound = -(-sum(lengths) // (8192 * num_ranks))
    assert len(ranks[0]) == lower_bound
    tokens = [sum(lengths[index] for chosen in rank for index in chosen) for rank in ranks]
    assert max(tokens) <= 1.01 * sum(tokens) / num_ranks
    assert seconds < 1

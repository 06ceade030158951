from dataclasses import replace

import numpy as np
import pytest

from tests.trainer.models import CPU, tiny_batch
from trainer.batch import check_step, loss_streams, packed_tokens
from trainer.errors import BatchError
from transport.types import MicroBatch


def check(*batches: MicroBatch) -> None:
    check_step(batches, sequence_len=16, vocab_size=64)


def test_a_batch_within_bounds_passes() -> None:
    check(tiny_batch((3, 2)))


def test_a_micro_batch_longer_than_sequence_len_says_both_numbers() -> None:
    with pytest.raises(BatchError, match="has 17 tokens, the trainer's sequence_len is 16; give sequence_len"):
        check(tiny_batch((9, 8)))


def test_an_id_outside_the_vocabulary_is_named() -> None:
    batch = tiny_batch((3, 2))
    batch.token_ids[4] = 64
    with pytest.raises(BatchError, match="token id 64, the model's vocabulary is 0…63"):
        check(batch)


def test_a_normaliser_that_is_not_the_number_of_loss_tokens_is_refused() -> None:
    with pytest.raises(BatchError, match=r"num_loss_tokens is \[4\], and the loss masks hold 3"):
        check(replace(tiny_batch((3, 2)), num_loss_tokens=4))


def test_a_step_without_loss_tokens_is_refused() -> None:
    batch = tiny_batch((3, 2))
    with pytest.raises(BatchError, match="at least 1"):
        check(replace(batch, loss_mask=np.zeros(5, np.bool_), num_loss_tokens=0))


def test_a_step_without_micro_batches_is_refused() -> None:
    with pytest.raises(BatchError, match="no micro-batches"):
        check()


def test_tokens_from_a_version_yet_to_come_are_refused() -> None:
    with pytest.raises(BatchError, match="sampled under version 1, which step 1 is yet to make"):
        check(replace(tiny_batch((3, 2)), version_runs=np.array([[1, 5]], np.int32)))


def test_only_tokens_that_carry_loss_reach_the_head_and_the_loss() -> None:
    batch = replace(
        tiny_batch((3, 2)),
        step=5,
        loss_mask=np.array([False, False, True, False, True]),
        version_runs=np.array([[4, 2], [3, 1], [1, 2]], np.int32),
    )
    tokens, streams = packed_tokens(batch, CPU), loss_streams(batch, CPU)
    assert tokens.before_targets.tolist() == [1, 3]
    assert tokens.targets.tolist() == batch.token_ids[[2, 4]].tolist()
    assert streams.sample_ids.tolist() == [0, 1]
    # (step - 1) - version: 4 - 3 and 4 - 1
    assert streams.lags.tolist() == [1, 3]
    assert streams.inference_logprobs.tolist() == batch.inference_logprobs[[2, 4]].tolist()

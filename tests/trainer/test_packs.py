"""Hints and pairs as packed sequences of their own."""

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tests.trainer.models import CPU, pair_of, tiny_batch
from trainer.packs import first_fit, hint_pack, pair_pack, plan_hints, plan_pairs
from transport.records import Hint, MicroBatch


def hinted_batch() -> MicroBatch:
    """Samples [10, 11, 12, 13] and [20, 21, 22]; the first compares tokens 1 and 2, the second its last."""
    batch = replace(tiny_batch((4, 3)), token_ids=np.array([10, 11, 12, 13, 20, 21, 22], np.int32))
    first = Hint(
        teacher_token_ids=np.array([10, 50, 11, 12, 13], np.int32),
        student_index=np.array([1, 2], np.int32),
        teacher_index=np.array([2, 3], np.int32),
        weight=0.5,
    )
    second = replace(
        first,
        teacher_token_ids=np.array([20, 21, 51, 52, 22], np.int32),
        student_index=np.array([2], np.int32),
        teacher_index=np.array([4], np.int32),
        weight=2.0,
    )
    return replace(batch, hints=((1, second), (0, first)))


def test_both_contexts_end_with_their_last_aligned_token_and_target_the_same_tokens_in_the_same_order() -> None:
    (hinted,) = plan_hints(hinted_batch(), sequence_len=16)
    pack = hint_pack(hinted, device=CPU)
    assert pack.student.token_ids.tolist() == [20, 21, 22, 10, 11, 12]
    assert pack.teacher.token_ids.tolist() == [20, 21, 51, 52, 22, 10, 50, 11, 12]
    assert pack.student.targets.tolist() == pack.teacher.targets.tolist() == [22, 11, 12]
    # the token before each target: 21, 10, 11 and 52, 50, 11
    assert pack.student.before_targets.tolist() == [1, 3, 4]
    assert pack.teacher.before_targets.tolist() == [3, 6, 7]
    assert pack.student.position_ids.tolist() == [0, 1, 2, 0, 1, 2]
    assert pack.weights.tolist() == [2.0, 0.5, 0.5]


def test_hints_that_exceed_the_sequence_length_are_split_over_packs() -> None:
    # contexts of 5 and 4 tokens: 9 fit into one pack, 8 do not hold both
    batch = hinted_batch()
    assert [len(hinted) for hinted in plan_hints(batch, sequence_len=9)] == [2]
    assert [len(hinted) for hinted in plan_hints(batch, sequence_len=8)] == [1, 1]


def test_a_pair_is_two_sequences_whose_prompt_is_computed_once() -> None:
    batch = replace(tiny_batch((3,)), pairs=(pair_of([5, 6], [7], [8, 9]), pair_of([4], [7, 8], [3])))
    (pairs,) = plan_pairs(batch, sequence_len=16)
    pack = pair_pack(pairs, device=CPU)
    assert pack.tokens.token_ids.tolist() == [5, 6, 7, 8, 9, 4, 7, 8, 3]
    assert pack.tokens.position_ids.tolist() == [0, 1, 2, 2, 3, 0, 1, 2, 1]
    assert pack.tokens.targets.tolist() == [7, 8, 9, 7, 8, 3]
    # before the targets: 6, 6, 8, 4, 7, 4
    assert pack.tokens.before_targets.tolist() == [1, 1, 3, 5, 6, 5]
    assert pack.tokens.temperatures.tolist() == [1.0] * 6
    assert pack.chosen_ref_logprobs.tolist() == [-1.0, -1.0]
    assert pack.rejected_ref_logprobs.tolist() == [-2.0, -2.0]
    chosen, rejected = pack.continuation_logprobs(torch.tensor([-1.0, -2.0, -4.0, -8.0, -16.0, -32.0]))
    # of the first pair -1 and -2 - 4, of the second -8 - 16 and -32
    assert (chosen.tolist(), rejected.tolist()) == ([-1.0, -24.0], [-6.0, -32.0])


def test_a_pair_stays_together_when_pairs_are_split_over_packs() -> None:
    # 5 and 4 tokens with the prompts once
    batch = replace(tiny_batch((3,)), pairs=(pair_of([5, 6], [7], [8, 9]), pair_of([4], [7, 8], [3])))
    assert [len(pairs) for pairs in plan_pairs(batch, sequence_len=9)] == [2]
    assert [len(pairs) for pairs in plan_pairs(batch, sequence_len=8)] == [1, 1]


def test_first_fit_takes_the_first_bin_with_room() -> None:
    # 3 opens a bin (room 2), 4 another (room 1), 2 fills the first, 1 the second
    assert first_fit([3, 4, 2, 1], capacity=5) == [[0, 2], [1, 3]]
    assert first_fit([6, 1], capacity=5) == [[0], [1]]


@pytest.mark.parametrize("seed", range(2))
def test_first_fit_keeps_every_size_once_and_within_the_capacity(seed: int) -> None:
    sizes = np.random.default_rng(seed).integers(1, 20, 50).tolist()
    bins = first_fit(sizes, capacity=20)
    assert sorted(i for chosen in bins for i in chosen) == list(range(50))
    assert max(sum(sizes[i] for i in chosen) for chosen in bins) <= 20
    # of any two bins at least one is more than half full
    assert len(bins) <= 2 * sum(sizes) / 20 + 1

"""What of a step reaches the loss, and what is refused before it costs anything."""

from typing import Any

import numpy as np
import pytest
from grpo.configs.loss import LossSettings
from grpo.trainer.batch import StepCounts, check_step, counts_of, num_signal_tokens, tokens_by_adapter
from grpo.trainer.errors import BatchError
from grpo.trainer.objective import policy_inputs
from grpo.trainer.packing import packed_tokens
from grpo.transport.records import MicroBatch
from msgspec.structs import replace

from tests.trainer.models import CPU, hint_for, pair_of, tiny_batch

ALL_ON = {"alpha_sdpo": 1.0, "beta_replay": 1.0}


def check(*batches: MicroBatch, **settings: Any) -> StepCounts:
    """As a trainer of one rank."""
    check_step(batches, sequence_len=16, vocab_size=64, settings=LossSettings.model_validate(settings))
    return counts_of(batches)


def with_hint(batch: MicroBatch, *, places: tuple[int, ...] = (2,)) -> MicroBatch:
    """A hint for the first sample."""
    return replace(batch, hints=((0, hint_for(batch, 0, places=places, before=1)),))


def with_pair(batch: MicroBatch) -> MicroBatch:
    """A pair of 2 + 1 + 2 tokens."""
    return replace(batch, pairs=(pair_of([5, 6], [7], [8, 9]),))


def test_a_batch_within_bounds_passes_and_what_it_holds_is_counted() -> None:
    assert check(tiny_batch((3, 2))) == StepCounts(loss_tokens=3, samples=2, hint_tokens=0, pairs=0)
    batch = with_pair(with_hint(tiny_batch((3, 2)), places=(1, 2)))
    silent = replace(tiny_batch((3, 2)), loss_mask=np.array([False, True, True, False, False]))
    assert check(batch, silent, **ALL_ON) == StepCounts(loss_tokens=5, samples=3, hint_tokens=2, pairs=1)


@pytest.mark.parametrize(("weights", "expected"), [({}, 2), ({"kl_tau": 0.1}, 3), ({"beta_replay": 1.0}, 3)])
def test_tokens_without_an_advantage_teach_nothing_unless_another_term_does(
    weights: dict[str, Any], expected: int
) -> None:
    batch = tiny_batch((3, 2))  # of which 2 and 1 tokens carry loss
    batch.advantages[3:] = 0.0
    assert num_signal_tokens([batch], LossSettings.model_validate(weights)) == expected


def test_a_micro_batch_longer_than_sequence_len_says_both_numbers() -> None:
    with pytest.raises(BatchError, match=r"17.*sequence_len.*16"):
        check(tiny_batch((9, 8)))


def test_an_id_outside_the_vocabulary_is_named() -> None:
    batch = tiny_batch((3, 2))
    batch.token_ids[4] = 64
    with pytest.raises(BatchError, match=r"64.*63"):
        check(batch)


def test_data_whose_stream_has_no_weight_is_refused_with_the_key_to_set() -> None:
    batch = tiny_batch((3, 2))
    with pytest.raises(BatchError, match=r"loss\.alpha_sdpo"):
        check(with_hint(batch))
    with pytest.raises(BatchError, match=r"loss\.beta_replay"):
        check(with_pair(batch), alpha_sdpo=1.0)
    with pytest.raises(BatchError, match=r"loss\.teacher_tau"):
        check(replace(batch, teacher_logprobs=batch.inference_logprobs))


def test_a_teacher_that_has_a_weight_must_have_spoken() -> None:
    batch = tiny_batch((3, 2))
    with pytest.raises(BatchError, match=r"loss\.teacher_tau"):
        check(batch, teacher_tau=0.5)
    check(replace(batch, teacher_logprobs=batch.inference_logprobs), teacher_tau=0.5)


def test_a_context_is_as_long_as_what_comes_before_its_last_aligned_token() -> None:
    # 14 tokens and 3 of the hint: the one before the last is at place 15, the last at 16
    check(with_hint(tiny_batch((14,)), places=(12,)), **ALL_ON)
    with pytest.raises(BatchError, match=r"17.*sequence_len.*16"):
        check(with_hint(tiny_batch((14,)), places=(13,)), **ALL_ON)


def test_a_pair_that_does_not_fit_with_its_prompt_once_is_refused() -> None:
    def pair_batch(prompt: int) -> MicroBatch:
        return replace(tiny_batch((3,)), pairs=(pair_of([5] * prompt, [6] * 4, [7] * 5),))

    check(pair_batch(7), **ALL_ON)
    with pytest.raises(BatchError, match=r"17.*sequence_len.*16"):
        check(pair_batch(8), **ALL_ON)


def test_an_adapter_that_the_trainer_has_not_is_refused_with_the_keys_to_set() -> None:
    batch = replace(tiny_batch((3, 2)), adapters=np.array([0, 1], np.int32))
    with pytest.raises(BatchError, match="adapter 1"):
        check(batch)
    pairs = replace(tiny_batch((3,)), pairs=(replace(pair_of([5], [6], [7]), adapter=2),))
    loss = LossSettings.model_validate(ALL_ON)
    with pytest.raises(BatchError, match="adapter 2"):
        check_step([pairs], sequence_len=16, vocab_size=64, settings=loss, num_adapters=2)
    check_step([batch], sequence_len=16, vocab_size=64, settings=loss, num_adapters=2)


def test_the_tokens_of_each_adapter_are_those_of_the_streams_that_are_on() -> None:
    batch = replace(
        with_pair(with_hint(tiny_batch((4, 3)), places=(2, 3))),
        adapters=np.array([1, 0], np.int32),
        pairs=(replace(pair_of([5, 6], [7], [8, 9]), adapter=2),),
    )

    def counted(**settings: float) -> list[int]:
        return tokens_by_adapter([batch, batch], num_adapters=3, settings=LossSettings.model_validate(settings))

    # 2 loss tokens of the second sample; 3 of the first and its 2 hinted ones; 1 + 2 tokens of the pair; all twice
    assert counted() == [4, 6, 0]
    assert counted(**ALL_ON) == [4, 10, 6]
    assert counted(adv_tau=0.0, beta_replay=1.0) == [0, 0, 6]


def test_only_tokens_that_carry_loss_reach_the_head_and_the_loss() -> None:
    batch = replace(
        tiny_batch((3, 2)),
        step=5,
        loss_mask=np.array([False, False, True, False, True]),
        version_runs=np.array([[4, 2], [3, 1], [1, 2]], np.int32),
    )
    batch = replace(batch, teacher_logprobs=np.array([0, -1, -2, 0, -4], np.float32))
    tokens, inputs = packed_tokens(batch, CPU), policy_inputs(batch, CPU)
    assert tokens.before_targets.tolist() == [1, 3]
    assert tokens.targets.tolist() == batch.token_ids[[2, 4]].tolist()
    assert inputs["sample_ids"].tolist() == [0, 1]
    # (step - 1) - version: 4 - 3 and 4 - 1
    assert inputs["lags"].tolist() == [1, 3]
    assert inputs["teacher_logprobs"].tolist() == [-2, -4]
    assert inputs["inference_logprobs"].tolist() == batch.inference_logprobs[[2, 4]].tolist()

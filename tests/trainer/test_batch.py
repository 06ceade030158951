"""What of a step reaches the loss, and what is refused before it costs anything."""

from contextlib import nullcontext
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
    """As a trainer of one rank with two adapters."""
    loss = LossSettings.model_validate(settings)
    check_step(batches, sequence_len=16, pack_tokens=16, vocab_size=64, settings=loss, num_adapters=2)
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


def of_adapter(adapter: int) -> MicroBatch:
    """The second sample's and a pair's."""
    pair = replace(pair_of([5], [6], [7]), adapter=adapter)
    return replace(tiny_batch((3, 2)), adapters=np.array([0, adapter], np.int32), pairs=(pair,))


def pair_after(prompt: int) -> MicroBatch:
    """A pair of 4 + 5 tokens after so many."""
    return replace(tiny_batch((3,)), pairs=(pair_of([5] * prompt, [6] * 4, [7] * 5),))


BATCH = tiny_batch((3, 2))
TAUGHT = replace(BATCH, teacher_logprobs=BATCH.inference_logprobs)
OUTSIDE = replace(BATCH, token_ids=np.array([2, 3, 4, 5, 64], np.int32))


@pytest.mark.parametrize(
    ("batch", "settings", "problem"),
    [
        (tiny_batch((9, 8)), {}, r"17.*micro_batch_tokens.*16"),
        (OUTSIDE, {}, r"64.*63"),
        (with_hint(BATCH), {}, r"loss\.alpha_sdpo"),
        (with_pair(BATCH), {"alpha_sdpo": 1.0}, r"loss\.beta_replay"),
        (TAUGHT, {}, r"loss\.teacher_tau"),
        (TAUGHT, {"teacher_tau": 0.5}, None),
        (BATCH, {"teacher_tau": 0.5}, r"loss\.teacher_tau"),
        # a context is 14 tokens and 3 of the hint, up to the one before the last that is compared
        (with_hint(tiny_batch((14,)), places=(12,)), ALL_ON, None),
        (with_hint(tiny_batch((14,)), places=(13,)), ALL_ON, r"17.*sequence_len.*16"),
        # a pair with its prompt once
        (pair_after(7), ALL_ON, None),
        (pair_after(8), ALL_ON, r"17.*sequence_len.*16"),
        (of_adapter(1), ALL_ON, None),
        (of_adapter(2), ALL_ON, "adapter 2"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_numbers_and_keys(
    batch: MicroBatch, settings: dict[str, Any], problem: str | None
) -> None:
    with nullcontext() if problem is None else pytest.raises(BatchError, match=problem):
        check(batch, **settings)


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

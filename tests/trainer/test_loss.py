"""The policy loss on numbers worked by hand. The random comparison is in test_loss_reference.py."""

import math
from typing import Any

import pytest
import torch

from tests.trainer.models import as_floats
from trainer.loss import MAX_LOG_RATIO, policy_loss

LN2 = math.log(2.0)
OPEN = {
    "adv_tau": 1.0,
    "teacher_tau": 0.0,
    "kl_tau": 0.0,
    "entropy_tau": 0.0,
    "token_mask_low": 0.0,
    "token_mask_high": 1e9,
    "geo_mask_low": 0.0,
    "geo_mask_high": 1e9,
    "sequence_mask_low": 0.0,
    "sequence_mask_high": 1e9,
    "sequence_clip_high": 10.0,
    "ratio_type": "token",
    "importance": "mask",
}


def loss_of(
    trainer: list[float],
    inference: list[float],
    advantages: list[float],
    sample_ids: list[int],
    *,
    tokens: int | None = None,
    lags: list[int] | None = None,
    teacher: list[float] | None = None,
    **options: Any,
) -> tuple[float, list[float], dict[str, float]]:
    """Loss, its gradient and the metrics."""
    logprobs = torch.tensor(trainer, requires_grad=True)
    loss, metrics = policy_loss(
        logprobs,
        entropies=torch.zeros(len(trainer)),
        inference_logprobs=torch.tensor(inference),
        advantages=torch.tensor(advantages),
        teacher_logprobs=None if teacher is None else torch.tensor(teacher),
        sample_ids=torch.tensor(sample_ids, dtype=torch.long),
        num_samples=max(sample_ids, default=-1) + 1,
        lags=torch.tensor(lags or [0] * len(trainer)),
        present_lags=sorted(set(lags or [0] * len(trainer))),
        num_loss_tokens=tokens or len(trainer),
        **(OPEN | options),
    )
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad.tolist(), as_floats(metrics)


def test_on_policy_the_loss_is_minus_the_mean_of_advantage_times_logprob() -> None:
    # ratios are 1: -(2·(-1) + (-1)·(-3)) / 2 = -(-2 + 3) / 2 = -0.5; gradient -advantage / 2
    loss, grad, _ = loss_of([-1.0, -3.0], [-1.0, -3.0], [2.0, -1.0], [0, 0])
    assert loss == pytest.approx(-0.5)
    assert grad == pytest.approx([-1.0, 0.5])


def test_the_token_ratio_scales_each_tokens_own_term_and_carries_no_gradient() -> None:
    # ratios: 2 and 1/2. coeff = 2·1 = 2 and 0.5·1 = 0.5, of 4 tokens in the step
    # loss = -(2·(-1) + 0.5·(-1-LN2)) / 4; gradient = -coeff / 4 = -0.5, -0.125
    loss, grad, _ = loss_of([-1.0, -1.0 - LN2], [-1.0 - LN2, -1.0], [1.0, 1.0], [0, 1], tokens=4)
    assert loss == pytest.approx((2.0 + 0.5 * (1 + LN2)) / 4)
    assert grad == pytest.approx([-0.5, -0.125])


def test_the_sequence_ratio_is_the_product_over_the_sample_and_clipped_from_above() -> None:
    # sample 0: 2·2 = 4; sample 1: 2·2·2·2 = 16, clipped to 10. coeff = ratio; of 6 tokens
    inference = [-1.0 - LN2] * 6
    _, grad, _ = loss_of([-1.0] * 6, inference, [1.0] * 6, [0, 0, 1, 1, 1, 1], ratio_type="sequence")
    assert grad == pytest.approx([-4 / 6] * 2 + [-10 / 6] * 4)


def test_the_sequence_ratio_is_not_clipped_from_below() -> None:
    # 1/2 · 1/2 · 1/2 = 1/8 for each of the 3 tokens
    _, grad, _ = loss_of([-1.0 - LN2] * 3, [-1.0] * 3, [1.0] * 3, [0, 0, 0], ratio_type="sequence")
    assert grad == pytest.approx([-1 / 24] * 3)


def test_the_kl_term_pulls_towards_the_policy_that_sampled() -> None:
    # log ratio LN2, ratio 2: coeff = 2·(0.5·1 - 0.25·LN2)
    _, grad, _ = loss_of([-1.0], [-1.0 - LN2], [1.0], [0], adv_tau=0.5, kl_tau=0.25)
    assert grad == pytest.approx([-2 * (0.5 - 0.25 * LN2)])


def test_the_teacher_term_pulls_towards_the_teacher() -> None:
    # ratio 2. Token 0: teacher - trainer = 0.5, coeff = 2·(1 + 0.3·0.5) = 2.3; token 1: -1, coeff = 2·(1 - 0.3) = 1.4
    inference = [-1.0 - LN2] * 2
    _, grad, _ = loss_of([-1.0] * 2, inference, [1.0] * 2, [0, 0], teacher=[-0.5, -2.0], teacher_tau=0.3)
    assert grad == pytest.approx([-2.3 / 2, -1.4 / 2])


def test_the_entropy_bonus_raises_the_entropy_of_the_tokens_that_are_kept() -> None:
    # entropies 1 and 3; the second token's ratio is e⁸ > 8, so that it is dropped: -(0 + 0.1·1) / 2, gradient -0.1 / 2
    entropies = torch.tensor([1.0, 3.0], requires_grad=True)
    trainer, options = torch.tensor([-1.0, -1.0]), OPEN | {"entropy_tau": 0.1, "token_mask_high": 8.0}
    loss, metrics = policy_loss(
        trainer,
        entropies=entropies,
        inference_logprobs=torch.tensor([-1.0, -9.0]),
        advantages=torch.zeros(2),
        teacher_logprobs=None,
        sample_ids=torch.tensor([0, 1]),
        num_samples=2,
        lags=torch.zeros(2, dtype=torch.long),
        present_lags=[0],
        num_loss_tokens=2,
        **options,
    )
    loss.backward()
    assert loss.item() == pytest.approx(-0.05)
    assert entropies.grad is not None
    assert entropies.grad.tolist() == pytest.approx([-0.05, 0.0])
    assert as_floats(metrics)["policy/entropy"] == pytest.approx(2.0)


def test_the_teacher_kl_is_the_mean_of_trainer_minus_teacher_over_all_loss_tokens() -> None:
    # (-1 - -0.5) = -0.5, (-1 - -2) = 1, and (-1 - -3) = 2 of a token that a mask drops: 2.5 / 3
    trainer, inference = [-1.0] * 3, [-1.0, -1.0, -9.0]
    options = {"teacher_tau": 0.3, "token_mask_high": 8.0}
    _, _, metrics = loss_of(trainer, inference, [1.0] * 3, [0, 0, 1], teacher=[-0.5, -2.0, -3.0], **options)
    assert metrics["policy/teacher_kl"] == pytest.approx(2.5 / 3)
    assert metrics["policy/masked"] == pytest.approx(1 / 3)


def test_without_a_teacher_there_is_no_teacher_kl_and_a_weight_for_it_is_refused() -> None:
    _, _, metrics = loss_of([-1.0], [-1.0], [1.0], [0])
    assert not [name for name in metrics if "teacher" in name]
    with pytest.raises(ValueError, match="teacher_tau"):
        loss_of([-1.0], [-1.0], [1.0], [0], teacher_tau=0.5)


def test_a_teachers_difference_is_not_clamped() -> None:
    # -60 + 1
    _, grad, metrics = loss_of([-1.0], [-1.0], [0.0], [0], teacher=[-60.0], teacher_tau=1.0)
    assert grad == pytest.approx([59.0])
    assert metrics["policy/teacher_kl"] == 59.0


def test_one_impossible_token_drops_its_sample_by_the_geometric_mask() -> None:
    # the mean of one at -60 and 24 at 0 is -2.4, exp(-2.4) = 0.0907 < 0.1; clamped to -20 it would be exp(-0.8) = 0.449
    _, grad, metrics = loss_of([-60.0] + [0.0] * 24, [0.0] * 25, [1.0] * 25, [0] * 25, geo_mask_low=0.1)
    assert metrics["policy/masked_geo_low"] == 1.0
    assert not any(grad)


def test_the_penalty_is_of_the_raw_log_ratio() -> None:
    # e(-60) = exp(-20), times -kl_tau · -60
    _, grad, _ = loss_of([-61.0], [-1.0], [0.0], [0], kl_tau=1.0)
    assert grad == pytest.approx([-math.exp(-MAX_LOG_RATIO) * 60])


def test_clip_lowers_the_ratio_to_the_bound_and_drops_no_token_for_its_own_ratio() -> None:
    # ratios 4, 1, 1/4 with bounds [1/2, 2]: min(ratio, 2) = 2, 1, 1/4
    trainer, inference = [-1.0, -1.0, -1.0 - 2 * LN2], [-1.0 - 2 * LN2, -1.0, -1.0]
    bounds = {"token_mask_low": 0.5, "token_mask_high": 2.0}
    _, grad, metrics = loss_of(trainer, inference, [1.0] * 3, [0, 0, 0], importance="clip", **bounds)
    assert grad == pytest.approx([-2 / 3, -1 / 3, -0.25 / 3])
    assert (metrics["policy/masked"], metrics["policy/clipped"]) == pytest.approx((0.0, 1 / 3))
    assert "policy/masked_token_high" not in metrics


def test_with_clip_the_masks_on_samples_hold() -> None:
    # sample 0: geometric mean of 8 and 2 = 4 > 3; sample 1: a ratio of 16 > 10; sample 2: 1
    trainer, inference = [-1.0] * 5, [-1 - 3 * LN2, -1 - LN2, -1 - 4 * LN2, -1 + 2 * LN2, -1.0]
    masks = {"geo_mask_high": 3.0, "sequence_mask_high": 10.0, "token_mask_high": 2.0}
    _, grad, metrics = loss_of(trainer, inference, [1.0] * 5, [0, 0, 1, 1, 2], importance="clip", **masks)
    assert grad == pytest.approx([0.0, 0.0, 0.0, 0.0, -1 / 5])
    assert metrics["policy/masked_geo_high"] == pytest.approx(2 / 5)
    assert metrics["policy/masked_sequence_high"] == pytest.approx(2 / 5)


def test_clip_leaves_a_sequence_ratio_to_its_own_bound() -> None:
    # product 2·2 = 4, sequence_clip_high 3; no token is dropped although 2 > token_mask_high = 1.5
    bounds = {"sequence_clip_high": 3.0, "token_mask_high": 1.5}
    _, grad, metrics = loss_of(
        [-1.0] * 2, [-1 - LN2] * 2, [1.0] * 2, [0, 0], importance="clip", ratio_type="sequence", **bounds
    )
    assert grad == pytest.approx([-3 / 2] * 2)
    assert metrics["policy/clipped"] == 1.0


def test_token_masks_drop_single_tokens_and_the_normaliser_still_counts_them() -> None:
    # ratios 4, 1, 1/4 with bounds [1/2, 2]: only the middle one stays, divided by 3
    trainer, inference = [-1.0, -1.0, -1.0 - 2 * LN2], [-1.0 - 2 * LN2, -1.0, -1.0]
    loss, grad, metrics = loss_of(
        trainer, inference, [1.0, 1.0, 1.0], [0, 0, 0], token_mask_low=0.5, token_mask_high=2.0
    )
    assert loss == pytest.approx(1 / 3)
    assert grad == pytest.approx([0.0, -1 / 3, 0.0])
    assert metrics["policy/masked"] == pytest.approx(2 / 3)
    assert metrics["policy/masked_token_low"] == pytest.approx(1 / 3)
    assert metrics["policy/masked_token_high"] == pytest.approx(1 / 3)


def test_a_ratio_on_a_bound_or_between_two_is_kept() -> None:
    bounds = [f"{name}_mask_{end}" for name in ("token", "geo", "sequence") for end in ("low", "high")]
    _, grad, _ = loss_of([-1.0, -1.0], [-1.0, -1.0], [1.0, 1.0], [0, 1], **dict.fromkeys(bounds, 1.0))
    assert grad == pytest.approx([-0.5, -0.5])
    # a ratio of 2 between 1.5 and 3
    between = {name: 1.5 if name.endswith("low") else 3.0 for name in bounds}
    _, grad, _ = loss_of([-1.0], [-1.0 - LN2], [1.0], [0], **between)
    assert grad == pytest.approx([-2.0])


def test_geo_masks_drop_whole_samples_by_their_geometric_mean() -> None:
    # sample 0: ratios 8 and 2 → sqrt(16) = 4 > 3; sample 1: 4 and 1 → 2 stays; sample 2: 1/16 → below 1/8
    trainer = [-1.0] * 4 + [-1.0 - 4 * LN2]
    inference = [-1 - 3 * LN2, -1 - LN2, -1 - 2 * LN2, -1.0, -1.0]
    _, grad, metrics = loss_of(trainer, inference, [1.0] * 5, [0, 0, 1, 1, 2], geo_mask_low=0.125, geo_mask_high=3.0)
    assert grad == pytest.approx([0.0, 0.0, -4 / 5, -1 / 5, 0.0])
    assert metrics["policy/masked_geo_high"] == pytest.approx(2 / 5)
    assert metrics["policy/masked_geo_low"] == pytest.approx(1 / 5)


def test_sequence_masks_drop_whole_samples_by_one_extreme_token() -> None:
    # sample 0 holds a ratio of 8 > 5, sample 1 one of 1/4 < 1/3, sample 2 only 1
    trainer, inference = [-1.0, -1.0, -1 - 2 * LN2, -1.0, -1.0], [-1 - 3 * LN2, -1.0, -1.0, -1.0, -1.0]
    _, grad, metrics = loss_of(
        trainer, inference, [1.0] * 5, [0, 0, 1, 1, 2], sequence_mask_low=1 / 3, sequence_mask_high=5.0
    )
    assert grad == pytest.approx([0.0, 0.0, 0.0, 0.0, -1 / 5])
    assert metrics["policy/masked_sequence_high"] == pytest.approx(2 / 5)
    assert metrics["policy/masked_sequence_low"] == pytest.approx(2 / 5)


def test_an_extreme_log_ratio_is_clamped_counted_and_finite() -> None:
    # exp(500) is infinite; clamped to exp(20)
    unmasked = dict.fromkeys(("token_mask_high", "geo_mask_high", "sequence_mask_high"), math.inf)
    loss, _, metrics = loss_of([-1.0], [-501.0], [1.0], [0], **unmasked)
    assert loss == pytest.approx(math.exp(MAX_LOG_RATIO), rel=1e-5)
    assert metrics["policy/log_ratio_clamped"] == 1.0
    assert metrics["policy/mismatch_max_lag0"] == 500.0


@pytest.mark.parametrize("importance", ["mask", "clip"])
@pytest.mark.parametrize("stream", ["trainer", "inference", "advantages", "teacher"])
def test_nothing_that_is_not_a_number_is_hidden(stream: str, importance: str) -> None:
    streams = {name: [-1.0, -1.0] for name in ("trainer", "inference", "advantages", "teacher")}
    streams[stream] = [math.nan, -1.0]
    masks = {"token_mask_low": 0.1, "token_mask_high": 8.0, "importance": importance, "teacher_tau": 0.5}
    teacher = streams.pop("teacher")
    loss, _, _ = loss_of(*streams.values(), [0, 1], teacher=teacher, **masks)
    assert math.isnan(loss)


@pytest.mark.parametrize("ratio_type", ["token", "sequence"])
@pytest.mark.parametrize("importance", ["mask", "clip"])
def test_absurd_numbers_make_nothing_infinite(importance: str, ratio_type: str) -> None:
    values = [-1e6, -1e3, -0.0, -1e-30, -1e6]
    loss, grad, metrics = loss_of(
        values,
        values[::-1],
        [1e20, -1e20, 0.0, 1e-30, 1.0],
        [0, 0, 0, 1, 2],
        teacher=[-1e6, 0.0, -1e6, 1e6, -1.0],
        **{"importance": importance, "ratio_type": ratio_type, "teacher_tau": 1e3, "kl_tau": 1e3},
    )
    assert all(math.isfinite(number) for number in [loss, *grad, *metrics.values()])


def test_an_infinite_logprob_of_a_masked_token_does_no_harm() -> None:
    loss, grad, _ = loss_of([-math.inf, -1.0], [-1.0, -1.0], [1.0, 1.0], [0, 1], token_mask_low=0.1)
    assert loss == pytest.approx(0.5)
    assert grad == pytest.approx([0.0, -0.5])


def test_mismatch_is_split_by_version_lag() -> None:
    # k3 = r - 1 - ln r: for r = 2: 1 - LN2; for r = 1: 0; for r = 1/2: LN2 - 1/2
    trainer, inference = [-1.0, -1.0, -1.0 - LN2], [-1.0 - LN2, -1.0, -1.0]
    _, _, metrics = loss_of(trainer, inference, [0.0] * 3, [0, 0, 1], lags=[0, 0, 3])
    assert metrics["policy/mismatch_kl_lag0"] == pytest.approx((1 - LN2) / 2)
    assert metrics["policy/mismatch_kl_lag3"] == pytest.approx(LN2 - 0.5)
    assert metrics["policy/kl"] == pytest.approx((1 - LN2 + LN2 - 0.5) / 3)
    assert metrics["policy/mismatch_max_lag0"] == pytest.approx(LN2)
    assert metrics["policy/tokens_lag0"] == 2
    assert (metrics["policy/ratio_min"], metrics["policy/ratio_max"]) == pytest.approx((0.5, 2.0))
    assert metrics["policy/ratio_mean"] == pytest.approx(3.5 / 3)
    assert metrics["policy/tokens"] == 3


def test_k3_of_a_tiny_difference_is_half_its_square() -> None:
    # (1e-3)² / 2 = 5e-7; in float32 exp(x) - 1 - x alone would lose it to rounding
    _, _, metrics = loss_of([0.0], [-1e-3], [0.0], [0])
    assert metrics["policy/kl"] == pytest.approx(5e-7, rel=0.05)


def test_micro_batches_reduce_to_the_metrics_of_the_whole() -> None:
    trainer, inference = torch.tensor([-1.0, -2.0, -0.5, -0.25]), torch.tensor([-1.5, -1.0, -0.5, -0.75])
    ids, lags = torch.tensor([0, 1, 1, 2]), torch.tensor([0, 1, 1, 0])

    def metrics_of(part: slice) -> Any:
        _, metrics = policy_loss(
            trainer[part],
            entropies=torch.tensor([0.5, 1.0, 2.0, 0.0])[part],
            inference_logprobs=inference[part],
            advantages=torch.ones(4)[part],
            teacher_logprobs=None,
            sample_ids=ids[part],
            num_samples=3,
            lags=lags[part],
            present_lags=sorted(set(lags[part].tolist())),
            num_loss_tokens=4,
            **OPEN,
        )
        return metrics

    whole = as_floats(metrics_of(slice(None)))
    merged = as_floats(metrics_of(slice(0, 1)), metrics_of(slice(1, 4)))
    assert merged == pytest.approx(whole)


def test_no_loss_tokens_make_a_loss_of_zero() -> None:
    loss, grad, metrics = loss_of([], [], [], [], tokens=5)
    assert (loss, grad, metrics["policy/tokens"], metrics["policy/masked"]) == (0.0, [], 0.0, 0.0)


@pytest.mark.parametrize("key", ["geo_mask", "sequence_mask"])
def test_bounds_of_the_masks_of_samples_are_inclusive_where_they_are_hit_exactly(key: str) -> None:
    # the ratio is exp(0) = 1 exactly
    for side in ("low", "high"):
        _, grad, metrics = loss_of([-1.0], [-1.0], [1.0], [0], **{f"{key}_{side}": 1.0})
        assert (grad, metrics["policy/masked"]) == ([-1.0], 0.0)
        outside = 1.0 + (1e-6 if side == "low" else -1e-6)
        assert loss_of([-1.0], [-1.0], [1.0], [0], **{f"{key}_{side}": outside})[2]["policy/masked"] == 1.0


@pytest.mark.parametrize("difference", [1e-4, 1e-3, 1e-2])
def test_k3_near_zero_is_exact_to_a_percent(difference: float) -> None:
    # exp(x) - 1 - x = x² / 2 + x³ / 6 + …
    _, _, metrics = loss_of([0.0], [-difference], [0.0], [0])
    assert metrics["policy/kl"] == pytest.approx(difference**2 / 2 + difference**3 / 6, rel=0.01)


def test_entropy_is_told_by_environment() -> None:
    loss_options = {**OPEN, "entropies": torch.tensor([1.0, 2.0, 6.0])}
    zeros = torch.zeros(3)
    _, metrics = policy_loss(
        zeros,
        inference_logprobs=zeros,
        advantages=zeros,
        teacher_logprobs=None,
        sample_ids=torch.tensor([0, 0, 1]),
        num_samples=2,
        lags=torch.zeros(3),
        present_lags=[0],
        envs=("code", "math"),
        env_ids=torch.tensor([1, 1, 0]),
        num_loss_tokens=3,
        **loss_options,
    )
    found = as_floats(metrics)
    assert (found["policy/entropy/math"], found["policy/entropy/code"], found["policy/entropy"]) == (1.5, 6.0, 3.0)

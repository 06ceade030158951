"""The losses of self-distillation and of preference pairs on numbers worked by hand."""

import math
from typing import Any

import pytest
import torch
from grpo.trainer.loss import dpo_loss, sdpo_loss

from tests.trainer.models import as_floats


def sdpo(divergences: list[float], weights: list[float], *, tokens: int) -> tuple[float, list[float], dict[str, float]]:
    """Loss, its gradient and the metrics, of divergences of which those above 2 were clipped."""
    variable = torch.tensor(divergences, requires_grad=True)
    loss, metrics = sdpo_loss(variable, variable > 2, weights=torch.tensor(weights), num_hint_tokens=tokens)
    loss.backward()
    assert variable.grad is not None
    return loss.item(), variable.grad.tolist(), as_floats(metrics)


def dpo(
    chosen: list[float], rejected: list[float], chosen_ref: list[float], rejected_ref: list[float], **options: Any
) -> tuple[float, list[float], list[float], dict[str, float]]:
    """Loss, its gradients and the metrics."""
    variables = torch.tensor(chosen, requires_grad=True), torch.tensor(rejected, requires_grad=True)
    reference = {"chosen_ref_logprobs": torch.tensor(chosen_ref), "rejected_ref_logprobs": torch.tensor(rejected_ref)}
    loss, metrics = dpo_loss(*variables, **reference, **options)
    of_chosen, of_rejected = torch.autograd.grad(loss, variables)
    return loss.item(), of_chosen.tolist(), of_rejected.tolist(), as_floats(metrics)


def test_the_self_distillation_is_the_weighted_sum_over_the_steps_hint_tokens() -> None:
    # (2·0.5 + 1·3) / 8 = 0.5; gradient = weight / 8. The mean is not weighted: (0.5 + 3) / 2
    loss, grad, metrics = sdpo([0.5, 3.0], [2.0, 1.0], tokens=8)
    assert loss == pytest.approx(0.5)
    assert grad == pytest.approx([0.25, 0.125])
    expected = {"loss/sdpo": 0.5, "policy/sdpo_tokens": 2, "policy/sdpo_divergence": 1.75, "policy/sdpo_clipped": 0.5}
    assert metrics == pytest.approx(expected)


def test_no_hint_tokens_make_a_loss_of_zero() -> None:
    loss, _, metrics = sdpo([], [], tokens=3)
    assert (loss, metrics["policy/sdpo_tokens"], metrics["policy/sdpo_divergence"]) == (0.0, 0.0, 0.0)


def test_the_preference_loss_compares_how_far_each_side_moved_from_the_reference() -> None:
    # pair 0: 0.5·[(-4 - -6) - (-9 - -8)] = 0.5·3 = 1.5; pair 1: 0.5·[(-3 - -2) - (-1 - -1)] = -0.5; pair 2 equals the
    # reference: 0, a tie, which is not a preference; of 4 in the step
    loss, of_chosen, of_rejected, metrics = dpo(
        [-4.0, -3.0, -5.0], [-9.0, -1.0, -7.0], [-6.0, -2.0, -5.0], [-8.0, -1.0, -7.0], beta=0.5, num_pairs=4
    )
    margins = [1.5, -0.5, 0.0]
    assert loss == pytest.approx(sum(math.log(1 + math.exp(-margin)) for margin in margins) / 4)
    slopes = [0.5 / (1 + math.exp(margin)) / 4 for margin in margins]
    assert of_chosen == pytest.approx([-slope for slope in slopes])
    assert of_rejected == pytest.approx(slopes)
    expected = {"policy/dpo_pairs": 3, "policy/dpo_accuracy": 1 / 3, "policy/dpo_margin": 1 / 3}
    assert metrics == pytest.approx(expected | {"loss/dpo": loss})


def test_the_regression_brings_the_margin_to_the_difference_of_scores() -> None:
    # Margins 1.5 and -0.5 as above, gaps 1 and 1/3: (0.25 + 0.6944) / 4; the slope of chosen is 2·β·(margin - gap) / 4.
    gaps = torch.tensor([1.0, 1 / 3])
    loss, of_chosen, of_rejected, metrics = dpo(
        [-4.0, -3.0], [-9.0, -1.0], [-6.0, -2.0], [-8.0, -1.0], beta=0.5, num_pairs=4, score_gaps=gaps
    )
    assert loss == pytest.approx((0.25 + 25 / 36) / 4)
    slopes = [2 * 0.5 * 0.5 / 4, 2 * 0.5 * (-5 / 6) / 4]
    assert (of_chosen, of_rejected) == (pytest.approx(slopes), pytest.approx([-slope for slope in slopes]))
    assert (metrics["policy/dpo_margin"], metrics["policy/dpo_accuracy"]) == (0.5, 0.5)


def test_pairs_far_on_either_side_are_finite() -> None:
    # -log σ(-1e30·β) = 1e30·β, and its slope -β
    loss, of_chosen, _, metrics = dpo([-1e30, 0.0], [0.0, -1e30], [0.0, 0.0], [0.0, 0.0], beta=0.1, num_pairs=1)
    assert loss == pytest.approx(1e29)
    assert of_chosen == pytest.approx([-0.1, 0.0])
    assert metrics["policy/dpo_accuracy"] == 0.5
    assert all(math.isfinite(value) for value in metrics.values())


def test_a_pair_that_is_not_a_number_is_not_hidden() -> None:
    loss, _, _, metrics = dpo([math.nan, -1.0], [-1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0], beta=0.1, num_pairs=2)
    assert math.isnan(loss)
    assert math.isnan(metrics["policy/dpo_margin"])

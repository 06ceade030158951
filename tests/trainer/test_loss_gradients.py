"""Gradients of the losses against finite differences, in float64.

The policy loss detaches its coefficient, so its gradient is not that of its value: it is that of a surrogate, of which
the coefficient is the derivative. The surrogate is written out here.
"""

from typing import Any

import pytest
import torch

import trainer.loss

OPEN = {
    "entropy_tau": 0.0,
    "ratio_type": "token",
    "importance": "mask",
    "token_mask_low": 0.0,
    "token_mask_high": 1e9,
    "geo_mask_low": 0.0,
    "geo_mask_high": 1e9,
    "sequence_mask_low": 0.0,
    "sequence_mask_high": 1e9,
    "sequence_clip_high": 10.0,
}
TAUS = {
    "advantage": (1.0, 0.0, 0.0),
    "teacher": (0.0, 0.7, 0.0),
    "kl": (0.0, 0.0, 0.4),
    "all": (0.8, 0.5, 0.3),
}


def surrogate(
    trainer: torch.Tensor, inference: torch.Tensor, teacher: torch.Tensor, advantages: torch.Tensor, *taus: float
) -> torch.Tensor:
    """[] -Σ of the antiderivatives by y = trainer - inference of exp(y)·A, exp(y)·(c - y) and -exp(y)·y, where
    c = teacher - inference: exp(y)·A, exp(y)·(c - y + 1) and -exp(y)·(y - 1)."""
    adv_tau, teacher_tau, kl_tau = taus
    y, c = trainer - inference, teacher - inference
    terms = adv_tau * advantages + teacher_tau * (c - y + 1) - kl_tau * (y - 1)
    return -(y.exp() * terms).sum()


def check_policy_gradient(losses: Any, name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    trainer, inference, teacher = -torch.rand(3, 6, dtype=torch.float64, generator=generator) * 2
    advantages = torch.randn(6, dtype=torch.float64, generator=generator)
    adv_tau, teacher_tau, kl_tau = TAUS[name]
    variable = trainer.clone().requires_grad_()
    loss, _ = losses.policy_loss(
        variable,
        entropies=torch.zeros(6, dtype=torch.float64),
        inference_logprobs=inference,
        advantages=advantages,
        teacher_logprobs=teacher,
        sample_ids=torch.tensor([0, 0, 1, 1, 1, 3]),
        num_samples=4,
        lags=torch.zeros(6, dtype=torch.long),
        present_lags=[0],
        num_loss_tokens=9,
        **(OPEN | {"adv_tau": adv_tau, "teacher_tau": teacher_tau, "kl_tau": kl_tau}),
    )
    (grad,) = torch.autograd.grad(loss, variable)
    for t in range(6):
        step = torch.zeros(6, dtype=torch.float64)
        step[t] = 1e-5
        ends = [surrogate(trainer + s, inference, teacher, advantages, *TAUS[name]) for s in (step, -step)]
        assert grad[t].item() == pytest.approx(((ends[0] - ends[1]) / 2e-5 / 9).item(), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", TAUS)
def test_the_gradient_of_the_policy_loss_is_that_of_the_surrogate(name: str) -> None:
    check_policy_gradient(trainer.loss, name)


def test_the_gradient_of_the_self_distillation_equals_finite_differences() -> None:
    divergences = torch.tensor([0.1, 0.6, 2.0, 0.3], dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([1.0, 0.5, 2.0, 3.0], dtype=torch.float64)

    def loss(values: torch.Tensor) -> torch.Tensor:
        return trainer.loss.sdpo_loss(values, weights=weights, token_clip=1.0, num_hint_tokens=7)[0]

    assert torch.autograd.gradcheck(loss, (divergences,))


def test_the_gradient_of_the_preferences_equals_finite_differences() -> None:
    generator = torch.Generator().manual_seed(4)
    chosen, rejected, chosen_ref, rejected_ref = -torch.rand(4, 5, dtype=torch.float64, generator=generator) * 30

    def loss(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        reference = {"chosen_ref_logprobs": chosen_ref, "rejected_ref_logprobs": rejected_ref}
        return trainer.loss.dpo_loss(chosen, rejected, **reference, beta=0.2, num_pairs=8)[0]

    assert torch.autograd.gradcheck(loss, (chosen.clone().requires_grad_(), rejected.clone().requires_grad_()))

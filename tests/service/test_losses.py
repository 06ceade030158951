"""Each loss of the protocol against its formula in float64, written out."""

from typing import Any

import pytest
import torch
from grpo.service.errors import Refused
from grpo.service.losses import check_config, clip_bounds, loss_and_values
from grpo.service.wire import CONFIG, INPUTS

LOW, HIGH, BETA = 0.7, 1.4, 0.3
BOUNDS = ("clip_low_threshold", "clip_high_threshold")
FIGURES = {"clip_low_threshold": LOW, "clip_high_threshold": HIGH, "beta": BETA}
DATUMS = torch.arange(64) // 16
"""Which of four datums each token is of."""


def inputs() -> dict[str, torch.Tensor]:
    """64 tokens whose ratios lie on both sides of both bounds, with advantages of both signs."""
    made = torch.Generator().manual_seed(0)
    draw = lambda: torch.randn(64, generator=made, dtype=torch.float64)  # noqa: E731
    return {"now": -1 + 0.5 * draw(), "logprobs": -1 + 0.5 * draw(), "advantages": draw(), "weights": draw()}


def by_formula(loss_fn: str, now: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """[K] as the protocol's documentation has it."""
    ratio, advantages = torch.exp(now - given["logprobs"]), given["advantages"]
    clipped, sampled = ratio.clamp(LOW, HIGH), given["logprobs"] != 0
    means = [(now - given["logprobs"])[(datum == DATUMS) & sampled].mean() for datum in range(4)]
    of_datum = torch.stack(means).detach().exp()[DATUMS] * torch.exp(now - now.detach())
    return {
        "cross_entropy": -now * given["weights"],
        "importance_sampling": -ratio * advantages,
        "ppo": -torch.minimum(ratio * advantages, clipped * advantages),
        "cispo": -clipped.detach() * now * advantages,
        "gspo": torch.where(
            sampled, -torch.minimum(of_datum * advantages, of_datum.clamp(LOW, HIGH) * advantages), 0.0
        ),
        "dro": torch.where(sampled, -(now * advantages - 0.5 * BETA * (now - given["logprobs"]) ** 2), 0.0),
    }[loss_fn]


@pytest.mark.parametrize("loss_fn", INPUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_loss_and_its_gradient_are_those_of_the_formula(loss_fn: str, dtype: torch.dtype) -> None:
    given, config = inputs(), {key: FIGURES[key] for key in CONFIG.get(loss_fn, ())}
    if loss_fn in ("gspo", "dro"):  # prompts, which were not sampled
        for name in ("logprobs", "advantages"):
            given[name][::5] = 0.0
    reference = given["now"].clone().requires_grad_()
    expected = by_formula(loss_fn, reference, given)
    (gradient,) = torch.autograd.grad(expected.sum(), reference)

    now = given["now"].to(dtype).requires_grad_()
    loss, values = loss_and_values(loss_fn, now, {k: v.to(dtype) for k, v in given.items()}, config, DATUMS)
    (found,) = torch.autograd.grad(loss, now)

    close: Any = {"atol": 1e-12, "rtol": 1e-12} if dtype == torch.float64 else {"atol": 2e-6, "rtol": 2e-6}
    torch.testing.assert_close(values.double(), expected.detach(), **close)
    torch.testing.assert_close(found.double(), gradient, **close)


def test_a_penalty_below_zero_is_refused() -> None:
    for beta in (-0.1, float("nan"), float("inf")):
        with pytest.raises(Refused, match="beta"):
            check_config("dro", {"beta": beta})


@pytest.mark.parametrize(("low", "high"), [(1.2, 0.8), (-0.1, 1.2), (0.8, float("inf")), (float("nan"), 1.2)])
def test_bounds_that_bound_nothing_are_refused(low: float, high: float) -> None:
    with pytest.raises(Refused):
        clip_bounds(dict(zip(BOUNDS, (low, high), strict=True)))

"""Each loss of the protocol against its formula in float64, written out."""

from typing import Any

import pytest
import torch
from grpo.service.errors import Refused
from grpo.service.losses import clip_bounds, loss_and_values

LOW, HIGH = 0.7, 1.4


def inputs() -> dict[str, torch.Tensor]:
    """64 tokens whose ratios lie on both sides of both bounds, with advantages of both signs."""
    made = torch.Generator().manual_seed(0)
    draw = lambda: torch.randn(64, generator=made, dtype=torch.float64)  # noqa: E731
    return {"now": -1 + 0.5 * draw(), "logprobs": -1 + 0.5 * draw(), "advantages": draw(), "weights": draw()}


def by_formula(loss_fn: str, now: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """[K] as the protocol's documentation has it."""
    ratio, advantages = torch.exp(now - given["logprobs"]), given["advantages"]
    clipped = ratio.clamp(LOW, HIGH)
    return {
        "cross_entropy": -now * given["weights"],
        "importance_sampling": -ratio * advantages,
        "ppo": -torch.minimum(ratio * advantages, clipped * advantages),
        "cispo": -clipped.detach() * now * advantages,
    }[loss_fn]


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "importance_sampling", "ppo", "cispo"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_loss_and_its_gradient_are_those_of_the_formula(loss_fn: str, dtype: torch.dtype) -> None:
    given = inputs()
    config = {} if loss_fn in ("cross_entropy", "importance_sampling") else dict(zip(BOUNDS, (LOW, HIGH), strict=True))
    reference = given["now"].clone().requires_grad_()
    expected = by_formula(loss_fn, reference, given)
    (gradient,) = torch.autograd.grad(expected.sum(), reference)

    now = given["now"].to(dtype).requires_grad_()
    loss, values = loss_and_values(loss_fn, now, {k: v.to(dtype) for k, v in given.items()}, config)
    (found,) = torch.autograd.grad(loss, now)

    close: Any = {"atol": 1e-12, "rtol": 1e-12} if dtype == torch.float64 else {"atol": 2e-6, "rtol": 2e-6}
    torch.testing.assert_close(values.double(), expected.detach(), **close)
    torch.testing.assert_close(found.double(), gradient, **close)


BOUNDS = ("clip_low_threshold", "clip_high_threshold")


@pytest.mark.parametrize(("low", "high"), [(1.2, 0.8), (-0.1, 1.2), (0.8, float("inf")), (float("nan"), 1.2)])
def test_bounds_that_bound_nothing_are_refused(low: float, high: float) -> None:
    with pytest.raises(Refused):
        clip_bounds(dict(zip(BOUNDS, (low, high), strict=True)))

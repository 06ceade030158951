import math

import pytest
import torch

from trainer.errors import NonFiniteError
from trainer.optim import Optimizer, learning_rate


def rates(schedule: str, *, warmup_steps: int, max_steps: int, steps: int) -> list[float]:
    return [
        learning_rate(n, peak=1.0, schedule=schedule, warmup_steps=warmup_steps, max_steps=max_steps)  # type: ignore[arg-type]
        for n in range(1, steps + 1)
    ]


def test_warm_up_rises_in_equal_steps_to_the_peak_and_constant_stays_there() -> None:
    assert rates("constant", warmup_steps=4, max_steps=-1, steps=6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_falls_from_the_peak_to_zero_just_after_the_last_step() -> None:
    # 2 of warm-up, then (n - 3) / 4 of the way
    assert rates("linear", warmup_steps=2, max_steps=6, steps=7) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]


def test_cosine_is_half_way_at_half_time() -> None:
    # progress 0, 1/4, 1/2, 3/4: (1 + cos π/4) / 2 = 0.853553
    expected = [1.0, 0.8535534, 0.5, 0.1464466]
    assert rates("cosine", warmup_steps=0, max_steps=4, steps=4) == pytest.approx(expected)


def optimizer_of(parameter: torch.nn.Parameter, *, weight_decay: float = 0.0, max_grad_norm: float = 1.0) -> Optimizer:
    return Optimizer(
        [parameter], betas=(0.9, 0.999), epsilon=1e-8, weight_decay=weight_decay, max_grad_norm=max_grad_norm
    )


def test_adamws_first_step_is_the_learning_rate_in_the_gradients_direction_after_decay() -> None:
    # first step: m̂ / (sqrt(v̂) + ε) = sign(g) = 1; decay 1 - 0.1·0.5 = 0.95: 2·0.95 - 0.1 = 1.8
    parameter = torch.nn.Parameter(torch.tensor([2.0]))
    parameter.grad = torch.tensor([0.5])
    norm = optimizer_of(parameter, weight_decay=0.5).step(learning_rate=0.1)
    assert norm == 0.5
    assert parameter.item() == pytest.approx(1.8)
    assert parameter.grad is None


def test_gradients_are_scaled_down_to_the_largest_norm_and_the_norm_before_is_returned() -> None:
    # (3, 4) has norm 5; clipped to 1 it is (0.6, 0.8); a second step tells clipped from unclipped moments
    clipped, scaled = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizers = optimizer_of(clipped, max_grad_norm=1.0), optimizer_of(scaled, max_grad_norm=100.0)
    clipped.grad, scaled.grad = torch.tensor([3.0, 4.0]), torch.tensor([0.6, 0.8])
    assert optimizers[0].step(learning_rate=0.1) == pytest.approx(5.0)
    optimizers[1].step(learning_rate=0.1)
    clipped.grad, scaled.grad = torch.tensor([-0.1, 0.2]), torch.tensor([-0.1, 0.2])
    for optimizer in optimizers:
        optimizer.step(learning_rate=0.1)
    torch.testing.assert_close(clipped, scaled, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_refused_and_changes_nothing(bad: float) -> None:
    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    parameter.grad = torch.tensor([bad, 0.0])
    with pytest.raises(NonFiniteError, match=r"norm is (nan|inf)"):
        optimizer_of(parameter).step(learning_rate=0.1)
    assert parameter.tolist() == [1.0, 2.0]

"""Optimizer steps by hand, refusal, and exact continuation from saved state."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo.trainer.errors import ModelError, NonFiniteError
from grpo.trainer.optim import Named, Optimizer
from safetensors.torch import load, save

from tests.trainer.models import tiny_settings

KINDS = ("adamw", "adamw_8bit", "muon")


def optimizer_of(parameters: Named, **changes: Any) -> Optimizer:
    return Optimizer(tiny_settings(Path("m"), **({"weight_decay": 0.0} | changes)), parameters)


def parameter(*values: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(values))


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_step_of_a_vector_is_the_learning_rate_in_the_gradients_direction_after_decay(kind: str) -> None:
    # first step: m̂ / (sqrt(v̂) + ε) = sign(g) = 1; decay 1 - 0.1·0.5 = 0.95: 2·0.95 - 0.1 = 1.8
    one = parameter(2.0)
    one.grad = torch.tensor([0.5])
    norm = optimizer_of({"norm.weight": one}, optimizer=kind, weight_decay=0.5).step(learning_rate=0.1)
    assert norm == 0.5
    assert one.item() == pytest.approx(1.8)
    assert one.grad is None


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit"])
def test_two_steps_by_hand_follow_the_betas_and_epsilon_that_are_set(kind: str) -> None:
    # m̂ = 1, v̂ = 1: -0.1 · 1 / (1 + 1) = -0.05; then m = 0.5 · 0.5 + 0.5 · 3 = 1.75, m̂ = 1.75 / 0.75 = 7/3 and
    # v = 0.75 · 0.25 + 0.25 · 9 = 2.4375, v̂ = 2.4375 / 0.4375 = 5.5714: -0.05 - 0.1 · 7/3 / (2.3604 + 1) = -0.11944
    one = parameter(0.0)
    chosen = {"adam_beta1": 0.5, "adam_beta2": 0.75, "adam_epsilon": 1.0, "max_grad_norm": 10.0}
    optimizer = optimizer_of({"w": one}, optimizer=kind, **chosen)
    for gradient, expected in ((1.0, -0.05), (3.0, -0.119437)):
        one.grad = torch.tensor([gradient])
        optimizer.step(learning_rate=0.1)
        assert one.item() == pytest.approx(expected, rel=1e-5)


def test_muon_moves_a_matrix_by_the_rate_and_decay_of_the_step() -> None:
    # all singular values of the update are near 1, times 0.2 · sqrt(8) as of AdamW's; without a gradient only decay
    moved = []
    for rate in (0.1, 0.2):
        matrix = torch.nn.Parameter(torch.zeros(8, 8))
        matrix.grad = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
        optimizer_of({"w": matrix}, optimizer="muon").step(learning_rate=rate)
        moved.append(matrix.detach())
    assert moved[0].norm(2) == pytest.approx(0.1 * 0.2 * 8**0.5 * 8**0.5, rel=0.2)
    torch.testing.assert_close(moved[1], 2 * moved[0])
    matrix = torch.nn.Parameter(torch.full((8, 8), 2.0))
    matrix.grad = torch.zeros(8, 8)
    optimizer_of({"w": matrix}, optimizer="muon", weight_decay=0.5).step(learning_rate=0.1)
    torch.testing.assert_close(matrix.detach(), torch.full((8, 8), 1.9))  # 2 · (1 - 0.1 · 0.5)


def test_muon_remembers_as_much_of_earlier_gradients_as_is_set() -> None:
    # the second gradient is opposed and a tenth of the first: with much momentum the matrix still goes its way
    directions = []
    for momentum in (0.1, 0.95):
        matrix = torch.nn.Parameter(torch.zeros(4, 4))
        optimizer = optimizer_of({"w": matrix}, optimizer="muon", muon_momentum=momentum)
        for size in (-1.0, 0.1):
            before = matrix.detach().clone()
            matrix.grad = size * torch.eye(4)
            optimizer.step(learning_rate=0.1)
        directions.append(float((matrix.detach() - before).trace()))
    assert directions[0] < 0 < directions[1]


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight", "transformer.wte.weight"])
def test_muon_leaves_tables_with_a_row_for_each_token_to_adamw(name: str) -> None:
    table = torch.nn.Parameter(torch.zeros(3, 4))
    table.grad = torch.arange(1.0, 13.0).view(3, 4)
    optimizer_of({name: table}, optimizer="muon").step(learning_rate=0.1)
    torch.testing.assert_close(table.detach(), torch.full((3, 4), -0.1))


def test_adamw_with_8_bit_state_stays_near_adamw_with_float32_state() -> None:
    # 4,096 values and more have 8-bit state; the coarsest of its codes are 2% apart
    exact, coarse = (torch.nn.Parameter(torch.zeros(64, 80)) for _ in range(2))
    optimizers = optimizer_of({"w": exact}), optimizer_of({"w": coarse}, optimizer="adamw_8bit")
    for step in range(20):
        gradient = torch.randn(64, 80, generator=torch.Generator().manual_seed(step))
        for one, optimizer in zip((exact, coarse), optimizers, strict=True):
            one.grad = gradient.clone()
            optimizer.step(learning_rate=0.01)
    codes = optimizers[1].state_tensors()["adamw_8bit/rank_0/w/state1"]
    assert codes.dtype == torch.uint8
    assert exact.abs().max() > 0.03
    assert (exact - coarse).abs().mean() < 0.02 * exact.abs().mean()
    assert not torch.equal(exact, coarse)


def test_gradients_are_scaled_down_to_the_largest_norm_and_the_norm_before_is_returned() -> None:
    # (3, 4) has norm 5; clipped to 1 it is (0.6, 0.8); a second step tells clipped from unclipped moments
    clipped, scaled = parameter(0.0, 0.0), parameter(0.0, 0.0)
    optimizers = optimizer_of({"w": clipped}, max_grad_norm=1.0), optimizer_of({"w": scaled}, max_grad_norm=100.0)
    clipped.grad, scaled.grad = torch.tensor([3.0, 4.0]), torch.tensor([0.6, 0.8])
    assert optimizers[0].step(learning_rate=0.1) == pytest.approx(5.0)
    optimizers[1].step(learning_rate=0.1)
    clipped.grad, scaled.grad = torch.tensor([-0.1, 0.2]), torch.tensor([-0.1, 0.2])
    for optimizer in optimizers:
        optimizer.step(learning_rate=0.1)
    torch.testing.assert_close(clipped, scaled, atol=1e-6, rtol=1e-5)


def model() -> dict[str, torch.nn.Parameter]:
    """A matrix with 8-bit state, one without, an embedding, a vector, and one that never gets a gradient."""
    shapes = {"layer.up.weight": (96, 64), "layer.down.weight": (8, 12), "embed_tokens.weight": (70, 64)}
    shapes |= {"norm.weight": (64,), "unused.weight": (4, 4)}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def train(parameters: Named, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for name, one in parameters.items():
            if name != "unused.weight":
                one.grad = torch.randn(one.shape, generator=generator)
        optimizer.step(learning_rate=0.01 * step)


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_continues_from_its_saved_state_bit_for_bit(kind: str) -> None:
    straight = model()
    train(straight, optimizer_of(straight, optimizer=kind, weight_decay=0.1), range(1, 7))

    stopped = model()
    first = optimizer_of(stopped, optimizer=kind, weight_decay=0.1)
    train(stopped, first, range(1, 4))
    data = save(first.state_tensors())
    resumed = {name: torch.nn.Parameter(one.detach().clone()) for name, one in stopped.items()}
    second = optimizer_of(resumed, optimizer=kind, weight_decay=0.1)
    second.load_state_tensors(load(data))
    train(resumed, second, range(4, 7))

    fresh = {name: torch.nn.Parameter(one.detach().clone()) for name, one in stopped.items()}
    train(fresh, optimizer_of(fresh, optimizer=kind, weight_decay=0.1), range(4, 7))
    for name, expected in straight.items():
        assert torch.equal(resumed[name], expected), name
        assert name == "unused.weight" or not torch.equal(fresh[name], expected), f"{name} does not need its state"
    assert resumed.keys() == straight.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_is_not_finite_is_refused_and_changes_nothing(kind: str) -> None:
    parameters = model()
    optimizer = optimizer_of(parameters, optimizer=kind)
    train(parameters, optimizer, range(1, 2))
    weights = {name: one.detach().clone() for name, one in parameters.items()}
    state = optimizer.state_tensors()
    for one in parameters.values():
        one.grad = torch.ones_like(one)
    parameters["norm.weight"].grad = torch.full((64,), math.nan)
    with pytest.raises(NonFiniteError, match="nan"):
        optimizer.step(learning_rate=0.1)
    assert all(torch.equal(one, weights[name]) for name, one in parameters.items())
    after = optimizer.state_tensors()
    assert all(torch.equal(tensor, after[name]) for name, tensor in state.items())
    assert after.keys() == state.keys()


def test_a_gradient_whose_norm_overflows_is_refused() -> None:
    # each is finite, and the root of the sum of their squares is 4.2e38, beyond float32's 3.4e38
    one = parameter(1.0, 1.0)
    one.grad = torch.tensor([3e38, 3e38])
    with pytest.raises(NonFiniteError, match="inf"):
        optimizer_of({"w": one}).step(learning_rate=0.1)
    assert one.tolist() == [1.0, 1.0]


def test_paged_state_is_refused_on_a_cpu_by_the_settings_name() -> None:
    with pytest.raises(ModelError, match="adamw_8bit_paged"):
        optimizer_of({"w": parameter(1.0)}, optimizer="adamw_8bit_paged")

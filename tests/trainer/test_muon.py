"""Muon against its definition: singular values in float64, and torch's own."""

import math

import numpy as np
import pytest
import torch

from trainer.muon import Muon, is_matrix, orthogonalized, update_scale

SHAPES = [(6, 6), (3, 17), (40, 8), (1, 5)]


def by_singular_values(matrix: np.ndarray) -> np.ndarray:
    """U p⁵(S) Vᵀ in float64: each iteration changes the singular values alone, by p(s) = a s + b s³ + c s⁵."""
    u, s, vt = np.linalg.svd(matrix / np.linalg.norm(matrix), full_matrices=False)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    result: np.ndarray = u * s @ vt
    return result


def gradient(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
def test_orthogonalizing_changes_the_singular_values_and_nothing_else(shape: tuple[int, int]) -> None:
    matrix = gradient(shape)
    expected = by_singular_values(matrix.double().numpy())
    np.testing.assert_allclose(orthogonalized(matrix).numpy(), expected, atol=2e-5)
    values = np.linalg.svd(expected, compute_uv=False)
    assert 0.6 < values.min() <= values.max() < 1.3


def test_orthogonalizing_does_not_depend_on_the_size_of_the_gradient() -> None:
    matrix = gradient((5, 9))
    torch.testing.assert_close(orthogonalized(matrix * 1e-3), orthogonalized(matrix), atol=1e-4, rtol=1e-3)


def test_a_gradient_of_zeros_gives_zeros() -> None:
    assert not orthogonalized(torch.zeros(3, 4)).any()


def test_an_update_has_about_the_root_mean_square_of_adamws() -> None:
    # orthogonal [rows, columns]: rms 1 / sqrt(max(rows, columns)), scaled 0.2; singular values lie within 0.7 … 1.2
    for shape in ((64, 64), (16, 200), (200, 16)):
        update = update_scale(*shape) * orthogonalized(gradient(shape))
        assert 0.2 * 0.7 < float(update.square().mean().sqrt()) < 0.2 * 1.2
    assert update_scale(16, 400) == pytest.approx(4.0)  # 0.2 · 20


def test_a_step_by_hand_on_a_matrix_of_one_number() -> None:
    # g = 3: B = 0.1·3 = 0.3, g + 0.9 (B - g) = 0.57, normalised to 1. p(1) = 3.4445 - 4.7750 + 2.0315 = 0.7010, then
    # p(0.7010) = 1.1136, 0.7207, 1.0900, 0.6964. Decay 0.5, learning rate 0.1: 2·(1 - 0.05) - 0.1·0.2·0.6964 = 1.8861
    one = torch.nn.Parameter(torch.tensor([[2.0]]))
    one.grad = torch.tensor([[3.0]])
    Muon({"w": one}, momentum=0.9, weight_decay=0.5).step(0.1)
    assert one.item() == pytest.approx(1.8861, abs=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_steps_are_those_of_torchs_muon_up_to_its_16_bits(shape: tuple[int, int]) -> None:
    ours, theirs = (torch.nn.Parameter(torch.ones(shape)) for _ in range(2))
    muon = Muon({"w": ours}, momentum=0.9, weight_decay=0.1)
    reference = torch.optim.Muon([theirs], lr=0.05, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    for step in range(4):
        ours.grad, theirs.grad = gradient(shape, step), gradient(shape, step)
        muon.step(0.05)
        reference.step()
    largest = 0.05 * 0.2 * math.sqrt(max(shape))
    assert float((ours - theirs).detach().abs().max()) < 0.1 * largest
    assert float((ours - 1).detach().abs().max()) > largest


def test_tables_of_the_vocabulary_and_vectors_are_no_matrices() -> None:
    table = torch.zeros(4, 4)
    assert is_matrix("model.layers.0.self_attn.q_proj.lora_A.default.weight", table)
    assert is_matrix("model.layers.0.mlp.up_proj.weight", table)
    assert not is_matrix("model.embed_tokens.weight", table)
    assert not is_matrix("lm_head.weight", table)
    assert not is_matrix("model.layers.0.input_layernorm.weight", torch.zeros(4))

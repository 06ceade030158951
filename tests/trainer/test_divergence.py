"""The generalized Jensen–Shannon divergence fused with the LM head."""

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from grpo.configs.loss import SdpoSettings
from grpo.trainer.divergence import generalized_jsd

from tests.trainer.tiles import LargestTensor

BETAS = [0.0, 0.01, 0.5, 0.9, 1.0]


def chosen(**options: Any) -> SdpoSettings:
    """Plain beta 0.5 where nothing else is said."""
    return SdpoSettings().model_copy(update={"token_clip": None} | options)


def reference(
    student_logits: torch.Tensor, teacher_logits: torch.Tensor, beta: float, temperature: float = 1.0
) -> np.ndarray:
    """[K] from the definition, position by position in float64."""
    results = []
    rows = (logits.detach().double().numpy() for logits in (student_logits, teacher_logits))
    for student, teacher in zip(*rows, strict=True):
        q, p = (np.exp(logits / temperature) for logits in (student, teacher))
        q, p = q / q.sum(), p / p.sum()
        mixture = beta * p + (1 - beta) * q

        def kl(of: np.ndarray, to: np.ndarray) -> float:
            return float(sum(a * math.log(a / b) for a, b in zip(of, to, strict=True)))

        if 0 < beta < 1:
            results.append(beta * kl(p, mixture) + (1 - beta) * kl(q, mixture))
        else:
            results.append(kl(q, p) if beta else kl(p, q))
    return np.array(results)


def inputs(seed: int, num_positions: int = 7) -> tuple[torch.Tensor, ...]:
    """Hidden states of 3 of student and teacher, heads of 7 tokens of both."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (num_positions, 3), (num_positions, 3), (7, 3), (7, 3)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def of_probabilities(student: list[float], teacher: list[float], **options: Any) -> float:
    """Of two distributions over a vocabulary that is as large as a hidden state."""
    rows = (torch.tensor([probabilities], dtype=torch.float64).log() for probabilities in (student, teacher))
    return generalized_jsd(*rows, torch.eye(len(student), dtype=torch.float64), chosen(**options))[0].item()


def test_the_divergence_of_equals_is_0_and_so_is_its_gradient() -> None:
    hidden, _, head, _ = inputs(6)
    for beta in BETAS:
        variable = hidden.clone().requires_grad_()
        result, _ = generalized_jsd(variable, hidden, head, chosen(beta=beta))
        (grad,) = torch.autograd.grad(result.sum(), variable)
        assert not result.any()
        assert grad.abs().max() < 1e-15


@pytest.mark.parametrize("beta", BETAS)
def test_values_equal_the_definition_whatever_the_chunks(beta: float) -> None:
    student, teacher, head, teacher_head = inputs(0)
    for temperature, logits_at_once in ((1.0, 1), (0.6, 15), (2.0, 1000)):
        for other in (None, teacher_head):
            settings = chosen(beta=beta, temperature=temperature)
            options: dict[str, Any] = {"teacher_weight": other, "logits_at_once": logits_at_once}
            ours, _ = generalized_jsd(student, teacher, head, settings, **options)
            expected = reference(student @ head.T, teacher @ (head if other is None else other).T, beta, temperature)
            np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_gradients_equal_finite_differences(beta: float) -> None:
    student, teacher, head, teacher_head = inputs(7, num_positions=3)
    settings, options = chosen(beta=beta, temperature=0.7), {"teacher_weight": teacher_head, "logits_at_once": 15}
    variables = student.requires_grad_(), head.requires_grad_()
    assert torch.autograd.gradcheck(lambda s, h: generalized_jsd(s, teacher, h, settings, **options)[0], variables)


def test_each_entry_of_the_vocabulary_is_clipped_or_each_position() -> None:
    # Terms p ln(p / q) of p = (3/4, 1/4) and q = (1/4, 3/4): 3/4 ln 3 = 0.824 and -1/4 ln 3 = -0.275, 0.549 together
    student, teacher, high = [0.25, 0.75], [0.75, 0.25], 0.75 * math.log(3)
    by_entry = of_probabilities(student, teacher, beta=0.0, token_clip=0.4)
    assert by_entry == pytest.approx(0.4 - high / 3)
    assert of_probabilities(student, teacher, beta=0.0, token_clip=0.4, clip_by="position") == pytest.approx(0.4)
    for clip in (high + 1e-9, None):
        assert of_probabilities(student, teacher, beta=0.0, token_clip=clip) == pytest.approx(high * 2 / 3)


@pytest.mark.parametrize(("beta", "clip_by"), [(0.0, "entry"), (0.3, "entry"), (1.0, "entry"), (0.3, "position")])
def test_what_is_clipped_has_no_gradient_and_all_else_that_of_finite_differences(beta: float, clip_by: str) -> None:
    student, teacher, head, teacher_head = inputs(8)
    options: dict[str, Any] = {"beta": beta, "temperature": 0.7, "clip_by": clip_by}
    plain, _ = generalized_jsd(student, teacher, head, chosen(**options), teacher_weight=teacher_head)
    settings = chosen(**options, token_clip=float(plain.median()) * (0.5 if clip_by == "entry" else 1.01))
    values, clipped = generalized_jsd(student, teacher, head, settings, teacher_weight=teacher_head)
    assert 0 < clipped.sum() < len(clipped)
    assert torch.equal(clipped, values < plain)
    variables = student.requires_grad_(), head.requires_grad_()
    of = partial(generalized_jsd, settings=settings, teacher_weight=teacher_head)
    assert torch.autograd.gradcheck(lambda s, h: of(s, teacher, h)[0], variables)


def test_the_teacher_has_no_gradient() -> None:
    """With one head for both, the head's gradient is the student's alone."""
    student, teacher, head, _ = inputs(2)
    grads = []
    for other in (None, head.clone()):
        variables = student.clone().requires_grad_(), teacher.clone().requires_grad_(), head.clone().requires_grad_()
        result = generalized_jsd(*variables, chosen(), teacher_weight=other)[0].sum()
        grads.append(torch.autograd.grad(result, variables, allow_unused=True))
    assert grads[0][1] is None
    torch.testing.assert_close(grads[0][0], grads[1][0])
    torch.testing.assert_close(grads[0][2], grads[1][2])


@pytest.mark.parametrize("head_is_trained", [False, True])
def test_the_logits_of_all_positions_never_exist_at_once(head_is_trained: bool) -> None:
    """No tensor has more elements than a chunk; hidden states [64, 4] and the head [100, 4] have fewer."""
    student = torch.randn(64, 4, requires_grad=True)
    head = torch.randn(100, 4, requires_grad=head_is_trained)
    with LargestTensor() as largest:
        generalized_jsd(student, torch.randn(64, 4), head, chosen(beta=0.4), logits_at_once=800)[0].sum().backward()
    assert largest.elements <= 800


def test_a_tiny_divergence_keeps_its_digits_in_float32() -> None:
    """Between distributions that differ by about 1e-3 the divergence is β(1-β)/2 · Σ q (log p - log q)², about 1e-7,
    which float32 would lose if it subtracted logarithms of the mixture."""
    student, _, head, _ = (x.float() for x in inputs(3))
    teacher = student + 1e-3 * torch.randn(student.shape, generator=torch.Generator().manual_seed(4))
    ours, _ = generalized_jsd(student, teacher, head, chosen(beta=0.3))
    exact = reference(student.double() @ head.double().T, teacher.double() @ head.double().T, 0.3)
    np.testing.assert_allclose(ours, exact, rtol=0.02)


@pytest.mark.parametrize("beta", [0.0, 1e-9, 0.3, 1 - 1e-9, 1.0])
def test_certain_opposites_are_finite(beta: float) -> None:
    """Student and teacher certain of different tokens: KL is the difference of the logits, and the divergence to the
    mixture its entropy. Nothing is infinite, gradients included."""
    head = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    student = torch.tensor([[3e4, 0.0]], requires_grad=True)
    teacher = torch.tensor([[0.0, 3e4]])
    result, _ = generalized_jsd(student, teacher, head, chosen(beta=beta))
    entropy = -beta * math.log(beta) - (1 - beta) * math.log(1 - beta) if 0 < beta < 1 else 3e4
    torch.testing.assert_close(result, torch.tensor([entropy]))
    (grad,) = torch.autograd.grad(result.sum(), student)
    assert grad.isfinite().all()


def test_bfloat16_is_compared_in_float32() -> None:
    """bfloat16 hidden states and heads: the divergence is summed up in float32, and gradients are of their type."""
    student, teacher, head, _ = (x.bfloat16() for x in inputs(5))
    student.requires_grad_()
    head.requires_grad_()
    result, _ = generalized_jsd(student, teacher, head, chosen(), logits_at_once=15)
    assert result.dtype == torch.float32
    np.testing.assert_allclose(result.detach(), reference(student @ head.T, teacher @ head.T, 0.5), rtol=1e-4)
    doubles = [x.detach().double().requires_grad_() for x in (student, head)]
    exact, _ = generalized_jsd(doubles[0], teacher.double(), doubles[1], chosen(), logits_at_once=15)
    theirs = torch.autograd.grad(exact.sum(), doubles)
    for mine, precise in zip(torch.autograd.grad(result.sum(), (student, head)), theirs, strict=True):
        assert mine.dtype == torch.bfloat16
        distance = torch.linalg.vector_norm(mine.double() - precise) / torch.linalg.vector_norm(precise)
        assert distance < 4 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_what_is_not_a_number_is_not_hidden(beta: float) -> None:
    student = torch.tensor([[math.nan, 0.0], [1.0, 2.0]])
    result, _ = generalized_jsd(student, torch.ones(2, 2), torch.eye(2), chosen(beta=beta))
    assert result.isnan().tolist() == [True, False]


def test_no_positions_have_no_divergence_and_give_the_head_no_gradient() -> None:
    hidden, head = torch.zeros(0, 3, requires_grad=True), torch.ones(5, 3, requires_grad=True)
    result, _ = generalized_jsd(hidden, torch.zeros(0, 3), head, chosen())
    result.sum().backward()
    assert result.shape == (0,)
    assert head.grad is not None
    assert not head.grad.any()

"""Generalized Jensen–Shannon divergence between two next-token distributions, fused with the LM head.

Legend: `K` positions, `H` hidden size, `V` vocabulary, `k` the positions of a chunk, `n` the tokens that are compared:
`V`, or the teacher's `top_k`. The logits of a chunk of positions exist, in forward and in backward, never [K, V].
"""

import math
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from trainer.lm_head import accum_dtype, add_product, blocks, scaled_logits
from trainer.matmul import product

LOGITS_AT_ONCE = 1 << 24
"""Elements of a chunk of logits, 64 MiB in float32. About eight tensors of that size exist at a time."""


def generalized_jsd(
    student_hidden: torch.Tensor,
    teacher_hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    beta: float,
    temperature: float,
    top_k: int | None,
    teacher_weight: torch.Tensor | None = None,
    logits_at_once: int = LOGITS_AT_ONCE,
) -> torch.Tensor:
    """[K] float32 (float64 of float64) nats, as in GKD (arXiv:2306.13649, equation 1).

        student = softmax(student_hidden · weightᵀ / temperature), teacher likewise
        M       = beta · teacher + (1 - beta) · student
        result  = beta · KL(teacher ‖ M) + (1 - beta) · KL(student ‖ M)

    At `beta` 0 it is KL(teacher ‖ student), at 1 KL(student ‖ teacher): the limits of result / beta and of
    result / (1 - beta). So it does not go over into them: near 0 and 1 it vanishes, by that very factor.

    `student_hidden` and `teacher_hidden` are [K, H], `weight` is the LM head's [V, H], and `teacher_weight` the
    teacher's where it has another. With `top_k` both distributions are renormalised over the teacher's so many
    likeliest tokens. Differentiable in `student_hidden` and in `weight` as the student's head, at no cost for what
    needs no gradient; the teacher has none.
    """
    with_gradient = torch.is_grad_enabled() and student_hidden.requires_grad
    heads = weight, weight.detach() if teacher_weight is None else teacher_weight.detach()
    chunk = max(1, logits_at_once // len(weight))
    comparison = _Comparison(beta, temperature, None if top_k is None else min(top_k, len(weight)))
    inputs = (student_hidden, teacher_hidden.detach(), *heads, comparison, chunk, with_gradient)
    divergences: torch.Tensor = _GeneralizedJsd.apply(*inputs)  # type: ignore[no-untyped-call]
    return divergences


class _Comparison(NamedTuple):
    beta: float
    temperature: float
    top_k: int | None


class _GeneralizedJsd(torch.autograd.Function):
    """Forward gathers each position's gradient for its hidden state beside its value, so that backward only scales
    it. The weight's gradient needs the logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        student_hidden: torch.Tensor,
        teacher_hidden: torch.Tensor,
        weight: torch.Tensor,
        teacher_weight: torch.Tensor,
        comparison: _Comparison,
        chunk: int,
        with_gradient: bool,
    ) -> torch.Tensor:
        divergences = torch.empty(len(student_hidden), dtype=accum_dtype(weight.dtype), device=weight.device)
        slopes = torch.empty_like(student_hidden) if with_gradient else None
        for part in blocks(len(student_hidden), chunk):
            hidden = student_hidden[part], teacher_hidden[part]
            divergences[part], logit_slopes = _chunk(*hidden, weight, teacher_weight, comparison)
            if slopes is not None:
                slopes[part] = product(logit_slopes.to(weight.dtype), weight)
            del logit_slopes  # before the next chunk needs the memory
        kept = (student_hidden, teacher_hidden, weight, teacher_weight) if ctx.needs_input_grad[2] else ()
        ctx.save_for_backward(slopes, *kept)
        ctx.options = {"comparison": comparison, "chunk": chunk}
        return divergences

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        slopes, *kept = ctx.saved_tensors
        grad_hidden = None if slopes is None else torch.mul(slopes, grad[:, None], out=torch.empty_like(slopes))
        grad_weight = _weight_gradient(grad, *kept, **ctx.options) if kept else None
        return grad_hidden, None, grad_weight, None, None, None, None


def _weight_gradient(
    grad: torch.Tensor,
    student_hidden: torch.Tensor,
    teacher_hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher_weight: torch.Tensor,
    *,
    comparison: _Comparison,
    chunk: int,
) -> torch.Tensor:
    """[V, H] Σ_k grad · slope ⊗ hidden, summed up wide."""
    total = torch.zeros_like(weight, dtype=accum_dtype(weight.dtype))
    for part in blocks(len(student_hidden), chunk):
        hidden = student_hidden[part], teacher_hidden[part]
        _, slopes = _chunk(*hidden, weight, teacher_weight, comparison)
        slopes.mul_(grad[part, None])
        for tokens in blocks(len(weight), max(1, slopes.numel() // weight.shape[1])):
            add_product(total[tokens], slopes[:, tokens].T, student_hidden[part])
        del slopes  # before the next chunk needs the memory
    return total.to(weight.dtype)


def _chunk(
    student_hidden: torch.Tensor,
    teacher_hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher_weight: torch.Tensor,
    comparison: _Comparison,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[k] divergences and [k, V] their derivatives by the student's logits before the temperature."""
    student = scaled_logits(student_hidden, weight, comparison.temperature)
    teacher = scaled_logits(teacher_hidden, teacher_weight, comparison.temperature)
    compared = None
    if comparison.top_k is not None:
        teacher, compared = teacher.topk(comparison.top_k, dim=1)
        student = student.gather(1, compared)
    student, teacher = student.log_softmax(dim=1), teacher.log_softmax(dim=1)
    divergences, slopes = _divergence(student, teacher, comparison.beta)
    slopes.div_(comparison.temperature)
    if compared is not None:
        slopes = slopes.new_zeros(len(slopes), len(weight)).scatter_(1, compared, slopes)
    return divergences, slopes


def _divergence(student: torch.Tensor, teacher: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """[k] divergences and [k, n] their derivatives by the student's scaled logits, from log-probabilities [k, n], which
    are overwritten.

    With q the student, p the teacher and g = d result / d q up to a constant, the derivative is q · (g - Σ q g).
    """
    gap = teacher - student
    q, p = student.exp_(), teacher.exp_()
    if beta == 0:
        return gap.mul_(p).sum(dim=1), q.sub_(p)
    if beta == 1:
        result = -(q * gap).sum(dim=1)
        return result, gap.add_(result[:, None]).mul_(q).neg_()
    student_over_m, teacher_over_m = _log_over_mixture(gap, beta)
    of_student = (q * student_over_m).sum(dim=1)
    of_teacher = teacher_over_m.mul_(p).sum(dim=1)
    slopes = student_over_m.sub_(of_student[:, None]).mul_(q).mul_(1 - beta)
    return beta * of_teacher + (1 - beta) * of_student, slopes


def _log_over_mixture(gap: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """log(student / M) and log(teacher / M) from log(teacher / student), [k, n].

    From the larger of the two downwards, so that exp never overflows, and exact where they are nearly equal. The
    larger one is at most 1 / (its share of the mixture) times M, which rounding of a share near 1 would lift to
    infinity.
    """
    share_of_smaller = (gap > 0).to(gap.dtype).mul_(1 - 2 * beta).add_(beta)
    larger = gap.abs().neg_().expm1_().mul_(share_of_smaller).log1p_().neg_()
    larger.clamp_(max=-math.log(min(beta, 1 - beta)))
    return larger - gap.clamp(min=0), larger + gap.clamp(max=0)

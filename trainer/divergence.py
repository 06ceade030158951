"""Generalized Jensen–Shannon divergence between two next-token distributions, fused with the LM head.

Legend: `K` positions, `H` hidden size, `V` vocabulary, `k` the positions of a chunk. The logits of a chunk of positions
exist, in forward and in backward, never [K, V].
"""

import math
from typing import Any

import torch
from grpo.configs.loss import SdpoSettings
from grpo.trainer.lm_head import accum_dtype, add_product, blocks, scaled_logits
from grpo.trainer.matmul import product
from torch.autograd.function import once_differentiable

LOGITS_AT_ONCE = 1 << 24
"""Elements of a chunk of logits, 64 MiB in float32. About eight tensors of that size exist at a time."""


def generalized_jsd(
    student_hidden: torch.Tensor,
    teacher_hidden: torch.Tensor,
    weight: torch.Tensor,
    settings: SdpoSettings,
    *,
    teacher_weight: torch.Tensor | None = None,
    logits_at_once: int = LOGITS_AT_ONCE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns [K] float32 (float64 of float64) nats, as in GKD (arXiv:2306.13649, equation 1), and [K] bool where
    clipped.

        student = softmax(student_hidden · weightᵀ / temperature), teacher likewise
        M       = beta · teacher + (1 - beta) · student
        result  = beta · KL(teacher ‖ M) + (1 - beta) · KL(student ‖ M)

    At `beta` 0 it is KL(teacher ‖ student), at 1 KL(student ‖ teacher), the limits of result / beta and of result / (1
    - beta). It is not continuous there: near 0 and 1 it vanishes by that factor.

    The result is a sum of one term for each token of the vocabulary, β p log(p / M) + (1 - β) q log(q / M). With
    `token_clip`, each term (`clip_by` entry, as in OPSD, arXiv:2601.18734) or the sum (position) is lowered to it, and
    has no gradient where it was.

    `student_hidden` and `teacher_hidden` are [K, H], `weight` is the LM head's [V, H], and `teacher_weight` the
    teacher's where it has another. Differentiable in `student_hidden` and in `weight` as the student's head, at no cost
    for what needs no gradient; the teacher has none.
    """
    with_gradient = torch.is_grad_enabled() and student_hidden.requires_grad
    heads = weight, weight.detach() if teacher_weight is None else teacher_weight.detach()
    chunk = max(1, logits_at_once // len(weight))
    inputs = (student_hidden, teacher_hidden.detach(), *heads, settings, chunk, with_gradient)
    divergences, clipped = _GeneralizedJsd.apply(*inputs)  # type: ignore[no-untyped-call]
    return divergences, clipped


class _GeneralizedJsd(torch.autograd.Function):
    """Computes each position's gradient for its hidden state beside its value, so that backward only scales it. The
    weight's gradient computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        student_hidden: torch.Tensor,
        teacher_hidden: torch.Tensor,
        weight: torch.Tensor,
        teacher_weight: torch.Tensor,
        settings: SdpoSettings,
        chunk: int,
        with_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        divergences = torch.empty(len(student_hidden), dtype=accum_dtype(weight.dtype), device=weight.device)
        clipped = torch.empty_like(divergences, dtype=torch.bool)
        grad_student = torch.empty_like(student_hidden) if with_gradient else None
        for part in blocks(len(student_hidden), chunk):
            hidden = student_hidden[part], teacher_hidden[part]
            divergences[part], grad_logits, clipped[part] = _chunk(*hidden, weight, teacher_weight, settings)
            if grad_student is not None:
                grad_student[part] = product(grad_logits.to(weight.dtype), weight)
            del grad_logits  # before the next chunk needs the memory
        kept = (student_hidden, teacher_hidden, weight, teacher_weight) if ctx.needs_input_grad[2] else ()
        ctx.save_for_backward(grad_student, *kept)
        ctx.options = {"settings": settings, "chunk": chunk}
        ctx.mark_non_differentiable(clipped)
        return divergences, clipped

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_student, *kept = ctx.saved_tensors
        grad_hidden = (
            None if grad_student is None else torch.mul(grad_student, grad[:, None], out=torch.empty_like(grad_student))
        )
        grad_weight = _weight_gradient(grad, *kept, **ctx.options) if kept else None
        return grad_hidden, None, grad_weight, None, None, None, None


def _weight_gradient(
    grad: torch.Tensor,
    student_hidden: torch.Tensor,
    teacher_hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher_weight: torch.Tensor,
    *,
    settings: SdpoSettings,
    chunk: int,
) -> torch.Tensor:
    """Returns [V, H] Σ_k grad · logit gradient ⊗ hidden, accumulated in the accumulation type."""
    total = torch.zeros_like(weight, dtype=accum_dtype(weight.dtype))
    for part in blocks(len(student_hidden), chunk):
        hidden = student_hidden[part], teacher_hidden[part]
        _, grad_logits, _ = _chunk(*hidden, weight, teacher_weight, settings)
        grad_logits.mul_(grad[part, None])
        for tokens in blocks(len(weight), max(1, grad_logits.numel() // weight.shape[1])):
            add_product(total[tokens], grad_logits[:, tokens].T, student_hidden[part])
        del grad_logits  # before the next chunk needs the memory
    return total.to(weight.dtype)


def _chunk(
    student_hidden: torch.Tensor,
    teacher_hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher_weight: torch.Tensor,
    settings: SdpoSettings,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns [k] divergences, [k, V] their gradients by the student's logits before the temperature, [k] where
    clipped.

    With q the student, p the teacher and g the derivative of a token's term by its q, the derivative by a scaled logit
    is q g - q Σ q g; g is 0 for terms that are clipped.
    """
    beta, clip = settings.beta, math.inf if settings.token_clip is None else settings.token_clip
    student = scaled_logits(student_hidden, weight, settings.temperature).log_softmax(dim=1)
    teacher = scaled_logits(teacher_hidden, teacher_weight, settings.temperature).log_softmax(dim=1)
    gap = teacher - student
    q, p = student.exp_(), teacher.exp_()
    if beta == 0:
        terms, grad_logits = gap.mul_(p), p.neg_()
    elif beta == 1:
        grad_logits = q * (1 - gap)
        terms = gap.mul_(q).neg_()
    else:
        student_over_m, teacher_over_m = _log_over_mixture(gap, beta)
        grad_logits = student_over_m.mul_(q).mul_(1 - beta)
        terms = teacher_over_m.mul_(p).mul_(beta).add_(grad_logits)
    if settings.clip_by == "entry" and clip < math.inf:
        above = terms > clip
        terms.clamp_(max=clip)
        grad_logits.masked_fill_(above, 0.0)
        clipped, divergences = above.any(dim=1), terms.sum(dim=1)
    else:
        divergences = terms.sum(dim=1)
        clipped = divergences > clip
        divergences = torch.where(clipped, clip, divergences)
        grad_logits.masked_fill_(clipped[:, None], 0.0)
    grad_logits.sub_(q.mul_(grad_logits.sum(dim=1, keepdim=True))).div_(settings.temperature)
    return divergences, grad_logits, clipped


def _log_over_mixture(gap: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns log(student / M) and log(teacher / M) of log(teacher / student), all [k, V].

    Computes the larger of the two first, so that exp never overflows and nearly equal ones are exact. The larger one is
    at most 1 / (its share of the mixture) times M, which rounding of a share near 1 would lift to infinity.
    """
    share_of_smaller = (gap > 0).to(gap.dtype).mul_(1 - 2 * beta).add_(beta)
    larger = gap.abs().neg_().expm1_().mul_(share_of_smaller).log1p_().neg_()
    larger.clamp_(max=-math.log(min(beta, 1 - beta)))
    return larger - gap.clamp(min=0), larger + gap.clamp(max=0)

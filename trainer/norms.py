"""Computes root mean square norms (arXiv:1910.07467) with a frozen weight in few passes over memory.

transformers computes them by seven operations that autograd follows one by one, and keeps inputs in float32 for the
backward pass. On a CPU that is a twentieth of a small model's step. Here the backward pass has the input in its own
type, and computes the rest again.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def fuse_norms(model: torch.nn.Module, dtype: torch.dtype) -> int:
    """Replaces the forward pass of those of the model's norms that compute what is computed here, to the bit, as an
    example of the type of computation shows: other families add 1 to the weight, or round elsewhere. Norms whose weight
    is trained or of another type stay as they are. Returns how many were replaced."""
    num_fused = 0
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not type(module).__name__.endswith("RMSNorm") or weight is None or weight.requires_grad:
            continue
        if weight.dtype != dtype:  # the output would have another type
            continue
        fused = _fused(module, getattr(module, "variance_epsilon", getattr(module, "eps", 0.0)))
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            example = torch.randn(4, len(weight), dtype=dtype)
            if torch.equal(module(example), fused(example)):
                module.forward = fused
                num_fused += 1
    return num_fused


def _fused(module: Any, eps: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = _RmsNorm.apply(x, module.weight, eps)  # type: ignore[no-untyped-call]
        return normed

    return forward


class _RmsNorm(torch.autograd.Function):
    """With r = (mean(x²) + eps)^(-1/2), in the accumulation type:

    y = w · x r
    dx = r (w dy - x r² mean(w dy · x))
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        normed = wide * scale if wide is x else wide.mul_(scale)
        return normed.to(x.dtype).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        x, weight, scale = ctx.saved_tensors
        wide = x.to(scale.dtype)
        of_normed = (grad * weight).to(scale.dtype)
        dot = torch.linalg.vecdot(of_normed, wide)[..., None].mul_(scale.square()).div_(-x.shape[-1])
        return of_normed.addcmul_(wide, dot).mul_(scale).to(x.dtype), None, None

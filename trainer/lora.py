"""A linear layer with its adapter, in few passes over memory.

PEFT's own forward scales and adds in separate passes and keeps their intermediates; with a small model that is most of
the step. The adapter's float32 weights are rounded to the type of computation, as the server rounds them.
"""

from typing import Any

import torch
from peft.tuners.lora import Linear
from torch.autograd.function import once_differentiable


class FusedLoraLinear(Linear):  # type: ignore[misc]
    """PEFT's LoRA layer (one adapter, no dropout, no merging) with a fused forward and backward."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """[..., in] → [..., out]"""
        base = self.get_base_layer()
        if self.disable_adapters:
            return torch.nn.functional.linear(x, base.weight, base.bias)
        (name,) = self.active_adapters
        a, b = self.lora_A[name].weight, self.lora_B[name].weight
        inputs = (x, base.weight, base.bias, a, b, self.scaling[name])
        output: torch.Tensor = _LoraLinear.apply(*inputs)  # type: ignore[no-untyped-call]
        return output


class _LoraLinear(torch.autograd.Function):
    """y = x Wᵀ + bias + s (x Aᵀ) Bᵀ with W frozen."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        flat = x.flatten(0, -2)
        a, b = a.to(x.dtype), b.to(x.dtype)
        down = flat @ a.T
        output = torch.nn.functional.linear(flat, weight, bias).addmm_(down, b.T, alpha=scaling)
        ctx.save_for_backward(flat, weight, a, b, down)
        ctx.scaling = scaling
        shaped: torch.Tensor = output.unflatten(0, x.shape[:-1])
        return shaped

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        flat, weight, a, b, down = ctx.saved_tensors
        flat_grad = grad.flatten(0, -2)
        grad_down = (flat_grad @ b).mul_(ctx.scaling)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (flat_grad @ weight).addmm_(grad_down, a).unflatten(0, grad.shape[:-1])
        grad_a = grad_down.T @ flat
        grad_b = (flat_grad.T @ down).mul_(ctx.scaling)
        return grad_x, None, None, grad_a.float(), grad_b.float(), None

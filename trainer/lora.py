"""A linear layer, plain or quantized, with its adapter, in few passes over memory.

PEFT's own forward scales and adds in separate passes and keeps their intermediates; with a small model that is most of
the step. The adapter's float32 weights are rounded to the type of computation, as the server rounds them.
"""

from typing import Any

import torch
from peft.tuners.lora import Linear
from torch.autograd.function import once_differentiable

from trainer.products import linear, product
from trainer.quantization.linear import Make, frozen_weight


class FusedLoraLinear(Linear):  # type: ignore[misc]
    """PEFT's LoRA layer (one adapter, no dropout, no merging) with a fused forward and backward."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """[..., in] → [..., out]"""
        base = self.get_base_layer()
        if self.disable_adapters:
            base_output: torch.Tensor = base(x)
            return base_output
        (name,) = self.active_adapters
        a, b = self.lora_A[name].weight, self.lora_B[name].weight
        make, tensors = frozen_weight(base, x.dtype)
        inputs = (x, make, base.bias, a, b, self.scaling[name], *tensors)
        output: torch.Tensor = _LoraLinear.apply(*inputs)  # type: ignore[no-untyped-call]
        return output

    def _get_in_out_features(self, module: torch.nn.Module) -> tuple[int, int]:
        """PEFT's own knows no quantized layer of ours."""
        return module.in_features, module.out_features  # type: ignore[return-value]


class _LoraLinear(torch.autograd.Function):
    """y = x Wᵀ + bias + s (x Aᵀ) Bᵀ with W = make(*tensors) frozen, and made again for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        make: Make,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        scaling: float,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        flat = x.flatten(0, -2)
        a, b = a.to(x.dtype), b.to(x.dtype)
        down = linear(flat, a)
        output = linear(flat, make(*tensors), bias).addmm_(down, b.T, alpha=scaling)
        ctx.save_for_backward(flat, a, b, down, *tensors)
        ctx.make, ctx.scaling = make, scaling
        shaped: torch.Tensor = output.unflatten(0, x.shape[:-1])
        return shaped

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        flat, a, b, down, *tensors = ctx.saved_tensors
        flat_grad = grad.flatten(0, -2)
        grad_down = product(flat_grad, b).mul_(ctx.scaling)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = product(flat_grad, ctx.make(*tensors)).addmm_(grad_down, a).unflatten(0, grad.shape[:-1])
        grad_a = product(grad_down.T, flat)
        grad_b = product(down.T, flat_grad).mul_(ctx.scaling).T
        return grad_x, None, None, grad_a.float(), grad_b.float(), None, *(None for _ in tensors)

"""A frozen linear layer whose weight is held quantized, and what both it and its adapter compute with.

Legend: a frozen layer's weight is `make(*tensors)`; the tensors are kept for the backward pass, what is made of them
never is.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from trainer.quantization import fp8, nf4, nvfp4

Quantization = Literal["nf4", "fp8", "nvfp4"]
Make = Callable[..., torch.Tensor]


class Format(Protocol):
    """What each format's module has."""

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """[out, in] → named tensors."""

    def dequantize(
        self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Named tensors → [out, in]."""


FORMATS: Mapping[Quantization, Format] = {"nf4": nf4, "fp8": fp8, "nvfp4": nvfp4}


class QuantizedLinear(torch.nn.Module):
    """y = x Ŵᵀ + bias, with `bias` [out] in the type of the computation or None."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        format: Quantization,
        shape: tuple[int, int],
        bias: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.format: Quantization = format
        self.out_features, self.in_features = shape
        self._names = tuple(tensors)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        self.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)

    @classmethod
    def quantized(
        cls, weight: torch.Tensor, *, format: Quantization, bias: torch.Tensor | None = None
    ) -> "QuantizedLinear":
        """From `weight` [out, in]."""
        out_features, in_features = weight.shape
        return cls(FORMATS[format].quantize(weight), format=format, shape=(out_features, in_features), bias=bias)

    @property
    def packed(self) -> tuple[torch.Tensor, ...]:
        """The tensors that the weight is made of."""
        return tuple(self.get_buffer(name) for name in self._names)

    @property
    def qweight(self) -> torch.Tensor:
        """The largest of them as bytes, where PEFT looks for the layer's device."""
        return self.packed[0].view(torch.uint8)

    @property
    def num_bytes(self) -> int:
        """What the weight takes, without the bias."""
        return sum(tensor.nbytes for tensor in self.packed)

    def maker(self, dtype: torch.dtype) -> Make:
        """Makes the weight [out, in] in `dtype` of `packed`."""
        return partial(_make, self.format, self._names, (self.out_features, self.in_features), dtype)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """[out, in] the weight, made anew at each call."""
        return self.maker(dtype)(*self.packed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] → [..., out]"""
        output: torch.Tensor = _FrozenLinear.apply(x, self.maker(x.dtype), self.bias, *self.packed)  # type: ignore[no-untyped-call]
        return output

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, format={self.format}"


def frozen_weight(layer: torch.nn.Module, dtype: torch.dtype) -> tuple[Make, tuple[torch.Tensor, ...]]:
    """How to make a plain or quantized layer's weight [out, in] in `dtype`, and of which tensors."""
    if isinstance(layer, QuantizedLinear):
        return layer.maker(dtype), layer.packed
    weight: torch.Tensor = layer.weight  # type: ignore[assignment]
    return _itself, (weight,)


def _make(
    format: Quantization, names: tuple[str, ...], shape: tuple[int, int], dtype: torch.dtype, *tensors: torch.Tensor
) -> torch.Tensor:
    return FORMATS[format].dequantize(dict(zip(names, tensors, strict=True)), shape, dtype)


def _itself(weight: torch.Tensor) -> torch.Tensor:
    return weight


class _FrozenLinear(torch.autograd.Function):
    """y = x Wᵀ + bias with a gradient to x alone."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, make: Make, bias: torch.Tensor | None, *tensors: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        ctx.make = make
        return linear(x, make(*tensors), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensors = ctx.saved_tensors  # read once: under gradient checkpointing they are made for one reading
        return grad @ ctx.make(*tensors), None, None, *(None for _ in tensors)

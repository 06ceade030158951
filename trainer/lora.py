"""Computes a linear layer, plain or quantized, with its adapter or adapters, in few passes over memory.

PEFT's own forward scales and adds in separate passes and keeps their intermediates; with a small model that is most of
the step. The adapter's float32 weights are rounded to the type of computation, as the server rounds them.

Several adapters, K of rank r, are computed as one of rank K r whose block k is 0 for the tokens of all others:
y = x Wᵀ + s (gate ∘ (x Aᵀ)) Bᵀ, A [K r, in] and B [out, K r] being theirs side by side. So one pass serves tokens of
all of them, and a token gives the adapters that are not its own a gradient of exactly 0.

Where a pass is divided into segments, runs of tokens with an adapter each, every one is computed with its own A and B
and rank, and its numbers, gradients included, are to the bit those of a pass of this segment alone.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple, cast

import torch
from grpo.configs.train import LowPrecision, TrainSettings
from grpo.trainer.errors import ModelError
from grpo.trainer.low_precision import backward_product, forward_product
from grpo.trainer.matmul import addmm_, by_rows, linear, product, product_in_float32
from grpo.trainer.quantization import Dequantize, QuantizedLinear, frozen_weight
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear
from torch.autograd.function import once_differentiable


def with_adapters(base: Any, names: Sequence[str], targets: Sequence[str], settings: TrainSettings) -> PeftModel:
    """Adds the adapters' layers to the base's layers called `targets`. Freezes the base. A is random, B zero. The first
    adapter is the same however many follow. Raises `ModelError` for layers on which PEFT has no adapters."""
    config = _lora_config(rank=settings.lora_rank, alpha=settings.lora_alpha, targets=targets)
    config._register_custom_module({torch.nn.Linear: FusedLoraLinear, QuantizedLinear: FusedLoraLinear})
    # On the CPU whatever the device, so that a seed means the same adapters everywhere.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        try:
            model: PeftModel = get_peft_model(base, config, adapter_name=names[0])
        except ValueError as error:  # for layers that it takes no adapter on
            raise ModelError(f"lora_target_modules: {error}") from error
        for name in names[1:]:
            model.add_adapter(name, replace(config))
    if len(names) > 1:
        model.base_model.set_adapter(list(names))
    for module in model.modules():
        if isinstance(module, FusedLoraLinear):
            module.low_precision = settings.low_precision
    return model


def add_adapter(model: PeftModel, name: str, *, rank: int, alpha: int, targets: Sequence[str], seed: int) -> None:
    """Adds an adapter on those of the layers with adapters that are called `targets`, as `with_adapters` makes the
    first one with this seed and these targets. Which adapters are active does not change."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.add_adapter(name, _lora_config(rank=rank, alpha=alpha, targets=targets))


def _lora_config(*, rank: int, alpha: int, targets: Sequence[str]) -> LoraConfig:
    return LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=list(targets),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )


def adapter_mask(adapters: torch.Tensor, num_adapters: int) -> torch.Tensor:
    """Returns [T, K] bool from the adapter of each token [T] i64: True for adapters that are not the token's own."""
    return adapters[:, None] != torch.arange(num_adapters, device=adapters.device)


class Segment(NamedTuple):
    """A run of a pass's tokens that have the same adapter."""

    adapter: str
    """PEFT's name of it; layers without it are the base's for these tokens."""
    size: int


@contextmanager
def by_segment(layers: Sequence["FusedLoraLinear"], segments: Sequence[Segment]) -> Iterator[None]:
    """Divides the passes within the block, backward passes too, into these segments."""
    for layer in layers:
        layer.segments = segments
    try:
        yield
    finally:
        for layer in layers:
            layer.segments = ()


class FusedLoraLinear(Linear):  # type: ignore[misc]
    """PEFT's LoRA layer (no dropout, no merging) with a fused forward and backward. All adapters that are active have
    the same rank and scaling."""

    adapter_mask: torch.Tensor | None = None
    """[T, K] bool of the tokens in the pass at hand: True for the adapters that are not the token's. None with one
    adapter."""
    segments: Sequence[Segment] = ()
    """The segments of the pass at hand; none where all active adapters are for all tokens."""
    low_precision: LowPrecision | None = None
    """The low-precision recipe of the base's product in passes with a gradient. Passes without one compute as a server
    does."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns [..., out] of [..., in]."""
        if self.segments:
            return _in_segments(self, x)
        base = self.get_base_layer()
        names = [name for name in self.active_adapters if name in self.lora_A]
        if self.disable_adapters or not names:
            base_output: torch.Tensor = base(x)
            return base_output
        a, b = (_side_by_side(part, names, dim) for dim, part in enumerate((self.lora_A, self.lora_B)))
        dequantize, tensors = frozen_weight(base, x.dtype)
        recipe = self.low_precision if torch.is_grad_enabled() else None
        inputs = (x, dequantize, base.bias, a, b, self.adapter_mask, self.scaling[names[0]], recipe)
        output: torch.Tensor = _LoraLinear.apply(*inputs, *tensors)  # type: ignore[no-untyped-call]
        return output

    def by_segment(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [..., out] of [..., in] where the pass has segments. Runs of those with an adapter here are computed
        in one step each."""
        base, flat, outputs = self.get_base_layer(), x.flatten(0, -2), list[torch.Tensor]()
        segments = self.segments if len(self.segments) > 1 else (Segment(self.segments[0].adapter, len(flat)),)
        of_a, of_b = self.lora_A, self.lora_B
        runs = [list(run) for _, run in groupby(segments, lambda segment: segment.adapter in of_a)]
        for run, rows in zip(runs, flat.split([sum(one.size for one in run) for run in runs]), strict=True):
            sizes = [segment.size for segment in run]
            if run[0].adapter not in of_a:
                outputs += [base(own) for own in rows.split(sizes)]
                continue
            dequantize, tensors = frozen_weight(base, x.dtype)
            adapters = [(of_a[name].weight, of_b[name].weight, self.scaling[name]) for name, _ in run]
            recipe = self.low_precision if torch.is_grad_enabled() else None
            trains = torch.is_grad_enabled() and adapters[0][0].requires_grad
            anchor = torch.zeros((), requires_grad=trains)
            inputs = (rows, anchor, dequantize, base.bias, sizes, adapters, recipe)
            outputs.append(_SegmentedLora.apply(*inputs, *tensors))  # type: ignore[no-untyped-call]
        whole = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        output: torch.Tensor = whole.unflatten(0, x.shape[:-1])
        return output

    def _get_in_out_features(self, module: torch.nn.Module) -> tuple[int, int]:
        """Returns a layer's sizes. PEFT's own method does not know our quantized layer."""
        return module.in_features, module.out_features  # type: ignore[return-value]


def takes_adapter_mask(layer: torch.nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a layer's `forward` that takes the keyword `adapter_mask` and gives it to the layer's adapted linear
    layers. The mask is an argument of each pass so that a layer that is computed again in the backward pass gets it
    again."""
    adapted = [module for module in layer.modules() if isinstance(module, FusedLoraLinear)]

    @functools.wraps(forward)
    def telling(*args: Any, adapter_mask: torch.Tensor, **kwargs: Any) -> Any:
        for one in adapted:
            one.adapter_mask = adapter_mask
        return forward(*args, **kwargs)

    return telling


def _side_by_side(part: torch.nn.ModuleDict, names: Sequence[str], dim: int) -> torch.Tensor:
    weights = [cast(torch.Tensor, part[name].weight) for name in names]
    return weights[0] if len(weights) == 1 else torch.cat(weights, dim)


_in_segments: Callable[[FusedLoraLinear, torch.Tensor], torch.Tensor] = torch.compiler.disable(
    FusedLoraLinear.by_segment  # whose sizes change from pass to pass
)


class _LoraLinear(torch.autograd.Function):
    """y = x Wᵀ + bias + s (gate ∘ (x Aᵀ)) Bᵀ with W = dequantize(*tensors) frozen, made again for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        dequantize: Dequantize,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float,
        recipe: LowPrecision | None,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        flat = x.flatten(0, -2)
        a, b = a.to(x.dtype), b.to(x.dtype)
        down = _gated(linear(flat, a), mask)
        output = addmm_(_base_product(flat, dequantize(*tensors), bias, recipe), down, b.T, alpha=scaling)
        ctx.save_for_backward(flat, a, b, down, mask, *tensors)
        ctx.dequantize, ctx.scaling, ctx.recipe = dequantize, scaling, recipe
        shaped: torch.Tensor = output.unflatten(0, x.shape[:-1])
        return shaped

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        flat, a, b, down, mask, *tensors = ctx.saved_tensors
        flat_grad = grad.flatten(0, -2)
        grad_down = _gated(product(flat_grad, b).mul_(ctx.scaling), mask)
        grad_x = None
        if ctx.needs_input_grad[0]:
            multiply = product if ctx.recipe is None else backward_product
            grad_x = addmm_(multiply(flat_grad, ctx.dequantize(*tensors)), grad_down, a, alpha=1.0)
            grad_x = grad_x.unflatten(0, grad.shape[:-1])
        grad_a = product_in_float32(grad_down.T, flat)
        grad_b = product_in_float32(down.T, flat_grad).mul_(ctx.scaling).T
        return grad_x, None, None, grad_a, grad_b, None, None, None, *(None for _ in tensors)


_Adapters = list[tuple[torch.nn.Parameter, torch.nn.Parameter, float]]
"""A, B and scaling of each segment."""


class _SegmentedLora(torch.autograd.Function):
    """What `_LoraLinear` computes of [T, in], for runs of `sizes` rows, each with A and B of its own and in products of
    its own shape; the base's are computed for all at once where no row's bits depend on the others.

    The gradients of A and B are added to theirs here: as inputs of this function, two tensors of each segment would
    cost more than the products. `anchor` stands for them in the graph."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        anchor: torch.Tensor,
        dequantize: Dequantize,
        bias: torch.Tensor | None,
        sizes: list[int],
        adapters: _Adapters,
        recipe: LowPrecision | None,
        *frozen: torch.Tensor,
    ) -> torch.Tensor:
        output = by_rows(lambda rows, weight: _base_product(rows, weight, bias, recipe), x, dequantize(*frozen), sizes)
        downs = []
        for rows, own, (a, b, scaling) in zip(x.split(sizes), output.split(sizes), adapters, strict=True):
            down = linear(rows, a.to(x.dtype))
            addmm_(own, down, b.to(x.dtype).T, alpha=scaling)
            downs.append(down)
        ctx.save_for_backward(x, *downs, *frozen)
        ctx.dequantize, ctx.sizes, ctx.adapters, ctx.recipe = dequantize, sizes, adapters, recipe
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sizes = ctx.sizes
        x, downs, frozen = (
            ctx.saved_tensors[0],
            ctx.saved_tensors[1 : 1 + len(sizes)],
            ctx.saved_tensors[1 + len(sizes) :],
        )
        grad_x, grads_x = None, [None] * len(sizes)
        if ctx.needs_input_grad[0]:
            multiply = product if ctx.recipe is None else backward_product
            grad_x = by_rows(multiply, grad, ctx.dequantize(*frozen), sizes)
            grads_x = grad_x.split(sizes)
        parts = zip(x.split(sizes), grad.split(sizes), grads_x, downs, ctx.adapters, strict=True)
        for rows, own, grad_rows, down, (a, b, scaling) in parts:
            grad_down = product(own, b.detach().to(x.dtype)).mul_(scaling)
            if grad_rows is not None:
                addmm_(grad_rows, grad_down, a.detach().to(x.dtype), alpha=1.0)
            _add_gradient(a, product_in_float32(grad_down.T, rows))
            _add_gradient(b, product_in_float32(down.T, own).mul_(scaling).T)
        return grad_x, *(None for _ in range(6 + len(frozen)))


def _add_gradient(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient.contiguous()
    else:
        parameter.grad.add_(gradient)


def _base_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, recipe: LowPrecision | None
) -> torch.Tensor:
    if recipe is None:
        return linear(x, weight, bias)
    output = forward_product(x, weight, recipe)
    return output if bias is None else output.add_(bias)


def _gated(down: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Sets the blocks of other adapters in [T, K r] to 0, in place."""
    if mask is not None:
        down.unflatten(1, (mask.shape[1], -1)).masked_fill_(mask[:, :, None], 0.0)
    return down

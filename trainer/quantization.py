"""Holds a frozen base in fewer bits: three formats, a linear layer that holds one, and checkpoints that are stored so.

The arithmetic stays that of `recipe`: a weight is dequantized when it is used, in the forward and again in the backward
pass, and never kept. NF4 (QLoRA, arXiv:2305.14314) is bitsandbytes'. For FP8 (DeepSeek-V3, arXiv:2412.19437) and NVFP4
(arXiv:2509.25149) on a CPU there is no library: transformers' quantizers want a GPU for both, and torchao's need its
compiled kernels. docs/quantization.md has the bounds of the errors, which tests hold for every weight.

bitsandbytes is imported where it is used: that takes as long as torch.
"""

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from grpo.configs.train import QUANTIZED
from grpo.trainer.errors import ModelError
from grpo.transport.records import Quantization
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, pad

Tensors = dict[str, torch.Tensor]
Shape = tuple[int, int]
Dequantize = Callable[..., torch.Tensor]

NF4_BLOCK, NF4_NESTED_BLOCK, FP8_BLOCK, NVFP4_BLOCK = 64, 256, 128, 16
FP8_LARGEST, NVFP4_LARGEST = 448.0, 6.0
NVFP4_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_TINY = torch.finfo(torch.float32).tiny


# --- formats: [out, in] weights → named tensors → [out, in] ---


def quantize_nf4(weight: torch.Tensor) -> Tensors:
    """Returns `codes` [n / 2] bytes, the first of two weights in the high bits, `absmax` [n / 64] bytes,
    `nested_absmax` [n / 64 / 256] and `offset` [] float32."""
    from bitsandbytes.functional import quantize_4bit

    codes, state = quantize_4bit(weight.contiguous(), blocksize=NF4_BLOCK, quant_type="nf4", compress_statistics=True)
    nested = {"nested_absmax": state.state2.absmax, "offset": state.offset}
    return {"codes": codes.flatten(), "absmax": state.absmax, **nested}


def dequantize_nf4(tensors: Mapping[str, torch.Tensor], shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Returns level · absmax, multiplied in float32 and rounded once."""
    from bitsandbytes.functional import QuantState, dequantize_4bit, dequantize_blockwise

    codes, absmax, nested = tensors["codes"], tensors["absmax"], tensors["nested_absmax"]
    levels = _nested_levels(absmax.device)
    absmax = dequantize_blockwise(absmax, absmax=nested, code=levels, blocksize=NF4_NESTED_BLOCK).add_(
        tensors["offset"]
    )
    # As rows of one block: with other row lengths the CPU kernel of bitsandbytes 0.50 takes the wrong block's absmax.
    rows = (len(absmax), NF4_BLOCK)
    whole = pad(codes, (0, len(absmax) * NF4_BLOCK // 2 - len(codes)))
    state = QuantState(absmax=absmax, shape=rows, blocksize=NF4_BLOCK, quant_type="nf4", dtype=dtype)  # type: ignore[no-untyped-call]
    weights: torch.Tensor = dequantize_4bit(whole[:, None], state)
    return weights.flatten()[: shape[0] * shape[1]].view(shape)


def quantize_fp8(weight: torch.Tensor) -> Tensors:
    """Returns `codes` [out, in] E4M3 and `scale` [⌈out / 128⌉, ⌈in / 128⌉] float32."""
    rows, columns = weight.shape
    padded = pad(weight.float(), (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    blocks = padded.unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK))  # (rows, 128, columns, 128)
    scale = (blocks.abs().amax((1, 3)) / FP8_LARGEST).clamp_(min=_TINY)
    codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).view(padded.shape)
    return {"codes": codes[:rows, :columns].contiguous(), "scale": scale}


def dequantize_fp8(tensors: Mapping[str, torch.Tensor], shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Returns e4m3 · scale, multiplied in float32 and rounded once."""
    weights = tensors["codes"].to(dtype)
    scale = tensors["scale"].repeat_interleave(FP8_BLOCK, dim=1)[:, : shape[1]]
    whole = shape[0] // FP8_BLOCK * FP8_BLOCK
    weights[:whole].unflatten(0, (-1, FP8_BLOCK)).mul_(scale[: whole // FP8_BLOCK, None])
    weights[whole:].mul_(scale[-1:])
    return weights


def quantize_nvfp4(weight: torch.Tensor) -> Tensors:
    """Returns `codes` [out, ⌈in / 16⌉ · 8] bytes, the first of two weights in the low bits, `scale` [out, ⌈in / 16⌉]
    E4M3 and `global_scale` [] float32. Rows are filled up to whole blocks."""
    global_scale = (weight.abs().amax().float() / (NVFP4_LARGEST * FP8_LARGEST)).clamp(min=_TINY)
    blocks = pad(weight.float(), (0, -weight.shape[1] % NVFP4_BLOCK)).unflatten(1, (-1, NVFP4_BLOCK))
    scale = (blocks.abs().amax(2) / (NVFP4_LARGEST * global_scale)).to(torch.float8_e4m3fn)
    steps = (scale.float() * global_scale)[..., None]
    numbers = torch.where(steps > 0, blocks / steps, 0.0).flatten(1)
    levels = torch.tensor(NVFP4_LEVELS, device=weight.device)
    middles = (levels[1:] + levels[:-1]) / 2
    # Of two levels equally near the even one: bucketize puts a number on a boundary below it.
    middles[1::2] = middles[1::2].nextafter(levels[0])
    codes = torch.bucketize(numbers.abs(), middles, out_int32=True).to(torch.uint8)
    codes += torch.signbit(numbers).to(torch.uint8) << 3
    return {"codes": codes[:, ::2] | codes[:, 1::2] << 4, "scale": scale, "global_scale": global_scale}


def dequantize_nvfp4(tensors: Mapping[str, torch.Tensor], shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Returns e2m1 · (scale · global_scale), each product in float32, rounded once."""
    codes, scale = tensors["codes"], tensors["scale"]
    pairs = _nvfp4_pairs(codes.device, dtype).index_select(0, codes.flatten().int())
    weights = pairs.view(*scale.shape, NVFP4_BLOCK)
    weights.mul_((scale.float() * tensors["global_scale"])[..., None])
    return weights.flatten(1)[:, : shape[1]]


@functools.cache
def _nvfp4_pairs(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Returns [256, 2] the two weights of each byte."""
    levels = torch.tensor(NVFP4_LEVELS + tuple(-level for level in NVFP4_LEVELS), device=device, dtype=dtype)
    byte = torch.arange(256, device=device)
    return torch.stack([levels[byte % 16], levels[byte // 16]], dim=1)


@functools.cache
def _nested_levels(device: torch.device) -> torch.Tensor:
    from bitsandbytes.functional import create_dynamic_map

    levels: torch.Tensor = create_dynamic_map().to(device)  # type: ignore[no-untyped-call]
    return levels


QUANTIZE: Mapping[Quantization, Callable[[torch.Tensor], Tensors]] = {
    "nf4": quantize_nf4,
    "fp8": quantize_fp8,
    "nvfp4": quantize_nvfp4,
}
DEQUANTIZE: Mapping[Quantization, Dequantize] = {
    "nf4": dequantize_nf4,
    "fp8": dequantize_fp8,
    "nvfp4": dequantize_nvfp4,
}


# --- layers ---


class QuantizedLinear(torch.nn.Module):
    """Computes y = x Ŵᵀ + bias, with `bias` [out] in the type of the computation or None."""

    def __init__(
        self, tensors: Tensors, *, format: Quantization, shape: Shape, bias: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self.format: Quantization = format
        self.out_features, self.in_features = shape
        self._names = tuple(tensors)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        self.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)

    @property
    def quantized(self) -> tuple[torch.Tensor, ...]:
        """The tensors of the weight."""
        return tuple(self.get_buffer(name) for name in self._names)

    @property
    def qweight(self) -> torch.Tensor:
        """The largest of `quantized` as bytes, where PEFT looks for the layer's device."""
        return self.quantized[0].view(torch.uint8)

    def dequantizer(self, dtype: torch.dtype) -> Dequantize:
        """Returns a function of `quantized` that returns the weight [out, in] in `dtype`."""
        names, shape, make = self._names, (self.out_features, self.in_features), DEQUANTIZE[self.format]
        return lambda *tensors: make(dict(zip(names, tensors, strict=True)), shape, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [..., out] of [..., in]."""
        output: torch.Tensor = _FrozenLinear.apply(x, self.dequantizer(x.dtype), self.bias, *self.quantized)  # type: ignore[no-untyped-call]
        return output


def frozen_weight(layer: torch.nn.Module, dtype: torch.dtype) -> tuple[Dequantize, tuple[torch.Tensor, ...]]:
    """Returns how to make a plain or quantized layer's weight [out, in] in `dtype`, and of which tensors. The tensors
    are kept for the backward pass, the weight made of them is not."""
    if isinstance(layer, QuantizedLinear):
        return layer.dequantizer(dtype), layer.quantized
    weight: torch.Tensor = layer.weight  # type: ignore[assignment]
    return lambda own: own, (weight,)


class _FrozenLinear(torch.autograd.Function):
    """Computes y = x Wᵀ + bias with a gradient to x alone."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dequantize: Dequantize, bias: torch.Tensor | None, *tensors: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        ctx.dequantize = dequantize
        return linear(x, dequantize(*tensors), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensors = ctx.saved_tensors  # read once: under gradient checkpointing they are made for one reading
        return grad @ ctx.dequantize(*tensors), None, None, *(None for _ in tensors)


# --- checkpoints that are stored quantized ---


@dataclass(frozen=True, slots=True)
class Stored:
    """The format in which a checkpoint holds the decoder's linear layers. Layers that it leaves in 16 bits, recognised
    by their tensors, stay so. Its data on activations and the KV cache is for servers."""

    method: str
    """The checkpoint's `quant_method`."""
    format: Quantization
    asks: Mapping[str, Any]
    """Other entries that the checkpoint's `quantization_config` must have."""
    ends: Mapping[str, str]
    """Our name of each of a layer's tensors → the end of its name in the checkpoint. No plain layer has the last
    one."""

    def tensors_of(
        self, layer: str, shape: Shape, names: frozenset[str], read: Callable[[str], torch.Tensor]
    ) -> Tensors | None:
        """Returns the tensors of one linear layer of the checkpoint with these `names`; None if it is stored in 16 or
        32 bits. Raises `ModelError`."""
        wanted = {key: f"{layer}.{end}" for key, end in self.ends.items()}
        if list(wanted.values())[-1] not in names:
            return None
        if missing := sorted(set(wanted.values()) - names):
            raise ModelError(f"{layer} is stored by {self.method} without {missing}")
        tensors = {key: read(name) for key, name in wanted.items()}
        if self.format == "nf4":
            state = json.loads(bytes(tensors.pop("state").numpy(force=True)))
            tensors["codes"] = tensors["codes"].flatten().view(torch.uint8)
            tensors["offset"] = torch.tensor(
                state["nested_offset"], dtype=torch.float32, device=tensors["codes"].device
            )
            del tensors["map"], tensors["nested_map"]  # which quantized the same way in every checkpoint
        found = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()}
        if found != (expected := _expected(self.format, shape)):
            raise ModelError(
                f"{layer} is stored by {self.method} as {found}, expected {expected}; use a 16-bit checkpoint"
            )
        return tensors


STORED = (
    Stored(
        "bitsandbytes",
        "nf4",
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        {
            "codes": "weight",
            "absmax": "weight.absmax",
            "nested_absmax": "weight.nested_absmax",
            "map": "weight.quant_map",
            "nested_map": "weight.nested_quant_map",
            "state": "weight.quant_state.bitsandbytes__nf4",
        },
    ),
    Stored(
        "fp8",
        "fp8",
        {"weight_block_size": [FP8_BLOCK, FP8_BLOCK]},
        {"codes": "weight", "scale": "weight_scale_inv"},
    ),
    Stored(
        "modelopt",
        "nvfp4",
        {"quant_algo": "NVFP4"},
        {"codes": "weight", "scale": "weight_scale", "global_scale": "weight_scale_2"},
    ),
)
"""The stored formats that can be read; docs/quantization.md lists them."""


def stored_in(folder: Path) -> Stored | None:
    """Returns the format in which the checkpoint is stored; None for plain 16 or 32 bits. Raises `ModelError` for a
    format that is not in `STORED`."""
    config: dict[str, Any] | None = json.loads((folder / "config.json").read_bytes()).get("quantization_config")
    if config is None:
        return None
    for one in STORED:
        if (one.method, one.asks) == (config.get("quant_method"), {key: config.get(key) for key in one.asks}):
            return one
    shown = {key: value for key, value in config.items() if isinstance(value, str | int | list)}
    read = " or ".join(f"{one.method} with {dict(one.asks)}" for one in STORED)
    raise ModelError(
        f"the checkpoint in {folder} is stored quantized, as {shown}, expected {read}; use a 16-bit checkpoint"
    )


def check_setting(folder: Path, stored: Stored | None, quantization: Quantization | None) -> None:
    """Raises `ModelError`, which names the setting to change, if the checkpoint is stored in another format."""
    if stored is not None and stored.format != quantization:
        [setting] = [key for key, format in QUANTIZED.items() if format == stored.format]
        raise ModelError(
            f"the checkpoint in {folder} is stored as {stored.format} (by {stored.method}), and the base is to be held "
            f"as {quantization or 'it is'}; set {setting}: true alone, or use a 16-bit checkpoint of the model"
        )


def _expected(format: Quantization, shape: Shape) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Returns the types and shapes of the tensors of a layer of `shape`, as `DEQUANTIZE` takes them."""
    rows, columns = shape
    blocks, byte, number = -(-rows * columns // NF4_BLOCK), torch.uint8, torch.float32
    if format == "nf4":
        nested = (number, (-(-blocks // NF4_NESTED_BLOCK),))
        codes = (byte, (rows * columns // 2,))
        return {"codes": codes, "absmax": (byte, (blocks,)), "nested_absmax": nested, "offset": (number, ())}
    if format == "fp8":
        scale = (number, (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)))
        return {"codes": (torch.float8_e4m3fn, shape), "scale": scale}
    scale = (torch.float8_e4m3fn, (rows, columns // NVFP4_BLOCK))
    return {"codes": (byte, (rows, columns // 2)), "scale": scale, "global_scale": (number, ())}

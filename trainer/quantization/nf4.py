"""bitsandbytes' NF4 with double quantization (QLoRA, arXiv:2305.14314).

Blocks of 64 weights of the flattened matrix, whatever its rows. A weight is one of the 16 levels of NF4 times its
block's `absmax`. The `absmax` of 256 blocks, less the mean of all, are themselves one of the 256 levels of the signed
dynamic 8-bit type (arXiv:1511.04561) times their `nested_absmax`. 0.5 + 1/64 + 4/(64 · 256) = 0.5159 bytes a weight.

Bound: with `a` the block's largest magnitude, `a'` as it is stored, `n` the group's `nested_absmax` and `q` the level,

    |w - ŵ| ≤ a · h(q) + |q| · |a' - a|,    |a' - a| ≤ 0.00703125 n

where h is half the gap to the next level, at most 0.15191 (between -1 and -0.69619). 0.00703125 is half the widest gap
of the dynamic type (0.9 / 64), and its distance from its lowest level, -0.99297, to -1.
"""

import functools
from collections.abc import Mapping

import torch
from bitsandbytes.functional import (
    QuantState,
    create_dynamic_map,
    dequantize_4bit,
    dequantize_blockwise,
    quantize_4bit,
)

from trainer.quantization.rows import in_parts

BLOCK = 64
NESTED_BLOCK = 256


def quantize(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """[out, in] finite float16, bfloat16 or float32 → the tensors that `dequantize` takes."""
    # 128 rows are whole blocks, however long they are.
    parts = [quantize_4bit(part.contiguous(), blocksize=BLOCK, quant_type="nf4") for part in in_parts(weight)]
    absmax = torch.cat([state.absmax for _, state in parts])
    offset = absmax.mean()
    nested_codes, nested_absmax = _quantized_absmax(absmax - offset)
    codes = torch.cat([codes for codes, _ in parts])
    return nested(codes, nested_codes, nested_absmax=nested_absmax, offset=offset)


def nested(
    codes: torch.Tensor, absmax: torch.Tensor, *, nested_absmax: torch.Tensor, offset: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Double quantization as bitsandbytes gives it: `codes` [n / 2, 1] and `absmax` [blocks] bytes, the first of two
    weights in the high bits; `nested_absmax` [blocks / 256] and `offset` [] float32."""
    tensors = {"codes": _whole_blocks(codes, len(absmax)), "absmax": absmax}
    return tensors | {"nested_absmax": nested_absmax, "offset": offset}


def plain(codes: torch.Tensor, absmax: torch.Tensor) -> dict[str, torch.Tensor]:
    """Without double quantization: `absmax` [blocks] float32."""
    return {"codes": _whole_blocks(codes, len(absmax)), "absmax": absmax}


def dequantize(tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """[out, in] level · absmax, multiplied in float32 and rounded once to `dtype`."""
    codes, absmax = tensors["codes"], tensors["absmax"]
    if "nested_absmax" in tensors:
        code = _dynamic_levels(absmax.device)
        absmax = dequantize_blockwise(absmax, absmax=tensors["nested_absmax"], code=code, blocksize=NESTED_BLOCK)
        absmax += tensors["offset"]
    # As rows of one block: with other row lengths the CPU kernel of bitsandbytes 0.50 takes the wrong block's absmax.
    rows = (len(codes) * 2 // BLOCK, BLOCK)
    state = QuantState(  # type: ignore[no-untyped-call]
        absmax=absmax, shape=rows, blocksize=BLOCK, quant_type="nf4", dtype=dtype
    )
    weights: torch.Tensor = dequantize_4bit(codes[:, None], state)
    return weights.flatten()[: shape[0] * shape[1]].view(shape)


def levels() -> torch.Tensor:
    """[16] float32 the levels of NF4, ascending."""
    return torch.tensor(_LEVELS)


def nested_levels() -> torch.Tensor:
    """[256] float32 the levels of the signed dynamic 8-bit type, ascending."""
    return _dynamic_levels(torch.device("cpu"))


def _quantized_absmax(absmax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[blocks] bytes, and [blocks / 256] float32 the largest of each group. The CPU kernel of bitsandbytes 0.50 takes
    another level than the nearest where two are almost equally near."""
    groups = torch.nn.functional.pad(absmax, (0, -len(absmax) % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
    largest = groups.abs().amax(1)
    levels = _dynamic_levels(absmax.device)
    middles = (levels[1:] + levels[:-1]) / 2
    scaled = groups / largest.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    codes = torch.bucketize(scaled, middles, out_int32=True).to(torch.uint8)
    return codes.flatten()[: len(absmax)].clone(), largest


def _whole_blocks(codes: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """[num_blocks · 32] bytes, of which those after the last weight count for nothing; the same memory where none are
    missing."""
    flat = codes.flatten()
    missing = num_blocks * BLOCK // 2 - len(flat)
    return torch.nn.functional.pad(flat, (0, missing)) if missing else flat


@functools.cache
def _dynamic_levels(device: torch.device) -> torch.Tensor:
    levels: torch.Tensor = create_dynamic_map().to(device)  # type: ignore[no-untyped-call]
    return levels


# fmt: off
_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
# fmt: on

"""NVFP4: E2M1 with an E4M3 scale for each 16 weights of a row and one float32 scale for the matrix.

Source: NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv:2509.25149), and the checkpoints of modelopt and
compressed-tensors. ŵ = e2m1 · (scale · global_scale) with global_scale = the matrix's largest magnitude / (6 · 448) and
scale = the block's largest magnitude / (6 · global_scale), rounded to E4M3. modelopt calls global_scale
`weight_scale_2`; compressed-tensors stores its reciprocal, `weight_global_scale`. 1/2 + 1/16 = 0.5625 bytes a weight.

Bound: with s = scale · global_scale, ŵ is the nearest of ±s · {0, 0.5, 1, 1.5, 2, 3, 4, 6}, so that

    |w - ŵ| ≤ s · half the gap around |w| / s (0.25 below 2, 0.5 below 4, 1 up to 6),    else |w| - 6 s

and the rounding of the scale lets |w| exceed 6 s by at most 1/16 of |w|, or by 6 · 2⁻¹⁰ global_scale where the scale is
subnormal (the block's largest is below 2⁻⁶ / 448 of the matrix's).
"""

import functools
from collections.abc import Mapping

import torch
from torch.nn.functional import pad

from trainer.quantization.rows import in_parts

BLOCK = 16
LARGEST = 6.0
"""Of E2M1."""
_LARGEST_SCALE = 448.0
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def quantize(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """[out, in] of finite floats → the tensors that `dequantize` takes. Rows are filled up to whole blocks."""
    smallest, largest = weight.aminmax()
    global_scale = torch.maximum(-smallest, largest).float() / (LARGEST * _LARGEST_SCALE)
    global_scale = global_scale.clamp(min=_SMALLEST_SCALE)
    codes, scales = zip(*(_quantized(part, global_scale) for part in in_parts(weight)), strict=True)
    return {"codes": torch.cat(codes), "scale": torch.cat(scales), "global_scale": global_scale}


def dequantize(tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """[out, in] e2m1 · (scale · global_scale), each product in float32, rounded once to `dtype`.

    `codes` [out, ⌈in / 16⌉ · 8] bytes, the first of two weights in the low bits; `scale` [out, ⌈in / 16⌉] E4M3;
    `global_scale` [] float32.
    """
    codes, scale = tensors["codes"], tensors["scale"]
    pairs = _pairs(codes.device, dtype).index_select(0, codes.flatten().int())
    weights = pairs.view(*scale.shape, BLOCK)
    weights.mul_((scale.float() * tensors["global_scale"])[..., None])
    return weights.flatten(1)[:, : shape[1]]


def _quantized(weight: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes and scales of some rows."""
    blocks = pad(weight.float(), (0, -weight.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))  # (rows, blocks, 16)
    scale = (blocks.abs().amax(2) / (LARGEST * global_scale)).to(torch.float8_e4m3fn)
    steps = (scale.float() * global_scale)[..., None]
    codes = _codes(torch.where(steps > 0, blocks / steps, 0.0)).flatten(1)
    return codes[:, ::2] | codes[:, 1::2] << 4, scale


def _codes(numbers: torch.Tensor) -> torch.Tensor:
    """Bytes 0…15: the nearest level's index, of two equally near the even one, and 8 more where negative."""
    levels = torch.tensor(_LEVELS, device=numbers.device)
    middles = (levels[1:] + levels[:-1]) / 2
    # bucketize puts a number on a boundary below it; those that belong above get a boundary just lower.
    middles[1::2] = middles[1::2].nextafter(levels[0])
    codes = torch.bucketize(numbers.abs(), middles, out_int32=True).to(torch.uint8)
    return codes + (torch.signbit(numbers).to(torch.uint8) << 3)


@functools.cache
def _pairs(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """[256, 2] the two weights of each byte."""
    levels = torch.tensor(_LEVELS + tuple(-level for level in _LEVELS), device=device, dtype=dtype)
    byte = torch.arange(256, device=device)
    return torch.stack([levels[byte % 16], levels[byte // 16]], dim=1)

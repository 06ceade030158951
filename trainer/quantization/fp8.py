"""FP8: E4M3 with a float32 scale for each block of 128 by 128, as DeepSeek-V3 (arXiv:2412.19437) and Qwen3-FP8 do.

ŵ = e4m3 · scale (the checkpoints' `weight_scale_inv`), scale = the block's largest magnitude / 448. Blocks at the right
and lower edge are smaller. A scale for each row, or one for the matrix, is the same with other blocks.
1 + 4 / 128² = 1.0002 bytes a weight.

Bound, from E4M3's 3 bits of mantissa and its smallest exponent of -6 (arXiv:2209.05433):

    |w - ŵ| ≤ max(2⁻⁴ |w|, 2⁻¹⁰ scale)
"""

from collections.abc import Mapping

import torch
from torch.nn.functional import pad

from trainer.quantization.rows import in_parts

BLOCK = 128
LARGEST = 448.0
"""Of E4M3."""
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def quantize(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """[out, in] of finite floats → the tensors that `dequantize` takes."""
    codes, scales = zip(*(_quantized(part) for part in in_parts(weight)), strict=True)
    return {"codes": torch.cat(codes), "scale": torch.cat(scales)}


def _quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of some rows, from a block's first on."""
    rows, columns = weight.shape
    padded = pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # (row blocks, 128, column blocks, 128)
    scale = (blocks.abs().amax((1, 3)) / LARGEST).clamp_(min=_SMALLEST_SCALE)
    rounded = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return rounded.view(padded.shape)[:rows, :columns], scale


def dequantize(tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """[out, in] e4m3 · scale, multiplied in float32 and rounded once to `dtype`.

    `codes` is [out, in] E4M3, `scale` float32 [1, 1], [out, 1] or [⌈out / 128⌉, ⌈in / 128⌉].
    """
    rows, columns = shape
    weights, scale = tensors["codes"].to(dtype), tensors["scale"]
    if scale.shape[1] > 1:
        scale = scale.repeat_interleave(BLOCK, dim=1)[:, :columns]
    height = {1: rows, rows: 1}.get(len(scale), BLOCK)
    whole = rows // height * height
    weights[:whole].unflatten(0, (-1, height)).mul_(scale[: whole // height, None])
    weights[whole:].mul_(scale[-1:])
    return weights


def is_scale(shape: tuple[int, ...], weight_shape: tuple[int, int]) -> bool:
    """Whether a scale of this shape is one that `dequantize` takes."""
    rows, columns = weight_shape
    return shape in {(1, 1), (rows, 1), (-(-rows // BLOCK), -(-columns // BLOCK))}

"""Multiplies by a frozen weight in 8 or 4 bits: `recipe: fp8_hybrid` and `recipe: nvfp4`.

Both operands are rounded at each use, by the scale of their largest number, and multiplied by torch's scaled product,
which sums in float32. FP8 is E4M3, and E5M2 for gradients (arXiv:2209.05433), with one scale for a tensor. NVFP4 is
E2M1 with an E4M3 scale for each 16 numbers of a row and a float32 one for the tensor (arXiv:2509.25149). Gradients are
in FP8 with either: rounded to the nearest of 4 bits they would be biased.

Not yet run on a GPU. On a CPU, where the trainer refuses both, torch (from 2.12 on) multiplies FP8 too, and NVFP4 is
emulated: tests compare both with products in float64.
"""

import torch
from grpo.configs.train import LowPrecision
from grpo.trainer.errors import ModelError
from grpo.trainer.quantization import dequantize_nvfp4, quantize_nvfp4
from torch.nn.functional import ScalingType, SwizzleType, linear, pad, scaled_mm

_CAPABILITY: dict[LowPrecision, tuple[int, int]] = {"fp8_hybrid": (8, 9), "nvfp4": (10, 0)}
"""The least compute capability of GPUs that have such tensor cores."""
_FP8_STEP, _SCALE_ROWS, _NVFP4_STEP = 16, 128, 64
"""Rows and columns are padded to multiples of these: a scaled product wants whole vectors, and NVFP4's scales in blocks
of 128 by 4."""


def check_device(recipe: LowPrecision, device: torch.device) -> None:
    """Raises `ModelError` for a device that does not multiply in so few bits."""
    has, needed = "the trainer runs on a CPU", _CAPABILITY[recipe]
    if device.type == "cuda":
        if (capability := torch.cuda.get_device_capability(device)) >= needed:
            return
        has = f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}"
    raise ModelError(
        f"recipe: {recipe} needs a GPU of compute capability {needed[0]}.{needed[1]} or later, and {has}; use "
        "recipe: bf16 (qlora_fp8 and qlora_fp4 hold the base in so few bits anywhere)"
    )


def forward_product(x: torch.Tensor, weight: torch.Tensor, recipe: LowPrecision) -> torch.Tensor:
    """Returns x [m, k] · weight [n, k]ᵀ, [m, n] in the type of x."""
    return nvfp4_product(x, weight) if recipe == "nvfp4" else fp8_product(x, weight, torch.float8_e4m3fn)


def backward_product(grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns grad [m, n] · weight [n, k], [m, k] in the type of grad, computed in FP8 with either recipe."""
    return fp8_product(grad, weight.T, torch.float8_e5m2)


def fp8_product(left: torch.Tensor, right: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Returns left [m, k], rounded to `kind`, · right [n, k]ᵀ, rounded to E4M3: [m, n]."""
    (codes, scale), (weights, weights_scale) = _fp8(left, 1, kind), _fp8(right, _FP8_STEP, torch.float8_e4m3fn)
    one = ScalingType.TensorWise
    product = scaled_mm(codes, weights.T, scale, one, weights_scale, one, output_dtype=left.dtype)
    return product[:, : len(right)]


def nvfp4_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Returns left [m, k] · right [n, k]ᵀ, both rounded to NVFP4: [m, n]."""
    parts = [quantize_nvfp4(_filled(x, _SCALE_ROWS, _NVFP4_STEP)) for x in (left, right)]
    if not left.is_cuda:
        rows = [(len(part["codes"]), 2 * part["codes"].shape[1]) for part in parts]
        numbers = [dequantize_nvfp4(part, shape, torch.float32) for part, shape in zip(parts, rows, strict=True)]
        return linear(*numbers)[: len(left), : len(right)].to(left.dtype)
    codes, weights = (part["codes"].view(torch.float4_e2m1fn_x2) for part in parts)
    scales, weights_scales = ([_swizzled(part["scale"]), part["global_scale"]] for part in parts)
    kinds = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
    swizzle = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
    inputs = codes, weights.T, scales, kinds, weights_scales, kinds, swizzle, swizzle
    return scaled_mm(*inputs, output_dtype=left.dtype)[: len(left), : len(right)]


def _fp8(x: torch.Tensor, row_step: int, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns x rounded to `kind`, row by row in memory, and its scale."""
    largest = torch.finfo(kind).max
    scale = (x.abs().amax().float() / largest).clamp(min=torch.finfo(torch.float32).tiny)
    codes = (_filled(x, row_step, _FP8_STEP).float() / scale).clamp(-largest, largest).to(kind)
    return codes.contiguous(), scale


def _filled(x: torch.Tensor, row_step: int, step: int) -> torch.Tensor:
    """Returns x padded with zeros to multiples of `row_step` rows and `step` columns."""
    rows, columns = -x.shape[0] % row_step, -x.shape[1] % step
    return pad(x, (0, columns, 0, rows)) if rows or columns else x


def _swizzled(scale: torch.Tensor) -> torch.Tensor:
    """Returns the scales [128 a, 4 b] in the order in which tensor cores read them: blocks of 128 by 4, whose row 32 i
    + j is at 16 j + 4 i (cuBLAS, "1D block scaling factors layout")."""
    rows, columns = scale.shape
    return scale.view(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4).reshape(-1)

"""The formats once more, from their definitions, in NumPy. Nothing of grpo.trainer.quantization is used here."""

import numpy as np
import torch
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


def minifloat(byte: int, *, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """sign · 2^(e - bias) · (1 + m / 2^mantissa_bits), without the leading 1 and with e = 1 where e is 0."""
    sign = -1.0 if byte >> (exponent_bits + mantissa_bits) & 1 else 1.0
    exponent = byte >> mantissa_bits & ((1 << exponent_bits) - 1)
    fraction = (byte & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    leading = 1.0 if exponent else 0.0
    return sign * 2.0 ** (max(exponent, 1) - bias) * (leading + fraction)


E4M3 = np.array([minifloat(byte, exponent_bits=4, mantissa_bits=3, bias=7) for byte in range(256)])
"""Value of each byte; 127 and 255 are NaN."""
E4M3[[127, 255]] = np.nan
E2M1 = np.array([minifloat(byte, exponent_bits=2, mantissa_bits=1, bias=1) for byte in range(16)])
"""Value of each 4 bits."""


def dequantized_nf4(codes: NDArray[np.uint8], absmax: Float32, shape: tuple[int, int], levels: Float32) -> Float32:
    """float32 level · absmax; of a byte the high bits are the first weight, and blocks of 64 run on over the rows."""
    nibbles = np.stack([codes >> 4, codes & 15], axis=1).reshape(-1)[: shape[0] * shape[1]]
    blocks = np.arange(len(nibbles)) // 64
    return (levels[nibbles] * absmax[blocks]).reshape(shape)


def nested_absmax(absmax: NDArray[np.uint8], nested: Float32, offset: np.float32, levels: Float32) -> Float32:
    """float32 level · nested absmax + offset, in groups of 256."""
    return levels[absmax] * nested[np.arange(len(absmax)) // 256] + offset


def dequantized_fp8(codes: NDArray[np.uint8], scale: Float32, block: tuple[int, int]) -> Float32:
    """float32 e4m3 · scale of the block of this height and width."""
    rows, columns = np.indices(codes.shape)
    return E4M3.astype(np.float32)[codes] * scale[rows // block[0], columns // block[1]]


def dequantized_nvfp4(codes: NDArray[np.uint8], scale: NDArray[np.uint8], global_scale: np.float32) -> Float32:
    """float32 e2m1 · (scale · global scale); of a byte the low bits are the first weight."""
    nibbles = np.stack([codes & 15, codes >> 4], axis=2).reshape(len(codes), -1)
    scales = E4M3.astype(np.float32)[scale] * global_scale
    return E2M1.astype(np.float32)[nibbles] * np.repeat(scales, 16, axis=1)


def bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    return tensor.contiguous().view(torch.uint8).numpy()


KINDS = ["bfloat16", "zero", "zero blocks", "outliers", "tiny", "huge", "mixed", "constant"]
CASES = [(shape, "normal") for shape in ((1, 1), (3, 5), (5, 32), (128, 256))] + [((130, 270), kind) for kind in KINDS]
CASES += [((1200, 1000), "outliers")]
"""Whole blocks of every format, and none; the last is quantized in more than one part."""


def weights(kind: str, shape: tuple[int, int]) -> torch.Tensor:
    """[out, in] weights that are hard in one way."""
    generator = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
    normal = torch.randn(shape, generator=generator) * 0.02
    if kind == "zero blocks":
        normal.view(-1)[: normal.numel() // 2] = 0.0
    elif kind == "outliers":
        normal.view(-1)[:: max(1, normal.numel() // 3)] = 37.5
    elif kind == "mixed":
        # of 24 powers of ten in one matrix
        normal *= 10.0 ** torch.randint(-12, 12, shape, generator=generator)
    factors = {"zero": 0.0, "tiny": 1e-30, "huge": 1e30}
    normal = torch.full(shape, -0.3) if kind == "constant" else normal * factors.get(kind, 1.0)
    return normal.bfloat16() if kind == "bfloat16" else normal

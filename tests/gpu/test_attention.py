"""Every attention kernel that is installed, against float64 on the same device, values and gradients.

Not yet run: needs a GPU.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from trainer.attention import BUCKETS, FLASH_ATTN, FLEX, KERNELS, TORCH_VARLEN, Missing, implementation_for, missing_on
from trainer.layout import Layout, layout_of

pytestmark = pytest.mark.gpu

HEADS, KEY_HEADS, HEAD_SIZE = 16, 8, 128
"""Those of Qwen3-0.6B."""
LENGTHS = (1, 700, 64, 129, 2, 300, 1000)
HALF = (torch.bfloat16, torch.float16)
OBSTACLES: dict[str, Callable[[Missing], str | None]] = {
    FLASH_ATTN: lambda missing: missing.flash_attn,
    TORCH_VARLEN: lambda missing: missing.torch_varlen,
    FLEX: lambda missing: missing.flex,
    BUCKETS: lambda missing: None,
}
# Relative to the largest value: float32 is summed up in another order (and by flex attention tile by tile), bfloat16
# has 8 bits and float16 has 11.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def layout_on(device: torch.device, *, shared: bool) -> Layout:
    """The samples; where `shared`, the last one begins with the first 200 tokens of the second."""
    num_tokens = sum(LENGTHS)
    source, kept = np.arange(num_tokens), np.ones(num_tokens, np.bool_)
    if shared:
        second, last = LENGTHS[0], num_tokens - LENGTHS[-1]
        kept[last : last + 200] = False
        source = np.cumsum(kept) - 1
        source[last : last + 200] = source[second : second + 200]
    return layout_of(np.array(LENGTHS), device, kept=np.flatnonzero(kept), source=source)


def streams(layout: Layout) -> list[torch.Tensor]:
    """[U, H, D] random queries, keys and values in float64."""
    random, num_tokens = torch.Generator().manual_seed(0), len(layout.kept)
    shapes = [(num_tokens, heads, HEAD_SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    device = layout.kept.device
    return [torch.randn(shape, generator=random, dtype=torch.float64).to(device) for shape in shapes]


def results(name: str, layout: Layout, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The output and the gradients of a weighted sum of it."""
    inputs = [stream.detach().requires_grad_() for stream in inputs]
    output = KERNELS[name](*inputs, HEAD_SIZE**-0.5, layout)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), inputs)]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_equals_attention_in_float64(gpu: torch.device, name: str, dtype: torch.dtype, shared: bool) -> None:
    if obstacle := OBSTACLES[name](missing_on(gpu)):
        pytest.skip(obstacle)
    if name in (FLASH_ATTN, TORCH_VARLEN) and dtype not in HALF:
        pytest.skip("flash attention computes half precision only")
    layout = layout_on(gpu, shared=shared)
    exact = streams(layout)
    expected = results(BUCKETS, layout, [stream.to(dtype).double() for stream in exact])
    ours = results(name, layout, [stream.to(dtype) for stream in exact])
    for got, wanted in zip(ours, expected, strict=True):
        scale = wanted.abs().max().item()
        torch.testing.assert_close(got.double() / scale, wanted / scale, atol=TOLERANCES[dtype], rtol=0)


@pytest.mark.parametrize("name", [FLASH_ATTN, TORCH_VARLEN, FLEX])
def test_a_kernel_takes_many_lengths(gpu: torch.device, name: str) -> None:
    if obstacle := OBSTACLES[name](missing_on(gpu)):
        pytest.skip(obstacle)
    random = np.random.default_rng(0)
    for _ in range(5):
        lengths = random.integers(1, 500, random.integers(1, 20))
        everything = np.arange(lengths.sum())
        layout = layout_of(lengths, gpu, kept=everything, source=everything)
        inputs = [stream.bfloat16() for stream in streams(layout)]
        ours, expected = (KERNELS[kernel](*inputs, HEAD_SIZE**-0.5, layout) for kernel in (name, BUCKETS))
        torch.testing.assert_close(ours.float(), expected.float(), atol=3e-2, rtol=0)


def test_half_precision_takes_a_flash_kernel_where_the_gpu_has_one(gpu: torch.device) -> None:
    missing = missing_on(gpu)
    if missing.flash_attn and missing.torch_varlen:
        pytest.skip(f"{missing.flash_attn}, {missing.torch_varlen}")
    assert implementation_for(gpu, torch.bfloat16) in (FLASH_ATTN, TORCH_VARLEN)

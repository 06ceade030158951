"""The variable-length kernel against float64 on the same device, values and gradients.

Not yet run: needs a GPU.
"""

import numpy as np
import pytest
import torch
from grpo.trainer.attention import KERNELS, PADDED, VARLEN, implementation_for
from grpo.trainer.packing import Layout

pytestmark = pytest.mark.gpu

HEADS, KEY_HEADS, HEAD_SIZE = 16, 8, 128
"""Those of Qwen3-0.6B."""
LENGTHS = (1, 700, 64, 129, 2, 300, 1000)
# Relative to the largest value: bfloat16 has 8 bits, float16 has 11, float32 is summed in another order.
CASES = [
    (VARLEN, torch.bfloat16, 2e-2),
    (VARLEN, torch.float16, 4e-3),
    (PADDED, torch.bfloat16, 2e-2),
    (PADDED, torch.float32, 1e-4),
]


def layout_on(device: torch.device, *, shared: bool) -> Layout:
    """The samples; where `shared`, the last one begins with the first 200 tokens of the second."""
    num_tokens = sum(LENGTHS)
    source, kept = np.arange(num_tokens), np.ones(num_tokens, np.bool_)
    if shared:
        second, last = LENGTHS[0], num_tokens - LENGTHS[-1]
        kept[last : last + 200] = False
        source = np.cumsum(kept) - 1
        source[last : last + 200] = source[second : second + 200]
    return Layout(np.array(LENGTHS), np.flatnonzero(kept), source, device)


def random_inputs(layout: Layout) -> list[torch.Tensor]:
    """[U, H, D] random queries, keys and values in float64."""
    random, num_tokens = torch.Generator().manual_seed(0), len(layout.unique)
    shapes = [(num_tokens, heads, HEAD_SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    return [torch.randn(shape, generator=random, dtype=torch.float64).to(layout.unique.device) for shape in shapes]


def results(name: str, layout: Layout, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The output and the gradients of a weighted sum of it."""
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    output = KERNELS[name](*inputs, HEAD_SIZE**-0.5, layout)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), inputs)]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("name", "dtype", "tolerance"), CASES)
def test_a_kernel_equals_attention_in_float64(
    gpu: torch.device, name: str, dtype: torch.dtype, tolerance: float, shared: bool
) -> None:
    layout = layout_on(gpu, shared=shared)
    exact = random_inputs(layout)
    expected = results(PADDED, layout, [tensor.to(dtype).double() for tensor in exact])
    ours = results(name, layout, [tensor.to(dtype) for tensor in exact])
    for got, wanted in zip(ours, expected, strict=True):
        scale = wanted.abs().max().item()
        torch.testing.assert_close(got.double() / scale, wanted / scale, atol=tolerance, rtol=0)


def test_half_precision_takes_the_variable_length_kernel(gpu: torch.device) -> None:
    assert implementation_for(gpu, torch.bfloat16) == VARLEN
    assert implementation_for(gpu, torch.float32) == PADDED

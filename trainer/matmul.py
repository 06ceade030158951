"""Multiplies matrices, on a CPU by the faster one of torch's two libraries.

torch multiplies float32 matrices by Intel's MKL, which uses half of the vectors' width on processors of other makers.
oneDNN, which torch uses for bfloat16, uses all of it everywhere: 2.0 to 2.5 times as many products a second in float32
on an AMD EPYC. On processors for which oneDNN has no half precision torch has loops of its own, six to sixty times as
slow as float32: there products of halves are computed in float32 and rounded once, as kernels of half precision do.

No function here is differentiable: they are used inside autograd functions.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_HALVES = frozenset({torch.bfloat16, torch.float16})
_LEAST_BY_ONEDNN = 1 << 12
"""Multiplications from which on torch itself asks oneDNN."""
MAX_SMALL = 1 << 19
"""Products of up to so many multiplications are left to MKL, because a call of oneDNN takes 13 µs more."""


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Returns [..., k] · [k, n]: [..., n]."""
    if _lacks_kernels(left, right):
        return product(left.float(), right.float()).to(left.dtype)
    return _by_onednn(left, right.T, None) if _is_for_onednn(left, right) else left @ right


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Returns [..., k] · [n, k]ᵀ + [n]: [..., n]."""
    if _lacks_kernels(x, weight):
        return linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
    if _is_for_onednn(x, weight):
        return _by_onednn(x, weight, bias)
    return torch.nn.functional.linear(x, weight, bias)


def product_in_float32(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Returns [m, k] · [k, n]: [m, n] float32 (float64 of float64). On a GPU partial sums of half precision stay in
    float32 to the end, because a weight's gradient adds up as many products as there are tokens. Not yet run on a
    GPU."""
    if left.dtype not in _HALVES:
        return product(left, right)
    if left.is_cuda:
        output: torch.Tensor = torch.mm(left, right, out_dtype=torch.float32)
        return output
    if _lacks_kernels(left, right):
        return product(left.float(), right.float())
    return product(left, right).float()


def addmm_(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, alpha: float) -> torch.Tensor:
    """Adds alpha · [m, k] · [k, n] to `total` [m, n] in place, rounded once, and returns it."""
    if _lacks_kernels(left, right):
        return total.copy_(total.float().add_(product(left.float(), right.float()), alpha=alpha))
    return total.addmm_(left, right, alpha=alpha)


def by_rows(multiply: Product, x: torch.Tensor, weight: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Returns `product` or `linear` (`multiply`) of [T, k], in which each run of rows of the `sizes` has the bits that
    it has alone.

    oneDNN computes a row alike among any others, from two rows on, and MKL does not: on a CPU the runs whose product
    alone is oneDNN's are one product, and each other one is its own. On a GPU all are one.
    """
    if not x.is_cpu:
        return multiply(x, weight)
    together: list[int] = []
    last_joins = False
    for size, rows in zip(sizes, x.split(list(sizes)), strict=True):
        joins = size > 1 and _is_for_onednn(rows, weight)
        if joins and last_joins:
            together[-1] += size
        else:
            together.append(size)
        last_joins = joins
    if len(together) == 1:
        return multiply(x, weight)
    return torch.cat([multiply(rows, weight) for rows in x.split(together)])


@contextmanager
def onednn_for_float32(size: int) -> Iterator[None]:
    """Lets torch multiply batches of float32 matrices on a CPU by oneDNN within the block, where that is exact. `size`:
    multiplications for one of the batch's products. Small ones are left to MKL: torch looks at the whole batch, so that
    their bits would depend on how many there are."""
    matmul = _mkldnn().matmul
    before = matmul.fp32_precision
    if size > _LEAST_BY_ONEDNN and _is_exact_by_onednn():
        matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


@functools.cache
def _is_exact_by_onednn() -> bool:
    """Whether oneDNN multiplies float32 matrices in float32 where torch lets it use bfloat16, without which torch does
    not ask it. Only processors with instructions for whole tiles make use of that."""
    matmul, fine = _mkldnn().matmul, torch.full((2, 128, 128), 1 + 2.0**-20)
    before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
    try:
        return torch.equal(torch.bmm(fine, torch.eye(128).expand(2, -1, -1)), fine)
    finally:
        matmul.fp32_precision = before


def _mkldnn() -> Any:
    return torch.backends.mkldnn


def _lacks_kernels(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether both are of half precision, on a processor for which there are no kernels of it."""
    if left.dtype not in _HALVES or not left.is_cpu or left.dtype != right.dtype or torch.compiler.is_compiling():
        return False
    return left.dtype in _missing_kernels()


@functools.cache
def _missing_kernels() -> frozenset[torch.dtype]:
    """Returns the types of half precision for which this processor has no kernels."""
    has_kernels = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return frozenset(dtype for dtype, is_supported in has_kernels.items() if not is_supported())


def _is_for_onednn(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.numel() * right.numel() <= MAX_SMALL * left.shape[-1]:
        return False
    # torch's compiler makes the operation itself, and takes it from nobody.
    if torch.compiler.is_compiling() or not left.is_cpu:
        return False
    in_float32 = left.dtype == right.dtype == torch.float32 or _lacks_kernels(left, right)
    return in_float32 and torch.backends.mkldnn.is_available()


def _by_onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Calls the operation that torch's own compiler makes of a linear layer without an activation after it."""
    output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return output

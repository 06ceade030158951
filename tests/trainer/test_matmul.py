"""Products equal torch's own, whatever the layout of the matrices."""

import pytest
import torch
from grpo.trainer import matmul
from grpo.trainer.matmul import addmm_, linear, onednn_for_float32, product, product_in_float32


def matrix(rows: int, columns: int, *, dtype: torch.dtype, transposed: bool, seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    shape = (columns, rows) if transposed else (rows, columns)
    drawn = torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)
    return drawn.T if transposed else drawn


@pytest.mark.parametrize(
    ("sizes", "transposed", "dtype", "tolerance"),
    [
        ((1, 1, 1), (False, False), torch.float32, 1e-5),
        ((1, 64, 16), (False, True), torch.float32, 1e-5),
        ((33, 16, 130), (True, False), torch.float64, 1e-13),
        ((33, 16, 130), (True, True), torch.bfloat16, 0.1),
        ((5, 7, 3), (False, False), torch.bfloat16, 0.1),
    ],
)
def test_a_product_is_that_of_float64(
    sizes: tuple[int, int, int], transposed: tuple[bool, bool], dtype: torch.dtype, tolerance: float
) -> None:
    m, k, n = sizes
    left = matrix(m, k, dtype=dtype, transposed=transposed[0], seed=0)
    right = matrix(k, n, dtype=dtype, transposed=transposed[1], seed=1)
    expected = left.double() @ right.double()
    scale = float(expected.abs().max())
    for ours in (product(left, right), linear(left, right.T)):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double() / scale, expected / scale, atol=tolerance, rtol=0)


def test_a_linear_layer_adds_its_bias() -> None:
    # [1, 2] · [3, 4]ᵀ = 3 + 8 = 11, and 10 more; [1, 2] · [5, 6]ᵀ = 5 + 12 = 17, and 20 more
    x, weight, bias = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0]]), torch.tensor([10.0, 20.0])
    assert linear(x, weight, bias).tolist() == [[21.0, 37.0]]
    assert linear(x.bfloat16(), weight.bfloat16(), bias.bfloat16()).tolist() == [[21.0, 37.0]]


def test_no_rows_give_no_rows() -> None:
    assert product(torch.zeros(0, 4), torch.zeros(4, 3)).shape == (0, 3)
    assert linear(torch.zeros(0, 4), torch.zeros(3, 4)).shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_without_kernels_for_halves_their_sums_are_rounded_once(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "_missing_kernels", lambda: {dtype})
    left = matrix(48, 300, dtype=dtype, transposed=False, seed=0)
    right = matrix(300, 64, dtype=dtype, transposed=True, seed=1)
    bias, total = (matrix(rows, 64, dtype=dtype, transposed=False, seed=2) for rows in (1, 48))
    exact = left.double() @ right.double()
    ulp = torch.finfo(dtype).eps  # half of it is what rounding once may do; summed in another order, a little more
    for ours, expected in (
        (product(left, right), exact),
        (linear(left, right.T, bias[0]), exact + bias.double()),
        (addmm_(total.clone(), left, right, alpha=0.5), total.double() + 0.5 * exact),
    ):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), expected, rtol=0.51 * ulp, atol=1e-4)
    torch.testing.assert_close(product_in_float32(left, right).double(), exact, rtol=1e-5, atol=1e-4)


def test_batches_of_float32_lose_nothing_to_a_faster_library() -> None:
    left, right = (torch.randn(3, 160, 160, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    before = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    with onednn_for_float32(160**3):
        found = torch.bmm(left, right)
    torch.testing.assert_close(found.double(), left.double() @ right.double(), atol=1e-4, rtol=0)
    assert torch.backends.mkldnn.matmul.fp32_precision == before  # type: ignore[attr-defined]

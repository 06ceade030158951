import numpy as np
import pytest
import torch

from tests.trainer.quantization import reference
from tests.trainer.quantization.reference import CASES, SHAPES, bytes_of, weights
from trainer.quantization import fp8


@pytest.mark.parametrize(("shape", "kind"), CASES)
def test_dequantization_is_the_definition_bit_for_bit_in_float32(shape: tuple[int, int], kind: str) -> None:
    tensors = fp8.quantize(weights(kind, shape))
    expected = reference.dequantized_fp8(bytes_of(tensors["codes"]), tensors["scale"].numpy(), (128, 128))
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(fp8.dequantize(tensors, shape, dtype), torch.from_numpy(expected).to(dtype))


@pytest.mark.parametrize("shape", SHAPES)
def test_one_scale_and_a_scale_for_each_row_are_read_too(shape: tuple[int, int]) -> None:
    codes = weights("normal", shape).mul(1000).to(torch.float8_e4m3fn)
    for scales, block in (((1, 1), shape), ((shape[0], 1), (1, shape[1]))):
        scale = torch.rand(scales, generator=torch.Generator().manual_seed(1))
        expected = reference.dequantized_fp8(bytes_of(codes), scale.numpy(), block)
        found = fp8.dequantize({"codes": codes, "scale": scale}, shape, torch.float32)
        assert torch.equal(found, torch.from_numpy(expected))


@pytest.mark.parametrize(("shape", "kind"), CASES)
def test_no_weight_is_further_off_than_the_bound(shape: tuple[int, int], kind: str) -> None:
    weight = weights(kind, shape)
    tensors = fp8.quantize(weight)
    rows, columns = np.indices(shape)
    numbers, scales = weight.double().numpy(), tensors["scale"].double().numpy()[rows // 128, columns // 128]
    found = fp8.dequantize(tensors, shape, torch.float32).double().numpy()
    error, bound = np.abs(found - numbers), np.maximum(np.abs(numbers) / 16, scales / 1024)
    # roundings of float32 in the scale, the quotient and the product
    assert (error <= bound * (1 + 1e-6)).all()
    nearest = reference.nearest_distance(numbers / scales, reference.E4M3) * scales
    assert (error <= nearest + 1e-6 * np.abs(numbers)).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_scale_is_its_blocks_largest_over_448(shape: tuple[int, int]) -> None:
    weight = weights("outliers", shape)
    scale = fp8.quantize(weight)["scale"].numpy()
    for row, column in np.ndindex(scale.shape):
        block = weight[128 * row : 128 * (row + 1), 128 * column : 128 * (column + 1)]
        assert scale[row, column] == pytest.approx(float(block.abs().max()) / 448, rel=1e-6)


def test_hand_worked_numbers() -> None:
    # Scale 448 / 448 = 1. Between 16 and 32 E4M3 has steps of 2: 19 is halfway between 18 and 20, of which 20 has the
    # even mantissa; 17.1 is nearest to 18 (step 2 from 16: 16, 18). 0.001 is nearest to the smallest, 2**-9 = 0.00195,
    # and 0.0009 below half of it.
    tensors = fp8.quantize(torch.tensor([[448.0, 19.0, -17.1, 0.001, 0.0009]]))
    assert fp8.dequantize(tensors, (1, 5), torch.float32).tolist() == [[448.0, 20.0, -18.0, 2**-9, 0.0]]


def test_it_takes_1_0002_bytes_a_weight() -> None:
    tensors = fp8.quantize(torch.randn(512, 1024))
    # 1 + 4 / 128**2 = 1.000244
    assert sum(t.nbytes for t in tensors.values()) == 512 * 1024 * (1 + 4 / 128**2)

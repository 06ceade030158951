import numpy as np
import pytest
import torch

from tests.trainer.quantization import reference
from tests.trainer.quantization.reference import CASES, bytes_of, weights
from trainer.quantization import nvfp4


@pytest.mark.parametrize(("shape", "kind"), CASES)
def test_dequantization_is_the_definition_bit_for_bit_in_float32(shape: tuple[int, int], kind: str) -> None:
    tensors = nvfp4.quantize(weights(kind, shape))
    scale, global_scale = bytes_of(tensors["scale"]), np.float32(tensors["global_scale"])
    expected = reference.dequantized_nvfp4(tensors["codes"].numpy(), scale, global_scale)[:, : shape[1]]
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(nvfp4.dequantize(tensors, shape, dtype), torch.from_numpy(expected).to(dtype))


@pytest.mark.parametrize(("shape", "kind"), CASES)
def test_no_weight_is_further_off_than_the_bound(shape: tuple[int, int], kind: str) -> None:
    weight = weights(kind, shape)
    tensors = nvfp4.quantize(weight)
    numbers, global_scale = weight.double().numpy(), float(tensors["global_scale"])
    steps = np.repeat(reference.E4M3[bytes_of(tensors["scale"])] * global_scale, 16, axis=1)[:, : shape[1]]
    found = nvfp4.dequantize(tensors, shape, torch.float32).double().numpy()
    size, error = np.abs(numbers), np.abs(found - numbers)
    half_gap = np.select([size <= 2 * steps, size <= 4 * steps], [0.25, 0.5], 1.0) * steps
    bound = np.where(size <= 6 * steps, half_gap, size - 6 * steps)
    assert (error <= bound + 1e-6 * size).all()
    beyond = np.maximum(size / 16, 6 * 2**-10 * global_scale)
    assert (size - 6 * steps <= beyond * (1 + 1e-5)).all()
    nearest = reference.nearest_distance(numbers / np.where(steps > 0, steps, 1), reference.E2M1) * steps
    assert (error <= np.where(steps > 0, nearest, size) + 1e-6 * size).all()


@pytest.mark.parametrize("kind", ["normal", "outliers", "mixed"])
def test_the_scales_are_those_of_the_definition(kind: str) -> None:
    weight = weights(kind, (129, 256))
    tensors = nvfp4.quantize(weight)
    size = weight.abs().double().numpy()
    assert float(tensors["global_scale"]) == pytest.approx(size.max() / (6 * 448), rel=1e-6)
    exact = size.reshape(129, 16, 16).max(axis=2) / (6 * float(tensors["global_scale"]))
    distance = np.abs(reference.E4M3[bytes_of(tensors["scale"])] - exact)
    assert (distance <= reference.nearest_distance(exact, reference.E4M3) + 1e-6 * exact).all()


def test_hand_worked_numbers() -> None:
    # The largest is 6 * 448 = 2688, so the global scale is 1. First block: scale 448. 1344 / 448 = 3, 112 / 448 = 0.25
    # is halfway between 0 and 0.5, of which 0 is even; 336 / 448 = 0.75 halfway between 0.5 and 1, where 1 is even.
    # Second block: largest 12, scale 2. 7 / 2 = 3.5 is halfway between 3 and 4, where 4 is even; -5 / 2 = -2.5 between
    # 2 and 3, where 2 is even; -10 / 2 = -5 between 4 and 6, where 4 is even; 2.4 / 2 = 1.2 is nearest to 1.
    first = [2688.0, 1344.0, 112.0, 336.0] + [0.0] * 12
    second = [12.0, 7.0, -5.0, -10.0, 2.4] + [0.0] * 11
    tensors = nvfp4.quantize(torch.tensor([first + second]))
    assert (float(tensors["global_scale"]), tensors["scale"].float().tolist()) == (1.0, [[448.0, 2.0]])
    found = nvfp4.dequantize(tensors, (1, 32), torch.float32).tolist()
    assert found == [[2688.0, 1344.0, 0.0, 448.0] + [0.0] * 12 + [12.0, 8.0, -4.0, -8.0, 2.0] + [0.0] * 11]
    # codes 7, 5 and 0, 2: the first of two in the low bits; -4 is 8 + 4, of which the level is 2: code 4
    assert tensors["codes"][0, :2].tolist() == [7 + 16 * 5, 0 + 16 * 2]
    assert tensors["codes"][0, 8:10].tolist() == [7 + 16 * 6, (8 + 4) + 16 * (8 + 6)]


def test_it_takes_0_5625_bytes_a_weight() -> None:
    tensors = nvfp4.quantize(torch.randn(512, 1024))
    # 1/2 + 1/16, and 4 bytes for the matrix
    assert sum(t.nbytes for t in tensors.values()) == 512 * 1024 * (1 / 2 + 1 / 16) + 4

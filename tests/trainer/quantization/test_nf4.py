import numpy as np
import pytest
import torch

from tests.trainer.quantization import reference
from tests.trainer.quantization.reference import CASES, weights
from trainer.quantization import nf4

LEVELS, NESTED_LEVELS = nf4.levels().numpy(), nf4.nested_levels().numpy()


def stored_absmax(tensors: dict[str, torch.Tensor]) -> reference.Float32:
    """[blocks] as double quantization keeps it."""
    nested, offset = tensors["nested_absmax"].numpy(), np.float32(tensors["offset"])
    return reference.nested_absmax(tensors["absmax"].numpy(), nested, offset, NESTED_LEVELS)


def true_absmax(weight: torch.Tensor) -> reference.Float64:
    flat = np.abs(weight.double().numpy().reshape(-1))
    return np.array([flat[start : start + 64].max() for start in range(0, len(flat), 64)])


def test_the_levels_are_those_of_the_definitions() -> None:
    np.testing.assert_allclose(LEVELS, reference.nf4_levels(), rtol=0, atol=1e-6)
    np.testing.assert_allclose(NESTED_LEVELS, reference.dynamic_levels(), rtol=0, atol=1e-7)
    # what the docstring says of them: (1 - 0.69619) / 2, 0.9 / 64 / 2
    assert np.diff(LEVELS).max() / 2 == pytest.approx(0.15191, abs=1e-5)
    assert np.diff(NESTED_LEVELS).max() / 2 == pytest.approx(0.00703125, rel=1e-5)
    assert NESTED_LEVELS[0] == pytest.approx(-1 + 0.00703125, rel=1e-6)


@pytest.mark.parametrize(("shape", "kind"), CASES)
def test_dequantization_is_the_definition_bit_for_bit_in_float32(shape: tuple[int, int], kind: str) -> None:
    tensors = nf4.quantize(weights(kind, shape))
    expected = reference.dequantized_nf4(tensors["codes"].numpy(), stored_absmax(tensors), shape, LEVELS)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(nf4.dequantize(tensors, shape, dtype), torch.from_numpy(expected).to(dtype))


@pytest.mark.parametrize(("shape", "kind"), CASES)
def test_no_weight_is_further_off_than_the_bound(shape: tuple[int, int], kind: str) -> None:
    weight = weights(kind, shape)
    tensors = nf4.quantize(weight)
    found = nf4.dequantize(tensors, shape, torch.float32).double().numpy()
    kept, true = stored_absmax(tensors).astype(np.float64), true_absmax(weight)
    block = np.arange(weight.numel()).reshape(shape) // 64
    numbers, levels = weight.double().numpy(), reference.nf4_levels()
    scaled = numbers / np.where(true > 0, true, 1.0)[block]
    largest_level = np.minimum(np.abs(scaled) + 0.15191, 1.0)
    bound = true[block] * reference.nearest_distance(scaled, levels) + largest_level * np.abs(kept - true)[block]
    # roundings of float32 in absmax, its reciprocal and the products
    assert (np.abs(found - numbers) <= bound + 1e-6 * true[block]).all()
    nested = tensors["nested_absmax"].double().numpy()[np.arange(len(true)) // 256]
    # bitsandbytes gives a zero block at the end an absmax of 1e-38
    assert (np.abs(kept - true) <= 0.00703125 * nested + 1e-6 * true.max() + 1e-38).all()


@pytest.mark.parametrize("kind", ["normal", "outliers", "zero blocks"])
def test_absmax_is_kept_as_its_distance_from_the_mean_of_all(kind: str) -> None:
    weight = weights(kind, (300, 257))
    tensors, true = nf4.quantize(weight), true_absmax(weight)
    assert float(tensors["offset"]) == pytest.approx(true.mean(), rel=1e-6)
    distances = np.abs(true - true.mean())
    largest = [distances[start : start + 256].max() for start in range(0, len(distances), 256)]
    assert len(largest) == 5
    np.testing.assert_allclose(tensors["nested_absmax"].numpy(), largest, rtol=1e-5)


def test_hand_worked_numbers() -> None:
    # One block of largest magnitude 2, so the mean of all is 2 and what is left of it is 0: absmax is 2 exactly.
    # 0.5 / 2 = 0.25 is nearest to 0.24611 (then 0.33792), -1.3 / 2 = -0.65 to -0.69619 (then -0.52507).
    tensors = nf4.quantize(torch.tensor([[2.0, 0.5, -1.3, 0.0]]))
    assert nf4.dequantize(tensors, (1, 4), torch.float32).tolist() == [
        [2.0, pytest.approx(2 * 0.24611230), pytest.approx(2 * -0.69619280), 0.0]
    ]
    # levels 15, 10 and 1, 7 in one byte each, the first in the high bits
    assert tensors["codes"].tolist()[:2] == [15 * 16 + 10, 1 * 16 + 7]


def test_it_takes_0_516_bytes_a_weight() -> None:
    tensors = nf4.quantize(torch.randn(512, 1024))
    # 1/2 + 1/64 + 4 / (64 * 256) = 0.515869; the mean is 4 bytes in all
    assert sum(t.nbytes for t in tensors.values()) == 512 * 1024 * (1 / 2 + 1 / 64 + 4 / (64 * 256)) + 4

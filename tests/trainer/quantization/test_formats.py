"""Each format against its definition, on weights that are hard in one way or another, and on numbers worked by hand."""

import numpy as np
import pytest
import torch
from bitsandbytes.functional import create_dynamic_map, get_4bit_type
from grpo.trainer.quantization import DEQUANTIZE, QUANTIZE
from grpo.transport.records import Quantization

from tests.trainer.quantization import reference
from tests.trainer.quantization.reference import CASES, bytes_of, weights

Tensors = dict[str, torch.Tensor]
LEVELS, NESTED_LEVELS = get_4bit_type("nf4", device="cpu").numpy(), create_dynamic_map().numpy()


def stored_absmax(tensors: Tensors) -> reference.Float32:
    """[blocks] as double quantization keeps it."""
    nested, offset = tensors["nested_absmax"].numpy(), np.float32(tensors["offset"])
    return reference.nested_absmax(tensors["absmax"].numpy(), nested, offset, NESTED_LEVELS)


def by_definition(format: Quantization, tensors: Tensors, shape: tuple[int, int]) -> reference.Float32:
    match format:
        case "nf4":
            return reference.dequantized_nf4(tensors["codes"].numpy(), stored_absmax(tensors), shape, LEVELS)
        case "fp8":
            return reference.dequantized_fp8(bytes_of(tensors["codes"]), tensors["scale"].numpy(), (128, 128))
        case "nvfp4":
            scale, whole = bytes_of(tensors["scale"]), np.float32(tensors["global_scale"])
            return reference.dequantized_nvfp4(tensors["codes"].numpy(), scale, whole)[:, : shape[1]]


@pytest.mark.parametrize("format", QUANTIZE)
def test_dequantization_is_the_definition_bit_for_bit_in_float32(format: Quantization) -> None:
    for shape, kind in CASES:
        tensors = QUANTIZE[format](weights(kind, shape))
        expected = torch.from_numpy(by_definition(format, tensors, shape))
        for dtype in (torch.float32, torch.bfloat16):
            found = DEQUANTIZE[format](tensors, shape, dtype)
            assert torch.equal(found, expected.to(dtype)), (shape, kind)


@pytest.mark.parametrize(
    ("format", "num_bytes"),
    [
        ("nf4", 512 * 1024 * (1 / 2 + 1 / 64 + 4 / (64 * 256)) + 4),  # the mean of all is 4 bytes
        ("fp8", 512 * 1024 * (1 + 4 / 128**2)),
        ("nvfp4", 512 * 1024 * (1 / 2 + 1 / 16) + 4),  # and the global scale
    ],
)
def test_each_format_takes_its_bytes(format: Quantization, num_bytes: float) -> None:
    assert sum(t.nbytes for t in QUANTIZE[format](torch.randn(512, 1024)).values()) == num_bytes


@pytest.mark.parametrize(("format", "block", "share"), [("nf4", 64, 0.16), ("fp8", None, 1 / 16), ("nvfp4", 16, 0.25)])
def test_no_weight_is_further_off_than_a_share_of_the_largest_of_its_block(
    format: Quantization, block: int | None, share: float
) -> None:
    """Half the widest gap of NF4's levels is 0.152, of E4M3 1/16 of the number itself, of E2M1 1/6 of the largest."""
    for shape, kind in CASES:
        weight = weights(kind, shape)
        found = DEQUANTIZE[format](QUANTIZE[format](weight), shape, torch.float32)
        size, error = weight.double().abs(), (found.double() - weight.double()).abs()
        if format == "nf4":
            flat = torch.nn.functional.pad(size.flatten(), (0, -size.numel() % 64)).unflatten(0, (-1, 64))
            largest = flat.amax(1, keepdim=True).expand_as(flat).flatten()[: size.numel()].view(shape)
        elif format == "nvfp4":
            rows = torch.nn.functional.pad(size, (0, -shape[1] % 16)).unflatten(1, (-1, 16))
            largest = rows.amax(2, keepdim=True).expand_as(rows).flatten(1)[:, : shape[1]]
        else:
            largest = size
        # what is small beside the largest of all is lost where scales are in few bits themselves
        assert (error <= share * largest + 3e-5 * size.max() * (1 + 250 * (format == "nf4"))).all(), (shape, kind)


def test_hand_worked_numbers_of_fp8() -> None:
    # Scale 448 / 448 = 1. Between 16 and 32 E4M3 has steps of 2: 19 is halfway between 18 and 20, of which 20 has the
    # even mantissa; 17.1 is nearest to 18 (step 2 from 16: 16, 18). 0.001 is nearest to the smallest, 2**-9 = 0.00195,
    # and 0.0009 below half of it.
    tensors = QUANTIZE["fp8"](torch.tensor([[448.0, 19.0, -17.1, 0.001, 0.0009]]))
    assert DEQUANTIZE["fp8"](tensors, (1, 5), torch.float32).tolist() == [[448.0, 20.0, -18.0, 2**-9, 0.0]]


def test_hand_worked_numbers_of_nvfp4() -> None:
    # The largest is 6 * 448 = 2688, so the global scale is 1. First block: scale 448. 1344 / 448 = 3, 112 / 448 = 0.25
    # is halfway between 0 and 0.5, of which 0 is even; 336 / 448 = 0.75 halfway between 0.5 and 1, where 1 is even.
    # Second block: largest 12, scale 2. 7 / 2 = 3.5 is halfway between 3 and 4, where 4 is even; -5 / 2 = -2.5 between
    # 2 and 3, where 2 is even; -10 / 2 = -5 between 4 and 6, where 4 is even; 2.4 / 2 = 1.2 is nearest to 1.
    first = [2688.0, 1344.0, 112.0, 336.0] + [0.0] * 12
    second = [12.0, 7.0, -5.0, -10.0, 2.4] + [0.0] * 11
    tensors = QUANTIZE["nvfp4"](torch.tensor([first + second]))
    assert (float(tensors["global_scale"]), tensors["scale"].float().tolist()) == (1.0, [[448.0, 2.0]])
    found = DEQUANTIZE["nvfp4"](tensors, (1, 32), torch.float32).tolist()
    assert found == [[2688.0, 1344.0, 0.0, 448.0] + [0.0] * 12 + [12.0, 8.0, -4.0, -8.0, 2.0] + [0.0] * 11]
    # codes 7, 5 and 0, 2: the first of two in the low bits; -4 is 8 + 4, of which the level is 2: code 4
    assert tensors["codes"][0, :2].tolist() == [7 + 16 * 5, 0 + 16 * 2]
    assert tensors["codes"][0, 8:10].tolist() == [7 + 16 * 6, (8 + 4) + 16 * (8 + 6)]

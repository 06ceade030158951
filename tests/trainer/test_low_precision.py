"""Products in 8 or 4 bits against operands that are rounded by hand and multiplied in float64."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from grpo.configs.train import LowPrecision
from grpo.trainer.errors import ModelError
from grpo.trainer.low_precision import _swizzled, backward_product, check_device, forward_product
from grpo.trainer.packing import packed_tokens

from tests.trainer.models import CPU, tiny_batch, tiny_policy
from tests.trainer.quantization import reference

needs_fp8_on_cpu = pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU"),
    reason="this torch multiplies FP8 on GPUs only, as 2.11 does",
)
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
GRIDS = {
    "e4m3": reference.E4M3,
    "e5m2": torch.arange(256, dtype=torch.uint8).view(torch.float8_e5m2).double().numpy(),
    "e2m1": reference.E2M1,
}


def nearest(numbers: torch.Tensor, grid: str) -> torch.Tensor:
    """The nearest of the grid; no number here is in the middle of two."""
    levels = torch.from_numpy(GRIDS[grid])
    levels = levels[levels.isfinite()].unique()
    return levels[(numbers[..., None] - levels).abs().argmin(-1)]


def in_fp8(x: torch.Tensor, kind: str) -> torch.Tensor:
    scale = x.double().abs().max() / LARGEST[kind]
    return nearest(x.double() / scale, kind) * scale


def in_nvfp4(x: torch.Tensor) -> torch.Tensor:
    """Blocks of 16 numbers of a row."""
    whole = x.double().abs().max() / (6 * 448)
    blocks = x.double().unflatten(1, (-1, 16))
    scale = nearest(blocks.abs().amax(2, keepdim=True) / (6 * whole), "e4m3") * whole
    return (nearest(blocks / scale, "e2m1") * scale).flatten(1)


ROUNDED: dict[LowPrecision, Callable[[torch.Tensor], torch.Tensor]] = {
    "fp8_hybrid": lambda x: in_fp8(x, "e4m3"),
    "nvfp4": in_nvfp4,
}


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@needs_fp8_on_cpu
@pytest.mark.parametrize("recipe", ROUNDED)
@pytest.mark.parametrize("shape", [(5, 32, 48), (150, 80, 36)])  # (m, k, n), the second in no whole blocks
def test_a_product_is_that_of_the_rounded_operands(recipe: LowPrecision, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    x, weight, grad = normal(m, k, seed=1), normal(n, k, seed=2), normal(m, n, seed=3)
    x[0, 0] = 30.0  # an outlier, by which all else is rounded
    rounded = ROUNDED[recipe]
    expected = rounded(x) @ rounded(weight).T
    torch.testing.assert_close(forward_product(x, weight, recipe).double(), expected, rtol=1e-5, atol=1e-4)
    expected = in_fp8(grad, "e5m2") @ in_fp8(weight, "e4m3")
    torch.testing.assert_close(backward_product(grad, weight).double(), expected, rtol=1e-5, atol=1e-4)


@needs_fp8_on_cpu
@pytest.mark.parametrize("recipe", ROUNDED)
def test_what_is_not_finite_stays_so(recipe: LowPrecision) -> None:
    x = normal(4, 32, seed=1)
    x[2, 3] = torch.nan
    assert not forward_product(x, normal(16, 32, seed=2), recipe)[2].isfinite().any()


@needs_fp8_on_cpu
@pytest.mark.parametrize("recipe", ROUNDED)
def test_training_is_in_few_bits_and_what_proves_a_version_is_exact(tiny_model: Path, recipe: LowPrecision) -> None:
    plain, ours = tiny_policy(tiny_model, recipe="bf16"), tiny_policy(tiny_model, recipe=recipe)
    tokens = packed_tokens(tiny_batch((9, 4, 12)), CPU)
    with torch.no_grad():
        assert torch.equal(plain.logprobs(tokens), ours.logprobs(tokens))
    gaps = (plain.logprobs(tokens) - ours.logprobs(tokens)).abs()
    assert 1e-4 < gaps.mean().item() < 1.0


@needs_fp8_on_cpu
@pytest.mark.parametrize("recipe", ROUNDED)
def test_an_adapter_gets_exact_gradients_and_passes_on_those_of_the_rounded_base(
    tiny_model: Path, recipe: LowPrecision
) -> None:
    model = tiny_policy(tiny_model).causal_lm
    layer = next(one for name, one in model.named_modules() if name.endswith("gate_proj"))
    layer.low_precision = recipe
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    x, grad = normal(5, 32, seed=1).requires_grad_(), normal(5, 48, seed=3)
    layer(x).backward(grad)
    weight, rounded, wide = layer.get_base_layer().weight.detach(), ROUNDED[recipe], grad.double()
    both = a.detach().double(), b.detach().double()
    expected = rounded(x.detach()) @ rounded(weight).T
    expected += 2 * x.detach().double() @ both[0].T @ both[1].T
    passed_on = in_fp8(grad, "e5m2") @ in_fp8(weight, "e4m3") + 2 * wide @ both[1] @ both[0]
    found = [layer(x.detach().requires_grad_()), x.grad, a.grad, b.grad]
    of_b = 2 * wide.T @ x.detach().double() @ both[0].T
    for one, other in zip(
        found, [expected, passed_on, 2 * (wide @ both[1]).T @ x.detach().double(), of_b], strict=True
    ):
        assert one is not None
        torch.testing.assert_close(one.detach().double(), other, rtol=1e-4, atol=1e-4)


def test_scales_are_in_the_order_of_cublas() -> None:
    scale = torch.arange(256 * 8).view(256, 8)
    row, column = 171, 6
    place = (row // 128 * 2 + column // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
    assert _swizzled(scale)[place] == scale[row, column]


@pytest.mark.parametrize(("recipe", "capability"), [("fp8_hybrid", (8, 6)), ("nvfp4", (9, 0))])
def test_a_device_that_cannot_is_refused_with_what_it_has(
    recipe: LowPrecision, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Old GPU")
    for device, said in ((CPU, "a CPU"), (torch.device("cuda"), f"Old GPU has {capability[0]}.{capability[1]}")):
        with pytest.raises(ModelError, match=said):
            check_device(recipe, device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    check_device(recipe, torch.device("cuda"))

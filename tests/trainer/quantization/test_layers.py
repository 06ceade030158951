import weakref

import pytest
import torch
from grpo.trainer.lora import FusedLoraLinear
from grpo.trainer.quantization import QUANTIZE, Dequantize, QuantizedLinear
from grpo.transport.records import Quantization
from peft import LoraConfig


class Watched(QuantizedLinear):
    """Remembers the weights that it makes, weakly."""

    def dequantizer(self, dtype: torch.dtype) -> Dequantize:
        dequantize, self.made = super().dequantizer(dtype), []

        def watched(*tensors: torch.Tensor) -> torch.Tensor:
            assert not any(reference() is not None for reference in self.made), "an earlier one is alive"
            weight = dequantize(*tensors)
            self.made.append(weakref.ref(weight))
            return weight

        return watched


def quantized(format: Quantization, *, dtype: torch.dtype, bias: bool = True) -> Watched:
    generator = torch.Generator().manual_seed(2)
    weight, offset = torch.randn(48, 40, generator=generator), torch.randn(48, generator=generator).to(dtype)
    return Watched(QUANTIZE[format](weight), format=format, shape=(48, 40), bias=offset if bias else None)


def plain(layer: QuantizedLinear, dtype: torch.dtype) -> torch.nn.Linear:
    """The same layer with its weight as it is dequantized."""
    linear = torch.nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, dtype=dtype)
    linear.requires_grad_(False)
    linear.weight.copy_(layer.dequantizer(dtype)(*layer.quantized))
    if layer.bias is not None:
        linear.bias.copy_(layer.bias)
    return linear


def adapted(base: torch.nn.Module) -> FusedLoraLinear:
    """With the same random float32 A and B on any base."""
    layer = FusedLoraLinear(base, "default", LoraConfig(), r=4, lora_alpha=8)
    generator = torch.Generator().manual_seed(5)
    for factor in (layer.lora_A["default"].float(), layer.lora_B["default"].float()):
        torch.nn.init.normal_(factor.weight, generator=generator)
    return layer


def inputs(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(3, 7, 40, generator=torch.Generator().manual_seed(3)).to(dtype).requires_grad_()


def outcome(layer: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The output, and the gradients of a weighted sum of it to the input and to what is trained."""
    output = layer(x)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(4)).to(output.dtype)
    trained = [p for p in layer.parameters() if p.requires_grad]
    return output, *torch.autograd.grad(output, [x, *trained], weights)


@pytest.mark.parametrize(("dtype", "bias"), [(torch.float32, True), (torch.bfloat16, False)])
@pytest.mark.parametrize("format", QUANTIZE)
def test_an_adapter_on_it_computes_what_one_on_the_dequantized_weight_does(
    format: Quantization, dtype: torch.dtype, bias: bool
) -> None:
    layer = quantized(format, dtype=dtype, bias=bias)
    results = outcome(adapted(layer), inputs(dtype)), outcome(adapted(plain(layer, dtype)), inputs(dtype))
    assert len(results[0]) == 4
    for ours, theirs in zip(*results, strict=True):
        # In float32 the order of the sums depends on how the weight is stored.
        atol = 1e-6 * theirs.detach().abs().max().item() if dtype == torch.float32 else 0
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)


@pytest.mark.parametrize("with_adapter", [True, False])
@pytest.mark.parametrize("format", QUANTIZE)
def test_the_dequantized_weight_is_made_for_each_pass_and_never_kept(format: Quantization, with_adapter: bool) -> None:
    base = quantized(format, dtype=torch.float32)
    layer = adapted(base) if with_adapter else base
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        output = layer(inputs(torch.float32))
        assert len(base.made) == 1
        output.sum().backward()
    assert [reference() for reference in base.made] == [None, None]
    packed = {tensor.data_ptr() for tensor in base.quantized}
    assert packed <= {tensor.data_ptr() for tensor in saved}
    # the input has 3 * 7 * 40 elements, the weight 48 * 40
    assert all(t.numel() < 48 * 40 for t in saved if t.data_ptr() not in packed)

import pytest
import torch
from grpo.trainer.norms import fuse_norms
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

SIZE = 48
BOTH_TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def norm(kind: type[torch.nn.Module], dtype: torch.dtype, *, trained: bool = False) -> torch.nn.Module:
    """One with a random weight."""
    made = kind(SIZE)
    with torch.no_grad():
        made.weight.copy_(torch.rand(SIZE, generator=torch.Generator().manual_seed(0)) + 0.5)
    return made.to(dtype).requires_grad_(trained)


def with_gradient(module: torch.nn.Module, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output and gradient of random rows of several heads, and the rows afterwards."""
    generator = torch.Generator().manual_seed(1)
    x = (3 * torch.randn(1, 5, 3, SIZE, generator=generator)).to(dtype).requires_grad_()
    output = module(x)
    (gradient,) = torch.autograd.grad(output, x, torch.randn(x.shape, generator=generator).to(dtype))
    return output.detach(), gradient, x.detach()


@BOTH_TYPES
@pytest.mark.parametrize("kind", [Qwen3RMSNorm, LlamaRMSNorm])
def test_a_fused_norm_gives_the_models_own_bits_and_gradient(kind: type[torch.nn.Module], dtype: torch.dtype) -> None:
    module = norm(kind, dtype)
    own = with_gradient(module, dtype)
    assert fuse_norms(module, dtype) == 1
    fused = with_gradient(module, dtype)
    assert torch.equal(fused[0], own[0])
    assert torch.equal(fused[2], own[2])
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(fused[1], own[1], atol=tolerance, rtol=tolerance)


@BOTH_TYPES
def test_a_norm_of_another_formula_stays_as_it_is(dtype: torch.dtype) -> None:
    module = norm(Gemma3RMSNorm, dtype)
    own = with_gradient(module, dtype)
    assert fuse_norms(module, dtype) == 0
    assert all(map(torch.equal, own, with_gradient(module, dtype)))


def test_a_norm_whose_weight_is_trained_stays_as_it_is() -> None:
    module = norm(Qwen3RMSNorm, torch.float32, trained=True)
    assert fuse_norms(module, torch.float32) == 0
    module(torch.ones(1, SIZE)).sum().backward()
    assert module.weight.grad is not None


def test_a_norm_whose_weight_is_of_another_type_stays_as_it_is() -> None:
    module = Qwen3RMSNorm(SIZE).requires_grad_(False)
    assert fuse_norms(module, torch.bfloat16) == 0
    assert module(torch.ones(1, SIZE, dtype=torch.bfloat16)).dtype == torch.float32

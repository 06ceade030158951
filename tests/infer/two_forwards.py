"""Two right ways to compute a Qwen3 in bfloat16, for many canaries at once: as transformers does, and as vLLM's kernels
do, with float32 where those have it. Random models, as wide as runs in seconds: logits of trained models' size make
the two differ as wider ones do (docs/versions.md)."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

LOGIT_STD = 3.0
RANK = 8
Adapter = Mapping[str, tuple[Tensor, Tensor]]
"""A [r, I] and B [O, r] of each linear layer by name; scaled into B."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """How one of the two computes."""

    attention: str
    rounds_once: bool
    """Norms, and what an adapter adds, are computed in float32 and rounded once; otherwise after each operation."""


TRAINER, SERVER = Side(attention="sdpa", rounds_once=False), Side(attention="eager", rounds_once=True)


class RoundedProducts(TorchFunctionMode):
    """Computes products in float32 and rounds them once, as kernels of bfloat16 do, and on a CPU without such kernels
    several times as fast."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (nn.functional.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__):
            wide = [one.float() if isinstance(one, Tensor) else one for one in args]
            return func(*wide, **(kwargs or {})).to(args[0].dtype)
        return func(*args, **(kwargs or {}))


def random_model(num_layers: int, *, hidden: int = 128, vocabulary: int = 2048) -> Qwen3ForCausalLM:
    torch.manual_seed(num_layers)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=64,
        initializer_range=0.02 * (1024 / hidden) ** 0.5,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config).eval().to(torch.bfloat16)
    with torch.no_grad():
        spread = model(torch.arange(100)[None]).logits.float().std()
        model.model.norm.weight.mul_(LOGIT_STD / spread)
    return model


def random_adapter(model: nn.Module, *, seed: int, size: float) -> dict[str, tuple[Tensor, Tensor]]:
    """Changes each layer's output by about `size` of it."""
    generator = torch.Generator().manual_seed(seed)
    adapter = {}
    for name, layer in linears(model).items():
        (num_out, num_in), std = layer.weight.shape, float(layer.weight.detach().float().std())
        a = torch.randn(RANK, num_in, generator=generator)
        b = torch.randn(num_out, RANK, generator=generator) * (size * std / RANK**0.5)
        adapter[name] = (a.to(torch.bfloat16), b.to(torch.bfloat16))
    return adapter


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear) and "lm_head" not in name}


@torch.no_grad()
def logprobs(model: Qwen3ForCausalLM, ids: Tensor, side: Side, adapter: Adapter | None = None) -> Tensor:
    """Log-probabilities [N, L - 1] of `ids` [N, L]."""
    model.set_attn_implementation(side.attention)
    with ExitStack() as stack:
        stack.enter_context(RoundedProducts())
        if side.rounds_once:
            stack.enter_context(norms_that_round_once(model))
        for name, layer in linears(model).items():
            if adapter and name in adapter:
                stack.callback(layer.register_forward_hook(adding(*adapter[name], once=side.rounds_once)).remove)
        logits = model(input_ids=ids).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]


def adding(a: Tensor, b: Tensor, *, once: bool) -> Callable[[nn.Module, tuple[Tensor], Tensor], Tensor]:
    def hook(layer: nn.Module, given: tuple[Tensor], output: Tensor) -> Tensor:
        if not once:
            return output + given[0] @ a.T @ b.T
        low = given[0].float() @ a.float().T
        return (output.float() + low @ b.float().T).to(output.dtype)

    return hook


@contextmanager
def norms_that_round_once(model: nn.Module) -> Iterator[None]:
    hooks = []
    for norm in model.modules():
        if isinstance(norm, Qwen3RMSNorm):

            def hook(norm: nn.Module, given: tuple[Tensor], output: Tensor) -> Tensor:
                x = given[0].float()
                x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
                return (norm.weight.float() * x).to(output.dtype)

            hooks.append(norm.register_forward_hook(hook))
    yield
    for one in hooks:
        one.remove()

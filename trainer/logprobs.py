"""Log-probabilities of chosen tokens from hidden states, without all logits at once.

Legend: `K` positions, `H` hidden size, `V` vocabulary. The logits of a chunk of positions exist, in forward and in
backward, never `[K, V]`.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

LOGITS_AT_ONCE = 1 << 25
"""Elements of a chunk of logits, 128 MiB in float32."""


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    *,
    logits_at_once: int = LOGITS_AT_ONCE,
) -> torch.Tensor:
    """[K] float32: log softmax(hidden · weightᵀ / temperature)[target].

    `hidden` [K, H] is at the position before each target; `weight` [V, H] is the LM head's and is frozen; `targets`
    [K] int64; `temperatures` [K] above 0. Differentiable in `hidden`.
    """
    if weight.requires_grad:
        raise ValueError(
            "the LM head requires gradients, expected a frozen one: token_logprobs gives it none; leave lm_head out of "
            "what is trained"
        )
    chunk = max(1, logits_at_once // weight.shape[0])
    inputs = (hidden, weight, targets, temperatures, chunk)
    logprobs: torch.Tensor = _TokenLogprobs.apply(*inputs)  # type: ignore[no-untyped-call]
    return logprobs


def _chunks(num_positions: int, chunk: int) -> Iterator[slice]:
    for start in range(0, num_positions, chunk):
        yield slice(start, start + chunk)


def _scaled_logits(hidden: torch.Tensor, weight: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """[k, V] float32. The product is in the model's type, as the server computes it."""
    return torch.nn.functional.linear(hidden, weight).float().div_(temperatures[:, None])


class _TokenLogprobs(torch.autograd.Function):
    """Backward computes each chunk's logits again: d logp / d hidden = (onehot(target) - softmax) · weight / temp."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
        chunk: int,
    ) -> torch.Tensor:
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        normalisers = torch.empty_like(logprobs)
        for part in _chunks(len(hidden), chunk):
            logits = _scaled_logits(hidden[part], weight, temperatures[part])
            normalisers[part] = logits.logsumexp(dim=-1)
            logprobs[part] = logits.gather(1, targets[part, None]).squeeze(1) - normalisers[part]
        ctx.save_for_backward(hidden, weight, targets, temperatures, normalisers)
        ctx.chunk = chunk
        return logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        hidden, weight, targets, temperatures, normalisers = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        for part in _chunks(len(hidden), ctx.chunk):
            logits = _scaled_logits(hidden[part], weight, temperatures[part])
            scale = (grad[part] / temperatures[part])[:, None]
            grad_logits = logits.sub_(normalisers[part, None]).exp_().mul_(-scale)
            grad_logits.scatter_add_(1, targets[part, None], scale)
            grad_hidden[part] = grad_logits.to(weight.dtype) @ weight
        return grad_hidden, None, None, None, None

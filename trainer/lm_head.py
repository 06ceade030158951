"""Computes log-probabilities of chosen tokens and the entropy of their distributions, fused with the LM head.

Legend: `K` positions, `H` hidden size, `V` vocabulary, `k` and `v` the positions and tokens of one tile. Only a tile
[k, v] of the logits exists at a time, in forward and in backward. Tensors of the width of a hidden state, [K, H], do.

The softmax is summed tile by tile, as in flash attention (arXiv:2205.14135, with the LM head in the place of keys and
values), so that a tile may be as small as a cache and the head is read once for many positions.
"""

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo
from grpo.trainer.matmul import linear, product
from grpo.trainer.memory import missing_for_compile
from torch.autograd.function import once_differentiable

log = logging.getLogger(__name__)
Fold = Callable[..., tuple[torch.Tensor, ...]]

POSITIONS_PER_TILE = 1024
"""Enough positions that reading the head does not bound the product."""
POSITIONS_PER_TILE_OF_WEIGHT = 8192
"""Enough positions for the weight's gradient, whose sums are as wide as the tile and are read once for each."""
COMPILED_POSITIONS, COMPILED_VOCABULARY = 256, 1 << 15
"""On a CPU tiles are compiled from so many positions and tokens of the vocabulary on. Compiling takes seconds, which
small models, canaries and dummy passes never give back."""


def logprobs_and_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    *,
    differentiable: bool = False,
    tile_elements: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns [K] float32 (float64 of float64): log p of the target, and the entropy in nats at each position,

        entropy = -Σ_v p_v log p_v,  p = softmax(hidden · weightᵀ / temperature)

    `hidden` [K, H] is at the position before each target; `weight` [V, H] is the LM head's; `targets` [K] int64;
    `temperatures` [K] above 0. Differentiable in `hidden` and in `weight`, at no cost for what needs no gradient. The
    entropy has a gradient only where it is `differentiable`, which costs one more matrix product a tile.
    `tile_elements` bounds the elements of a tile of logits (None: what suits the device).
    """
    with_gradient = torch.is_grad_enabled() and hidden.requires_grad
    size = tile_elements or default_tile_elements(hidden.device)
    inputs = (hidden, weight, targets, temperatures, size, with_gradient, differentiable)
    logprobs, entropies = _LogprobsAndEntropy.apply(*inputs)  # type: ignore[no-untyped-call]
    return logprobs, entropies


def default_tile_elements(device: torch.device) -> int:
    """Returns the elements of a tile that suit the device: 8 MiB in float32 on a CPU, for its caches, 128 MiB
    otherwise."""
    return 1 << 21 if device.type == "cpu" else 1 << 25


def blocks(length: int, size: int) -> Iterator[slice]:
    """Yields slices of at most `size` that cover `length`."""
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def accum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the type to accumulate in: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def scaled_logits(hidden: torch.Tensor, weight: torch.Tensor, temperatures: torch.Tensor | float) -> torch.Tensor:
    """Returns [k, v] in the accumulation type. The product is in the model's type, as the server computes it;
    `temperatures` [k, 1] or one."""
    return linear(hidden, weight).to(accum_dtype(hidden.dtype)).div_(temperatures)


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Computes total += left · right, where `total` and `left` are in the accumulation type and the product is in the
    type of `right`."""
    total.add_(product(left.to(right.dtype), right))


class _LogprobsAndEntropy(torch.autograd.Function):
    """Computes log p of the target c and the entropy E. With p = softmax and the temperature T:

        d logp / d hidden = (weight_c - Σ p_v weight_v) / T
        d E / d hidden    = -Σ p_v (log p_v + E) weight_v / T

    Forward gathers both beside the softmax, so that backward only scales them. The weight's gradient computes the
    logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
        tile_elements: int,
        with_gradient: bool,
        differentiable: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = torch.empty(len(hidden), dtype=accum_dtype(hidden.dtype), device=hidden.device)
        logsumexp, entropies = torch.empty_like(logprobs), torch.empty_like(logprobs)
        grad_logprobs = torch.empty_like(hidden) if with_gradient else None
        grad_entropies = torch.empty_like(hidden) if with_gradient and differentiable else None
        num_blocks = max(1, -(-len(hidden) // min(POSITIONS_PER_TILE, tile_elements)))
        rows = max(1, -(-len(hidden) // num_blocks))
        columns = max(1, tile_elements // rows)
        for part in blocks(len(hidden), rows):
            inputs = hidden[part], weight, targets[part], temperatures[part, None]
            sums = _TiledSoftmax(*inputs, columns, with_gradient=with_gradient, differentiable=differentiable)
            logsumexp[part] = sums.logsumexp
            logprobs[part] = sums.target_logit - sums.logsumexp
            entropies[part] = sums.entropy[:, 0]
            if grad_logprobs is not None:
                grad_logprobs[part] = sums.grad_logprob()
            if grad_entropies is not None:
                grad_entropies[part] = sums.grad_entropy()
        kept = (hidden, weight, targets, temperatures, logsumexp, entropies) if ctx.needs_input_grad[1] else ()
        ctx.save_for_backward(grad_logprobs, grad_entropies, *kept)
        ctx.tile_elements, ctx.differentiable = tile_elements, differentiable
        if not differentiable:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, grad_entropy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_logprobs, grad_entropies, *kept = ctx.saved_tensors
        grad_hidden = None
        if grad_logprobs is not None:
            grad_hidden = torch.mul(grad_logprobs, grad[:, None], out=torch.empty_like(grad_logprobs))
            if grad_entropies is not None:
                grad_hidden.add_(grad_entropies * grad_entropy[:, None].to(grad_entropies.dtype))
        grad_weight = None
        if kept:
            of_entropy = grad_entropy if ctx.differentiable else None
            grad_weight = _weight_gradient(grad, of_entropy, *kept, tile_elements=ctx.tile_elements)
        return grad_hidden, grad_weight, None, None, None, None, None


class _TiledSoftmax:
    """The softmax over the vocabulary of [k, H] hidden states, summed over tiles of its tokens.

    The target is kept apart from the sums: 1 - p of a target that is nearly certain would be lost to rounding if its
    own probability were subtracted at the end. All sums are relative to the largest logit so far, `m`.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
        columns: int,
        *,
        with_gradient: bool,
        differentiable: bool,
    ) -> None:
        self._weight, self._targets, self._temperatures = weight, targets, temperatures
        pays = hidden.is_cuda or (len(hidden) >= COMPILED_POSITIONS and len(weight) >= COMPILED_VOCABULARY)
        self._fold = _compiled_fold(hidden.device.type) if pays else _fold
        zeros = torch.zeros(len(hidden), 1, dtype=accum_dtype(hidden.dtype), device=hidden.device)
        self._target = torch.full_like(zeros, torch.nan)
        """The target's logit, once its tile has come; an id outside the vocabulary never has one."""
        self._max = torch.full_like(zeros, torch.finfo(zeros.dtype).min)
        self._others = zeros
        """Σ exp(z - m) over all tokens but the target."""
        self._gaps = torch.zeros_like(zeros)
        """Σ exp(z - m) (z - m) over the same."""
        self._mean = torch.zeros_like(hidden, dtype=zeros.dtype) if with_gradient else None
        """[k, H] Σ exp(z - m) weight over the same."""
        self._gaps_mean = torch.zeros_like(self._mean) if self._mean is not None and differentiable else None
        """[k, H] Σ exp(z - m) (z - m) weight over the same."""
        for tokens in blocks(len(weight), columns):
            self._add(linear(hidden, weight[tokens]), tokens)
        self._target_exp = (self._target - self._max).exp_()
        self._sum = self._others + self._target_exp

    def _add(self, logits: torch.Tensor, tokens: slice) -> None:
        """Adds a tile. Sums that are relative to a smaller maximum are scaled to the new one."""
        column = (self._targets - tokens.start)[:, None]
        so_far = self._target, self._max, self._others, self._gaps
        sums = self._fold(logits, self._temperatures, column, *so_far, self._gaps_mean is not None)
        probs, weighted, shift, self._target, self._max, self._others, self._gaps = sums
        scale = shift.exp()
        if self._gaps_mean is not None and self._mean is not None:
            self._gaps_mean.addcmul_(self._mean, shift).mul_(scale)
            add_product(self._gaps_mean, weighted, self._weight[tokens])
        if self._mean is not None:
            add_product(self._mean.mul_(scale), probs, self._weight[tokens])

    @property
    def target_logit(self) -> torch.Tensor:
        """[k] the target's logit, divided by the temperature."""
        return self._target[:, 0]

    @property
    def logsumexp(self) -> torch.Tensor:
        """[k] log Σ exp(logit)."""
        return (self._max + self._sum.log())[:, 0]

    @property
    def entropy(self) -> torch.Tensor:
        """[k, 1] log Σ exp(z - m) - Σ p (z - m), in nats."""
        target_gap = self._target - self._max
        return self._sum.log() - torch.addcmul(self._gaps, self._target_exp, target_gap).div_(self._sum)

    def grad_logprob(self) -> torch.Tensor:
        """Returns [k, H] d logp / d hidden."""
        assert self._mean is not None, "made without gradients"
        grad = torch.addcmul(self._mean, self._target_rows(), self._others, value=-1)
        return grad.div_(-self._sum * self._temperatures)

    def grad_entropy(self) -> torch.Tensor:
        """Returns [k, H] d entropy / d hidden."""
        assert self._mean is not None, "made without gradients"
        assert self._gaps_mean is not None, "made without gradients of the entropy"
        rows, target_gap = self._target_rows(), self._target - self._max
        mean = torch.addcmul(self._mean, rows, self._target_exp)
        grad = torch.addcmul(self._gaps_mean, rows, self._target_exp * target_gap)
        return grad.addcmul_(mean, self.entropy - self._sum.log()).div_(-self._sum * self._temperatures)

    def _target_rows(self) -> torch.Tensor:
        return self._weight[self._targets].to(self._others.dtype)


def _fold(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    column: torch.Tensor,
    target: torch.Tensor,
    largest: torch.Tensor,
    others: torch.Tensor,
    gaps_sum: torch.Tensor,
    differentiable: bool,
) -> tuple[torch.Tensor, ...]:
    """Folds a tile [k, v] of logits, which it may overwrite, into the sums [k, 1]. This is everything that is done with
    a tile but matrix products. Compiled, it passes over the tile twice, and only in the model's type.

    `column` [k, 1] is where the target is in the tile, if it is: its logit is remembered and its probability made 0.
    Returns exp(z - m) and, for the entropy's gradient, (z - m) exp(z - m), both in the model's type, the change of m,
    and the new sums.
    """
    kind = logits.dtype
    logits = logits.to(accum_dtype(kind)).div_(temperatures)
    lowest = torch.finfo(logits.dtype).min / 2
    new_largest = torch.maximum(largest, logits.amax(dim=1, keepdim=True))
    inside = (column >= 0) & (column < logits.shape[1])
    column = column.clamp(0, logits.shape[1] - 1)
    found = logits.gather(1, column)
    target = torch.where(inside, found, target)
    logits.scatter_(1, column, torch.where(inside, lowest, found))
    shift = largest - new_largest
    scale = shift.exp()
    gaps = logits.sub_(new_largest)
    probs = gaps.exp()
    shifted = torch.addcmul(gaps_sum, others, shift).mul_(scale)
    gaps_sum = shifted + torch.linalg.vecdot(probs, gaps, dim=1)[:, None]
    others = torch.addcmul(probs.sum(dim=1, keepdim=True), others, scale)
    weighted = gaps.mul_(probs) if differentiable else gaps.new_empty(0)
    return probs.to(kind), weighted.to(kind), shift, target, new_largest, others, gaps_sum


@functools.cache
def _compiled_fold(device_type: str) -> Fold:
    """Returns `_fold`, compiled where torch can compile for the device; it says so where it cannot. Not yet run on a
    GPU."""
    if (missing := missing_for_compile(torch.device(device_type))) is not None:
        log.warning("%s: the LM head's tiles are not compiled, which costs up to a third of the speed", missing)
        return _fold
    # Of a copy, which costs nothing in compiled code: nothing is written back to the tile.
    compiled: Fold = torch.compile(lambda logits, *sums: _fold(logits.clone(), *sums), dynamic=True)

    def fold(*inputs: Any) -> tuple[torch.Tensor, ...]:
        nonlocal compiled
        try:
            return compiled(*inputs)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            log.warning("the LM head's tiles cannot be compiled, which costs up to a third of the speed: %s", error)
            compiled = _fold
            return _fold(*inputs)

    return fold


def _weight_gradient(
    grad: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    logsumexp: torch.Tensor,
    entropies: torch.Tensor,
    *,
    tile_elements: int,
) -> torch.Tensor:
    """Returns [V, H] Σ_k [grad (onehot(target) - p) - grad_entropy p (log p + entropy)] / temperature ⊗ hidden; each
    token's row is accumulated over all positions before it is rounded to the weight's type."""
    grad_weight = torch.empty_like(weight)
    scaled_hidden = (hidden * (-1 / temperatures)[:, None]).to(hidden.dtype)
    rows = max(1, min(len(hidden), POSITIONS_PER_TILE_OF_WEIGHT, tile_elements))
    columns = max(1, tile_elements // max(rows, hidden.shape[1]))
    for tokens in blocks(len(weight), columns):
        total = torch.zeros_like(weight[tokens], dtype=accum_dtype(weight.dtype))
        for part in blocks(len(hidden), rows):
            logp = scaled_logits(hidden[part], weight[tokens], temperatures[part, None]).sub_(logsumexp[part, None])
            factor = grad[part, None]
            if grad_entropy is not None:
                factor = torch.addcmul(factor, logp + entropies[part, None], grad_entropy[part, None])
            coefficients = logp.exp_().mul_(factor)
            column = targets[part] - tokens.start
            inside = (column >= 0) & (column < coefficients.shape[1])
            column = column.clamp(0, coefficients.shape[1] - 1)[:, None]
            coefficients.scatter_add_(1, column, torch.where(inside, -grad[part], 0.0)[:, None])
            add_product(total, coefficients.T, scaled_hidden[part])
        grad_weight[tokens] = total
    return grad_weight

"""Log-probabilities of chosen tokens from hidden states, fused with the LM head.

Legend: `K` positions, `H` hidden size, `V` vocabulary, `k` and `v` the positions and tokens of one tile. Only a tile
[k, v] of the logits exists at a time, in forward and in backward. Tensors of the width of a hidden state, [K, H], do.

The softmax is summed up tile by tile, as flash attention does it (arXiv:2205.14135, with the LM head in the place of
keys and values), so that a tile may be as small as a cache and the head is read once for many positions.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from trainer.products import linear, product

POSITIONS_AT_ONCE = 1024
"""Positions of a tile: enough that reading the head does not bound the product."""
POSITIONS_AT_ONCE_OF_WEIGHT = 8192
"""The same for the weight's gradient, whose sums are as wide as the tile and are read once for each."""


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    *,
    logits_at_once: int | None = None,
) -> torch.Tensor:
    """[K] float32 (float64 of float64): log softmax(hidden · weightᵀ / temperature)[target].

    `hidden` [K, H] is at the position before each target; `weight` [V, H] is the LM head's; `targets` [K] int64;
    `temperatures` [K] above 0. Differentiable in `hidden` and in `weight`, at no cost for what needs no gradient.
    `logits_at_once` bounds the elements of a tile of logits (None: what suits the device).
    """
    with_gradient = torch.is_grad_enabled() and hidden.requires_grad
    inputs = (hidden, weight, targets, temperatures, logits_at_once or tile_size(hidden.device), with_gradient)
    logprobs: torch.Tensor = _TokenLogprobs.apply(*inputs)  # type: ignore[no-untyped-call]
    return logprobs


def tile_size(device: torch.device) -> int:
    """Elements of a tile that suit the device: 8 MiB in float32 on a CPU, for its caches, 128 MiB otherwise."""
    return 1 << 21 if device.type == "cpu" else 1 << 25


def blocks(length: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` that cover `length`."""
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type to sum up in: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def scaled_logits(hidden: torch.Tensor, weight: torch.Tensor, temperatures: torch.Tensor | float) -> torch.Tensor:
    """[k, v] wide. The product is in the model's type, as the server computes it; `temperatures` [k, 1] or one."""
    return linear(hidden, weight).to(wide(hidden.dtype)).div_(temperatures)


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total += left · right, where `total` and `left` are wide and the product is in the type of `right`."""
    total.add_(product(left.to(right.dtype), right))


class _TokenLogprobs(torch.autograd.Function):
    """With p = softmax and c the target: d logp / d hidden = (weight_c - Σ p_i weight_i) / temperature, which forward
    gathers beside the softmax, so that backward only scales it. The weight's gradient needs the logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
        logits_at_once: int,
        with_gradient: bool,
    ) -> torch.Tensor:
        logprobs = torch.empty(len(hidden), dtype=wide(hidden.dtype), device=hidden.device)
        normalisers = torch.empty_like(logprobs)
        slopes = torch.empty_like(hidden) if with_gradient else None
        rows = max(1, min(len(hidden), POSITIONS_AT_ONCE, logits_at_once))
        columns = max(1, logits_at_once // rows)
        for part in blocks(len(hidden), rows):
            sums = _TiledSoftmax(hidden[part], weight, targets[part], temperatures[part, None], columns, with_gradient)
            normalisers[part] = sums.normaliser
            logprobs[part] = sums.target_logit - sums.normaliser
            if slopes is not None:
                slopes[part] = sums.slope()
        kept = (hidden, weight, targets, temperatures, normalisers) if ctx.needs_input_grad[1] else ()
        ctx.save_for_backward(slopes, *kept)
        ctx.logits_at_once = logits_at_once
        return logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        slopes, *kept = ctx.saved_tensors
        grad_hidden = None if slopes is None else torch.mul(slopes, grad[:, None], out=torch.empty_like(slopes))
        grad_weight = _weight_gradient(grad, *kept, logits_at_once=ctx.logits_at_once) if kept else None
        return grad_hidden, grad_weight, None, None, None, None


class _TiledSoftmax:
    """The softmax over the vocabulary of [k, H] hidden states, summed up over tiles of its tokens.

    The target is kept apart from the sums: 1 - p of a target that is nearly certain would be lost to rounding if its
    own share were subtracted at the end.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
        columns: int,
        with_slope: bool,
    ) -> None:
        self._weight, self._targets, self._temperatures = weight, targets, temperatures
        per_position = torch.zeros(len(hidden), 1, dtype=wide(hidden.dtype), device=hidden.device)
        self._target = torch.full_like(per_position, torch.nan)
        """The target's logit, once its tile has come; an id outside the vocabulary never has one."""
        self._largest = torch.full_like(per_position, -torch.inf)
        self._others = per_position
        """Σ of exp(logit - largest) over all tokens but the target."""
        self._mean = torch.zeros_like(hidden, dtype=wide(hidden.dtype)) if with_slope else None
        """[k, H] Σ of exp(logit - largest) · weight over all tokens but the target."""
        for tokens in blocks(len(weight), columns):
            self._add(scaled_logits(hidden, weight[tokens], temperatures), tokens)
        self._sum = self._others + (self._target - self._largest).exp_()

    def _add(self, logits: torch.Tensor, tokens: slice) -> None:
        """A tile. What was summed up under a smaller maximum is scaled to the new one."""
        largest = torch.maximum(self._largest, logits.amax(dim=1, keepdim=True))
        self._take_target_out(logits, tokens)
        scale = self._largest.sub_(largest).exp_()
        self._largest = largest
        shares = logits.sub_(largest).exp_()
        self._others = torch.addcmul(shares.sum(dim=1, keepdim=True), self._others, scale)
        if self._mean is not None:
            add_product(self._mean.mul_(scale), shares, self._weight[tokens])

    def _take_target_out(self, logits: torch.Tensor, tokens: slice) -> None:
        """Where the target is in the tile, remembers its logit and gives it no share."""
        place = (self._targets - tokens.start)[:, None]
        inside = (place >= 0) & (place < logits.shape[1])
        place = place.clamp(0, logits.shape[1] - 1)
        found = logits.gather(1, place)
        self._target = torch.where(inside, found, self._target)
        logits.scatter_(1, place, torch.where(inside, -torch.inf, found))

    @property
    def target_logit(self) -> torch.Tensor:
        """[k] divided by the temperature."""
        return self._target[:, 0]

    @property
    def normaliser(self) -> torch.Tensor:
        """[k] log Σ exp(logit)."""
        return (self._largest + self._sum.log())[:, 0]

    def slope(self) -> torch.Tensor:
        """[k, H] d logp / d hidden."""
        assert self._mean is not None, "made without slopes"
        slope = torch.addcmul(self._mean, self._weight[self._targets].to(self._mean.dtype), self._others, value=-1)
        return slope.div_(-self._sum * self._temperatures)


def _weight_gradient(
    grad: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    normalisers: torch.Tensor,
    *,
    logits_at_once: int,
) -> torch.Tensor:
    """[V, H] Σ_k grad / temperature · (onehot(target) - softmax) ⊗ hidden; each token's row is summed up wide over all
    positions before it is rounded to the weight's type."""
    grad_weight = torch.empty_like(weight)
    scaled_hidden = (hidden * (-grad / temperatures)[:, None]).to(hidden.dtype)
    rows = max(1, min(len(hidden), POSITIONS_AT_ONCE_OF_WEIGHT, logits_at_once))
    columns = max(1, logits_at_once // max(rows, hidden.shape[1]))
    for tokens in blocks(len(weight), columns):
        total = torch.zeros_like(weight[tokens], dtype=wide(weight.dtype))
        for part in blocks(len(hidden), rows):
            logits = scaled_logits(hidden[part], weight[tokens], temperatures[part, None])
            shares = logits.sub_(normalisers[part, None]).exp_()
            place = targets[part] - tokens.start
            inside = ((place >= 0) & (place < shares.shape[1]))[:, None]
            place = place.clamp(0, shares.shape[1] - 1)[:, None]
            shares.scatter_add_(1, place, -inside.to(shares.dtype))
            add_product(total, shares.T, scaled_hidden[part])
        grad_weight[tokens] = total
    return grad_weight

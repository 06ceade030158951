"""AdamW with a schedule and clipping; a step that is not finite is refused."""

import math
from collections.abc import Sequence
from typing import Literal

import torch

from trainer.errors import NonFiniteError

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(step: int, *, peak: float, schedule: Schedule, warmup_steps: int, max_steps: int) -> float:
    """The learning rate of `step` (1…).

    Rises as step / warmup_steps to the peak at step = warmup_steps. After that linear and cosine fall with
    progress = (step - 1 - warmup_steps) / (max_steps - warmup_steps): from the peak to 0 just after `max_steps`, so
    that no step is without effect.
    """
    if step <= warmup_steps:
        return peak * step / warmup_steps
    if schedule == "constant":
        return peak
    progress = min(1.0, (step - 1 - warmup_steps) / (max_steps - warmup_steps))
    factor = 1 - progress if schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * factor


class Optimizer:
    """AdamW over the adapter's parameters."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        *,
        betas: tuple[float, float],
        epsilon: float,
        weight_decay: float,
        max_grad_norm: float,
    ) -> None:
        self._parameters = list(parameters)
        self._max_grad_norm = max_grad_norm
        # The learning rate is given with each step; the fused kernel is one pass over memory on CPUs and GPUs.
        self._adamw = torch.optim.AdamW(
            self._parameters, lr=0.0, betas=betas, eps=epsilon, weight_decay=weight_decay, fused=True
        )

    def step(self, *, learning_rate: float) -> float:
        """Clips and applies the gradients, and clears them. Returns their norm before clipping.

        Raises `NonFiniteError`, leaving the parameters as they are, where the norm is not finite.
        """
        norm = torch.nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        if not bool(torch.isfinite(norm)):
            raise NonFiniteError(f"the gradient's norm is {float(norm)}")
        torch.nn.utils.clip_grads_with_norm_(self._parameters, self._max_grad_norm, norm)
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self._adamw.zero_grad()
        return float(norm)

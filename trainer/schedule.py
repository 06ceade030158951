"""Learning-rate schedules."""

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine", "wsd"]


def learning_rate(
    step: int,
    *,
    peak: float,
    schedule: Schedule,
    warmup_steps: int,
    max_steps: int,
    decay_steps: int | None = None,
) -> float:
    """The learning rate of `step` (1…).

    Rises as step / warmup_steps to the peak at step = warmup_steps. What falls after that, falls over the last
    `steps` of `max_steps`, with progress = (step - 1 - (max_steps - steps)) / steps: from the peak, in the first of
    them, to 0 just after `max_steps`, so that no step is without effect. Linear and cosine fall over all steps after
    the warm-up; wsd (warm-up, stable, decay; arXiv:2404.06395) stays at the peak and falls linearly over the last
    `decay_steps`, by default a tenth of `max_steps` and at least one.
    """
    if step <= warmup_steps:
        return peak * step / warmup_steps
    if schedule == "constant":
        return peak
    steps = max_steps - warmup_steps
    if schedule == "wsd":
        steps = min(steps, max(1, max_steps // 10) if decay_steps is None else decay_steps)
    progress = min(1.0, max(0.0, (step - 1 - (max_steps - steps)) / steps))
    factor = (1 + math.cos(math.pi * progress)) / 2 if schedule == "cosine" else 1 - progress
    return peak * factor

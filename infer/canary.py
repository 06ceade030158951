"""The proof that what is served is what was trained: both sides' log-probabilities of the canary agree.

docs/servers.md has the reasons for what is allowed where `canary_tolerance` does not say otherwise.
"""

import math
from collections.abc import Sequence

from grpo.transport.errors import PolicyRefused
from grpo.transport.http import CanaryFigures
from grpo.transport.records import Canary

FLOAT32_TOLERANCE = {"cpu": 1e-4, "cuda": 1e-2}
"""Largest difference where both sides compute in float32, by the server's device."""
HALF_TOLERANCE = {"bfloat16": 0.05, "float16": 0.01}
"""Mean difference where one of them computes in this type."""


def tolerance_of(server_dtype: str, trainer_dtype: str, *, device: str, setting: float | None) -> float:
    """Returns the allowed difference in nats: the setting, or by both types and the server's device."""
    if setting is not None:
        return setting
    coarsest = next((one for one in HALF_TOLERANCE if one in (server_dtype, trainer_dtype)), None)
    return FLOAT32_TOLERANCE[device] if coarsest is None else HALF_TOLERANCE[coarsest]


def check_effect(
    canary: Canary,
    served: Sequence[float],
    without: Sequence[float],
    *,
    dtype: str,
    device: str,
    tolerance: float | None,
    noise: bool = False,
) -> CanaryFigures:
    """Compares the server's log-probabilities [L - 1] of the canary with the trainer's.

    `served` are those with what is to be proved, `without` those without it: a version's adapter or weights or, with
    `noise`, its noise. Raises `PolicyRefused`: `not_applied` (`noise_not_applied`) where it changes the trainer's
    numbers and not the server's, `canary_mismatch` (`noise_mismatch`) beyond the tolerance."""
    expected, unchanged = (canary.logprobs, canary.base_logprobs)
    if noise:
        expected, unchanged = canary.noisy_logprobs or (), canary.logprobs
    exact = dtype == canary.dtype == "float32"
    gaps = [abs(x - y) for x, y in zip(served, expected, strict=True)]
    figures = CanaryFigures(
        max_abs=max(gaps),
        mean_abs=math.fsum(gaps) / len(gaps),
        tolerance=tolerance_of(dtype, canary.dtype, device=device, setting=tolerance),
        measure="max_abs" if exact else "mean_abs",
    )
    what, kind = ("its noise", "noise_") if noise else ("its adapter or weights", "")
    trained_change, served_change = largest_gap(expected, unchanged), largest_gap(served, without)
    visible = tolerance_of(dtype, canary.dtype, device=device, setting=None)  # smaller changes may be lost in rounding
    visible = visible / 10 if exact else visible
    may_be_none = canary.is_zero and not noise
    if trained_change > visible and served_change < trained_change / 10 and not may_be_none:
        raise PolicyRefused(
            f"{kind}not_applied",
            f"version {canary.version}: {what} changes the canary by {trained_change:.3g} nats in the trainer, but by "
            f"{served_change:.3g} in this server: it is not applied",
        )
    if not figures.agrees:
        raise PolicyRefused(
            "noise_mismatch" if noise else "canary_mismatch",
            f"version {canary.version}: with {what}, log-probabilities of the canary differ from the trainer's by "
            f"{figures.gap:.3g} nats ({figures.measure}), allowed are {figures.tolerance:g}; without, they differ by "
            f"{largest_gap(without, unchanged):.3g} at most (trainer {canary.dtype}, server {dtype})",
        )
    return figures


def largest_gap(left: Sequence[float], right: Sequence[float]) -> float:
    """Returns the largest absolute difference."""
    return max(abs(x - y) for x, y in zip(left, right, strict=True))

"""The proof that what is served is what was trained: both sides' log-probabilities of the canary agree.

docs/versions.md has the reasons for what is allowed where `canary_tolerance` does not say otherwise.
"""

import math
from collections.abc import Sequence

from grpo.transport.errors import PolicyRefused
from grpo.transport.http import CanaryFigures
from grpo.transport.records import Canary
from msgspec import structs

FLOAT32_TOLERANCE = {"cpu": 1e-4, "cuda": 1e-2}
"""Largest difference that is always allowed where both sides compute in float32, by the server's device."""
HALF_TOLERANCE = {"bfloat16": 0.05, "float16": 0.01}
"""Mean difference that is always allowed where one of them computes in this type."""
OF_BASES = 2.0
"""A version may differ by so many times what the base differs by on the same tokens."""
CEILING = 3.0
"""The base itself may differ by so many times what is always allowed; beyond that it is another model."""


def tolerance_of(server_dtype: str, trainer_dtype: str, *, device: str) -> float:
    """Returns the difference in nats that is always allowed, by both types and the server's device."""
    coarsest = next((one for one in HALF_TOLERANCE if one in (server_dtype, trainer_dtype)), None)
    return FLOAT32_TOLERANCE[device] if coarsest is None else HALF_TOLERANCE[coarsest]


def compare(
    canary: Canary,
    served: Sequence[float],
    base: Sequence[float],
    *,
    dtype: str,
    device: str,
    tolerance: float | None = None,
    noise: bool = False,
) -> CanaryFigures:
    """Returns how far `served` and `base`, another program's log-probabilities [L - 1] of the canary under the version
    (`noise`: with its noise) and the base, are from the trainer's, and what is allowed: `tolerance`, or what
    follows from the types of both and the gap of the bases. `dtype` and `device` are the other program's."""
    gaps = gaps_of(served, (canary.noisy_logprobs or ()) if noise else canary.logprobs)
    of_bases = gaps_of(base, canary.base_logprobs)
    figures = CanaryFigures(
        max_abs=max(gaps),
        mean_abs=math.fsum(gaps) / len(gaps),
        base_max_abs=max(of_bases),
        base_mean_abs=math.fsum(of_bases) / len(of_bases),
        tolerance=0.0,
        measure="max_abs" if dtype == canary.dtype == "float32" else "mean_abs",
    )
    least = tolerance_of(dtype, canary.dtype, device=device)
    return structs.replace(figures, tolerance=_rounding(figures, least) if tolerance is None else tolerance)


def _rounding(figures: CanaryFigures, least: float) -> float:
    """Returns the difference that rounding may make, by what the bases differ by; at least `least`."""
    return max(least, OF_BASES * min(figures.base_gap, CEILING * least))


def check_effect(
    canary: Canary,
    served: Sequence[float],
    base: Sequence[float],
    *,
    dtype: str,
    device: str,
    tolerance: float | None,
    noiseless: Sequence[float] | None = None,
) -> CanaryFigures:
    """Compares the server's log-probabilities [L - 1] of the canary with the trainer's.

    `served` are those of the version, `base` those of the base. Where `served` are those with the version's noise,
    `noiseless` are those without it. `tolerance` is `canary_tolerance`; with one, the bases are not compared.

    Raises `PolicyRefused`: `base_mismatch` where the base itself is another one; `not_applied` (`noise_not_applied`)
    where the adapter or weights (the noise) change the trainer's numbers and not the server's; `canary_mismatch`
    (`noise_mismatch`) beyond what is allowed."""
    noise = noiseless is not None
    figures = compare(canary, served, base, dtype=dtype, device=device, tolerance=tolerance, noise=noise)
    least = tolerance_of(dtype, canary.dtype, device=device)
    types = f"trainer {canary.dtype}, server {dtype}"
    if tolerance is None and not figures.base_gap <= CEILING * least:
        raise PolicyRefused(
            "base_mismatch",
            f"version {canary.version}: without any adapter, log-probabilities of the canary differ from the trainer's "
            f"by {figures.base_gap:.3g} nats ({figures.measure}), at most {CEILING * least:g} are expected of one "
            f"model ({types}): give both the same model, and take back what quantizes one of them",
        )
    what, kind = ("its noise", "noise_") if noise else ("its adapter or weights", "")
    before, without = (canary.logprobs, noiseless) if noiseless is not None else (canary.base_logprobs, base)
    expected = (canary.noisy_logprobs or ()) if noise else canary.logprobs
    changes = gaps_of(expected, before), gaps_of(served, without)
    exact = figures.measure == "max_abs"
    trained_change, served_change = (max(one) if exact else math.fsum(one) / len(one) for one in changes)
    # A smaller change may be lost in rounding or, in 16 bits, be nothing but rounding.
    visible = least / 10 if exact else _rounding(figures, least)
    may_be_none = canary.is_zero and not noise
    if trained_change > visible and served_change < trained_change / 10 and not may_be_none:
        raise PolicyRefused(
            f"{kind}not_applied",
            f"version {canary.version}: {what} changes the canary by {trained_change:.3g} nats ({figures.measure}) in "
            f"the trainer, but by {served_change:.3g} in this server: it is not applied",
        )
    if not figures.agrees:
        raise PolicyRefused(
            "noise_mismatch" if noise else "canary_mismatch",
            f"version {canary.version}: with {what}, log-probabilities of the canary differ from the trainer's by "
            f"{figures.gap:.3g} nats ({figures.measure}), allowed are {figures.tolerance:.3g}; those of the base "
            f"differ by {figures.base_gap:.3g} ({types})",
        )
    return figures


def gaps_of(left: Sequence[float], right: Sequence[float]) -> list[float]:
    """Returns the absolute differences."""
    return [abs(x - y) for x, y in zip(left, right, strict=True)]

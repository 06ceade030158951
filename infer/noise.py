"""Checks of a version's noise before the engine gets it, and of its effect afterwards.

Reasons of refusal: `norm_noise` (the server was not started for it), `corrupt`, `partial`, `shape`, `not_finite`,
`noise_not_applied`, `noise_mismatch`.
"""

from collections.abc import Sequence

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from infer.adapters import BaseModel, applied, largest_gap, report_of
from transport.errors import PolicyRefused
from transport.http import CanaryFigures
from transport.records import Canary, PolicyManifest
from transport.weights.store import CANARY_FILE, NOISE_FILE


def has_noise(manifest: PolicyManifest, canary: Canary) -> bool:
    """Whether a version has noise. Raises PolicyRefused where its parts contradict each other."""
    parts = {NOISE_FILE: NOISE_FILE in manifest.files, CANARY_FILE: canary.noisy_logprobs is not None}
    if len(set(parts.values())) > 1:
        raise PolicyRefused("partial", f"version {manifest.version} has noise by {parts}, expected both or neither")
    noisy = parts[NOISE_FILE]
    if noisy and not manifest.spec.norm_noise:
        raise PolicyRefused("corrupt", f"version {manifest.version} has {NOISE_FILE}, its spec says norm_noise: false")
    return noisy


def check_noise(data: bytes, base: BaseModel) -> None:
    """Raises PolicyRefused unless the file holds finite float32 weights for exactly the norms that can carry noise."""
    try:
        tensors: dict[str, torch.Tensor] = load(data)
    except (SafetensorError, ValueError) as error:
        raise PolicyRefused("corrupt", f"{NOISE_FILE} is not a safetensors file: {error}") from error
    norms = base.noisy_norms
    if missing := sorted(set(norms) - set(tensors)):
        raise PolicyRefused("partial", f"{NOISE_FILE} lacks {len(missing)} of {len(norms)} norms, first {missing[0]}")
    if surplus := sorted(set(tensors) - set(norms)):
        raise PolicyRefused("shape", f"{NOISE_FILE} has {len(surplus)} weights that no norm has, first {surplus[0]}")
    for name, size in norms.items():
        _check_tensor(name, tensors[name], size)


def _check_tensor(name: str, tensor: torch.Tensor, size: int) -> None:
    if tensor.dtype != torch.float32:
        raise PolicyRefused("corrupt", f"{NOISE_FILE}: {name} has type {tensor.dtype}, expected torch.float32")
    if tuple(tensor.shape) != (size,):
        raise PolicyRefused("shape", f"{NOISE_FILE}: {name} has shape {list(tensor.shape)}, expected [{size}]")
    if not bool(torch.isfinite(tensor).all()):
        raise PolicyRefused("not_finite", f"{NOISE_FILE}: {name} has values that are not finite")


def check_noise_effect(
    canary: Canary,
    *,
    noisy: Sequence[float],
    clean: Sequence[float],
    server_dtype: str,
    tolerance: float | None,
) -> CanaryFigures:
    """Compare the server's log-probabilities of the canary with the version's noise to the trainer's.

    `clean` are the server's without the noise. Raises PolicyRefused `noise_not_applied` where the noise changes the
    trainer's numbers but not the server's, else `noise_mismatch` beyond tolerance, which is that of the adapter.
    """
    trained = canary.noisy_logprobs or ()
    report = report_of(canary, trained, noisy, server_dtype=server_dtype, tolerance=tolerance)
    trained_change, served_change = largest_gap(trained, canary.logprobs), largest_gap(noisy, clean)
    if not applied(trained_change, served_change, report):
        raise PolicyRefused(
            "noise_not_applied",
            f"version {canary.version}: its noise changes the canary by {trained_change:.3g} nats in the trainer, but "
            f"by {served_change:.3g} in this server: the noise is not applied",
        )
    if not report.agrees:
        raise PolicyRefused(
            "noise_mismatch",
            f"version {canary.version}: with its noise, log-probabilities of the canary differ from the trainer's by "
            f"{report.gap:.3g} nats ({report.measure}), allowed are {report.tolerance:g}; without it they agree "
            f"(trainer {canary.dtype}, server {server_dtype})",
        )
    return report

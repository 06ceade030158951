"""Checks of an adapter's files before vLLM sees them, and of its effect afterwards. No I/O but the base's headers.

vLLM would accept a partial adapter silently, tear a loaded one with wrong shapes, and after a value that is not
finite fail every later request until it is restarted. Reasons of refusal: `corrupt`, `foreign_base`, `rank`, `shape`,
`partial`, `not_finite`, `canary_mismatch`, `not_applied`.

Shapes: `r` rank, `I` and `O` a layer's input and output features; A is [r, I], B is [O, r].
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from transport.errors import PolicyRefused
from transport.http import CanaryFigures
from transport.records import Canary, PolicyKind, PolicyManifest, PolicySpec
from transport.weights.store import ADAPTER_CONFIG_FILE, ADAPTER_FILE

PEFT_PREFIX = "base_model.model."
LARGEST_UPDATE = 1e6
"""Bound on scaling * |A| * |B| of one layer (Frobenius norms). Far above any trained adapter; beyond it activations
overflow, and one overflow leaves values in vLLM's cache that spoil later requests."""
FLOAT32_TOLERANCE = 1e-4
HALF_TOLERANCE = 0.05
_MAX_HEADER_BYTES = 100_000_000
_PLAIN_KEYS = frozenset(
    {
        *("r", "lora_alpha", "target_modules", "peft_type", "task_type", "inference_mode", "base_model_name_or_path"),
        *("revision", "peft_version", "auto_mapping", "init_lora_weights", "lora_dropout", "qalora_group_size"),
        "megatron_core",
    }
)
"""Keys of PEFT's configuration that do not change what a plain adapter computes; all others must be off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """What an adapter must fit: `Served(identity="9f…", linear_shapes={"model.layers.0.mlp.up_proj": (352, 128)})`."""

    identity: str
    linear_shapes: Mapping[str, tuple[int, int]]
    """Module name to (O, I), for every two-dimensional weight of the checkpoint."""
    max_rank: int
    """Highest rank that the server was started for."""
    dtype: torch.dtype
    """Type that the server casts adapters to."""
    noisy_norms: Mapping[str, int] = field(default_factory=dict)
    """Norm weights that can carry a version's noise, by the checkpoint's names, and their sizes; none where the server
    was not started for it."""


def linear_shapes(model_dir: Path) -> dict[str, tuple[int, int]]:
    """Shapes (O, I) of all two-dimensional weights, by module name, from the headers of the checkpoint's files.

    Raises FileNotFoundError if the checkpoint has no safetensors files.
    """
    shapes = {}
    for name, shape in tensor_shapes(model_dir).items():
        if name.endswith(".weight") and len(shape) == 2:
            shapes[name.removesuffix(".weight")] = (shape[0], shape[1])
    return shapes


def tensor_shapes(model_dir: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors by name, from the headers of the checkpoint's files.

    Raises FileNotFoundError if the checkpoint has no safetensors files.
    """
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{model_dir} has no .safetensors weights; convert the model to safetensors")
    return {name: tuple(entry["shape"]) for file in files for name, entry in _header(file).items()}


def _header(file: Path) -> dict[str, Any]:
    """The JSON header of a safetensors file, without its metadata."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if size > _MAX_HEADER_BYTES:
            raise ValueError(f"{file} is no safetensors file: its header claims {size} bytes")
        header: dict[str, Any] = json.loads(stream.read(size))
    header.pop("__metadata__", None)
    return header


def check_adapter(manifest: PolicyManifest, files: Mapping[str, bytes], base: BaseModel, *, folder: str = "") -> None:
    """Raises PolicyRefused unless the files hold a whole, finite LoRA adapter for `base`, as the manifest says.

    `files` are the bytes of the version's files, their digests already checked; those of the adapter begin with
    `folder`.
    """
    spec = manifest.spec
    check_kind(manifest, ("adapter",), base)
    if spec.rank > base.max_rank:
        raise PolicyRefused(
            "rank",
            f"version {manifest.version} has rank {spec.rank}, this server was started for at most {base.max_rank}; "
            f"start it with max_lora_rank: {spec.rank}",
        )
    for name in (ADAPTER_FILE, ADAPTER_CONFIG_FILE):
        if f"{folder}{name}" not in files:
            raise PolicyRefused("partial", f"version {manifest.version} has no {folder}{name}")
    _check_config(files[f"{folder}{ADAPTER_CONFIG_FILE}"], spec)
    tensors = _tensors(files[f"{folder}{ADAPTER_FILE}"])
    _check_names(tensors, spec, base)
    _check_shapes(tensors, spec, base)
    _check_values(tensors, spec, base)


def check_kind(manifest: PolicyManifest, served: Sequence[PolicyKind], base: BaseModel) -> None:
    """Raises PolicyRefused for a version of another base model, of a kind that is not among those served, or of a run
    with noise where that is not served."""
    spec = manifest.spec
    if spec.base_model != base.identity:
        raise PolicyRefused(
            "foreign_base",
            f"version {manifest.version} was trained on base model {spec.base_model}, this server serves "
            f"{base.identity}; give trainer and server the same model",
        )
    if spec.kind not in served:
        raise PolicyRefused(
            "kind",
            f"version {manifest.version} is of kind {spec.kind}, this server serves {' and '.join(served)}; start it "
            f"with enable_lora: {str(spec.kind == 'adapter').lower()}",
        )
    if spec.norm_noise and not base.noisy_norms:
        raise PolicyRefused(
            "norm_noise",
            f"version {manifest.version} belongs to a run with noise on the norm weights (noise_scheduler), which this "
            "server was not started for; start it with norm_noise: true",
        )


def _check_config(data: bytes, spec: PolicySpec) -> None:
    """PEFT's configuration, from which vLLM takes rank and scaling, must say what the manifest says."""
    try:
        config = json.loads(data)
        found = {
            "r": config["r"],
            "lora_alpha": config["lora_alpha"],
            "target_modules": sorted(config["target_modules"]),
        }
    except (ValueError, KeyError, TypeError) as error:
        raise PolicyRefused("corrupt", f"{ADAPTER_CONFIG_FILE} is not PEFT's LoRA configuration: {error!r}") from error
    expected = {"r": spec.rank, "lora_alpha": spec.alpha, "target_modules": sorted(spec.target_modules)}
    for key, value in expected.items():
        if found[key] != value:
            reason = "rank" if key == "r" else "corrupt"
            raise PolicyRefused(
                reason, f"{ADAPTER_CONFIG_FILE} has {key} = {found[key]!r}, the manifest says {value!r}"
            )
    for key, value in config.items():
        if key not in _PLAIN_KEYS and value not in (None, False, "none", [], {}):
            raise PolicyRefused("corrupt", f"{ADAPTER_CONFIG_FILE} sets {key} = {value!r}; only plain LoRA is served")
    if config.get("peft_type", "LORA") != "LORA":
        raise PolicyRefused("corrupt", f"{ADAPTER_CONFIG_FILE} is of {config['peft_type']}; only plain LoRA is served")


def _tensors(data: bytes) -> dict[str, torch.Tensor]:
    try:
        tensors: dict[str, torch.Tensor] = safetensors.torch.load(data)
    except Exception as error:  # the library raises its own error and, by the damage, several of Python's
        raise PolicyRefused("corrupt", f"{ADAPTER_FILE} is not a safetensors file: {error}") from error
    return tensors


def _expected_shapes(spec: PolicySpec, base: BaseModel) -> dict[str, tuple[int, int]]:
    """Shapes of A and B by PEFT's names, for every layer of the base model that is a target."""
    shapes = {}
    for module, (num_outputs, num_inputs) in base.linear_shapes.items():
        if module.rpartition(".")[2] in spec.target_modules:
            shapes[f"{PEFT_PREFIX}{module}.lora_A.weight"] = (spec.rank, num_inputs)
            shapes[f"{PEFT_PREFIX}{module}.lora_B.weight"] = (num_outputs, spec.rank)
    return shapes


def _check_names(tensors: Mapping[str, torch.Tensor], spec: PolicySpec, base: BaseModel) -> None:
    expected = _expected_shapes(spec, base)
    served = {module.rpartition(".")[2] for module in base.linear_shapes}
    if unknown := sorted(set(spec.target_modules) - served):
        raise PolicyRefused("shape", f"target_modules {', '.join(unknown)} do not exist in the base model")
    if missing := sorted(set(expected) - set(tensors)):
        raise PolicyRefused(
            "partial", f"the adapter lacks {len(missing)} of {len(expected)} tensors, the first is {missing[0]}"
        )
    if surplus := sorted(set(tensors) - set(expected)):
        raise PolicyRefused(
            "shape", f"the adapter has {len(surplus)} tensors that no target layer has, the first is {surplus[0]}"
        )


def _check_shapes(tensors: Mapping[str, torch.Tensor], spec: PolicySpec, base: BaseModel) -> None:
    for name, shape in _expected_shapes(spec, base).items():
        received = tuple(tensors[name].shape)
        if received == shape:
            continue
        rank_axis = 0 if ".lora_A." in name else 1
        other_fits = len(received) == 2 and received[1 - rank_axis] == shape[1 - rank_axis]
        reason = "rank" if other_fits else "shape"
        raise PolicyRefused(reason, f"{name} has shape {list(received)}, expected {list(shape)}")


def _check_values(tensors: Mapping[str, torch.Tensor], spec: PolicySpec, base: BaseModel) -> None:
    norms = {}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise PolicyRefused("corrupt", f"{name} has type {tensor.dtype}, expected a floating-point type")
        served = tensor.to(base.dtype)
        if not bool(torch.isfinite(served).all()):
            num_bad = int((~torch.isfinite(served)).sum())
            raise PolicyRefused("not_finite", f"{name} has {num_bad} values that are not finite as {base.dtype}")
        norms[name] = float(served.double().norm())
    for name_b, norm_b in norms.items():
        if ".lora_B." not in name_b:
            continue
        update = spec.alpha / spec.rank * norms[name_b.replace(".lora_B.", ".lora_A.")] * norm_b
        if not update <= LARGEST_UPDATE:
            raise PolicyRefused(
                "not_finite",
                f"{name_b} and its A multiply to {update:.3g}, above {LARGEST_UPDATE:g}: it would overflow",
            )


def tolerance_of(server_dtype: str, trainer_dtype: str, setting: float | None) -> float:
    """Allowed difference at the canary in nats: the setting, or by the types of both sides' computations."""
    if setting is not None:
        return setting
    return FLOAT32_TOLERANCE if server_dtype == trainer_dtype == "float32" else HALF_TOLERANCE


def check_effect(
    canary: Canary,
    *,
    policy: Sequence[float],
    base: Sequence[float],
    server_dtype: str,
    tolerance: float | None,
) -> CanaryFigures:
    """Compare the server's log-probabilities of the canary, with the adapter and without, to the trainer's.

    In float32 on both sides the largest difference counts, else the mean. `tolerance` None stands for 1e-4 and 0.05
    nats. Raises PolicyRefused `not_applied` if the adapter changes the trainer's numbers but not the server's, else
    `canary_mismatch` beyond tolerance.
    """
    report = report_of(canary, canary.logprobs, policy, server_dtype=server_dtype, tolerance=tolerance)
    trained_change, served_change = largest_gap(canary.logprobs, canary.base_logprobs), largest_gap(policy, base)
    if not canary.is_zero and not applied(trained_change, served_change, report):
        raise PolicyRefused(
            "not_applied",
            f"version {canary.version} changes the canary by {trained_change:.3g} nats in the trainer, but by "
            f"{served_change:.3g} in this server: the adapter is not applied",
        )
    if not report.agrees:
        base_gap = largest_gap(base, canary.base_logprobs)
        raise PolicyRefused(
            "canary_mismatch",
            f"version {canary.version}: log-probabilities of the canary differ from the trainer's by "
            f"{report.gap:.3g} nats ({report.measure}), allowed are {report.tolerance:g}; without the adapter they "
            f"differ by {base_gap:.3g} at most (trainer {canary.dtype}, server {server_dtype})",
        )
    return report


def report_of(
    canary: Canary, expected: Sequence[float], served: Sequence[float], *, server_dtype: str, tolerance: float | None
) -> CanaryFigures:
    """How far the served log-probabilities are from the trainer's, and how far they may be."""
    gaps = [abs(x - y) for x, y in zip(served, expected, strict=True)]
    return CanaryFigures(
        max_abs=max(gaps),
        mean_abs=math.fsum(gaps) / len(gaps),
        tolerance=tolerance_of(server_dtype, canary.dtype, tolerance),
        measure="max_abs" if server_dtype == canary.dtype == "float32" else "mean_abs",
    )


def applied(trained_change: float, served_change: float, report: CanaryFigures) -> bool:
    """Whether what changes the trainer's log-probabilities changes the server's too; a change within what the types
    of the computation leave open tells nothing, and counts as applied."""
    told = FLOAT32_TOLERANCE / 10 if report.measure == "max_abs" else HALF_TOLERANCE
    return trained_change <= told or served_change >= trained_change / 10


def largest_gap(left: Sequence[float], right: Sequence[float]) -> float:
    """The largest absolute difference."""
    return max(abs(x - y) for x, y in zip(left, right, strict=True))

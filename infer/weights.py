"""Checks of a version's weights that are no adapter, before they replace the server's own. Tensor by tensor.

Reasons of refusal: `foreign_base`, `kind`, `corrupt`, `partial`, `shape`, `not_finite`, `rounding`.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from infer.adapters import BaseModel, check_kind
from transport.errors import CorruptError, PolicyRefused
from transport.records import PolicyKind, PolicyManifest, PolicySpec
from transport.weights.nccl import ANNOUNCEMENT_FILE, Announcement
from transport.weights.shards import INDEX_FILE, weight_map

KINDS: tuple[PolicyKind, ...] = ("merged", "full")
Shapes = Mapping[str, tuple[int, ...]]


def check_weights(
    manifest: PolicyManifest, folder: Path, files: Mapping[str, bytes], base: BaseModel, shapes: Shapes
) -> None:
    """Raises PolicyRefused unless `folder` holds whole and finite weights for `base`, as the manifest says.

    The digests of all files are checked already; `files` are the small ones. `shapes` are those of all tensors in the
    base's checkpoint.
    """
    spec = manifest.spec
    check_kind(manifest, KINDS, base)
    _check_rounding(spec, base)
    if ANNOUNCEMENT_FILE in files:
        _check_announced(announcement_in(files), spec, shapes)
        return
    if INDEX_FILE not in files:
        raise PolicyRefused("partial", f"version {manifest.version} has no {INDEX_FILE}")
    try:
        shard_of = weight_map(files[INDEX_FILE], manifest.files)
    except CorruptError as error:
        raise PolicyRefused("corrupt", str(error)) from error
    _check_names(shard_of, spec, shapes)
    for shard in sorted(set(shard_of.values())):
        names = {name for name, its_shard in shard_of.items() if its_shard == shard}
        try:
            _check_shard(folder / shard, names, shapes, base.dtype)
        except (SafetensorError, OSError) as error:
            raise PolicyRefused("corrupt", f"{shard} is not a safetensors file: {error}") from error


def announcement_in(files: Mapping[str, bytes]) -> Announcement:
    """What the trainer is going to broadcast. Raises PolicyRefused."""
    try:
        return Announcement.from_json(files[ANNOUNCEMENT_FILE])
    except CorruptError as error:
        raise PolicyRefused("corrupt", str(error)) from error


def _check_announced(announcement: Announcement, spec: PolicySpec, shapes: Shapes) -> None:
    """Names and shapes; the values have not been sent yet, so that only the canary can tell of them."""
    _check_names(dict.fromkeys(announcement.names, ""), spec, shapes)
    for name, shape in zip(announcement.names, announcement.shapes, strict=True):
        if shape != tuple(shapes[name]):
            raise PolicyRefused("shape", f"{name} has shape {list(shape)}, expected {list(shapes[name])}")


def _check_rounding(spec: PolicySpec, base: BaseModel) -> None:
    if spec.kind == "merged" and spec.dtype == "float32" and base.dtype != torch.float32:
        raise PolicyRefused(
            "rounding",
            f"merged weights of a trainer in float32 would be rounded to {base.dtype}, which loses most of a small "
            "update; start this server with dtype: float32",
        )


def _check_names(shard_of: Mapping[str, str], spec: PolicySpec, shapes: Shapes) -> None:
    expected = set(shapes)
    if spec.kind == "merged":
        expected = {n for n in shapes if n.endswith(".weight") and n.split(".")[-2] in spec.target_modules}
    if missing := sorted(expected - set(shard_of)):
        raise PolicyRefused("partial", f"{len(missing)} of {len(expected)} weights are missing, first {missing[0]}")
    if surplus := sorted(set(shard_of) - expected):
        raise PolicyRefused("shape", f"{len(surplus)} weights do not belong there, the first is {surplus[0]}")


def _check_shard(path: Path, names: set[str], shapes: Shapes, dtype: torch.dtype) -> None:
    with safe_open(path, framework="pt") as shard:
        if set(shard.keys()) != names:
            raise PolicyRefused("corrupt", f"{path.name} holds other tensors than {INDEX_FILE} says")
        for name in sorted(names):
            _check_tensor(name, shard.get_tensor(name), shapes[name], dtype)


def _check_tensor(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape:
        raise PolicyRefused("shape", f"{name} has shape {list(tensor.shape)}, expected {list(shape)}")
    if not tensor.is_floating_point():
        raise PolicyRefused("corrupt", f"{name} has type {tensor.dtype}, expected a floating-point type")
    if not bool(torch.isfinite(tensor.to(dtype)).all()):
        raise PolicyRefused("not_finite", f"{name} has values that are not finite as {dtype}")

"""Checkpoints on disk: `checkpoints/step_000012/trainer/` with the state after step 12.

One safetensors file for each part of the state, `manifest.json` with everything else, and `STABLE`, written last, with
the manifest's digest. The folder appears whole or not at all, and is never written twice. Another program's part of the
step would lie beside it; what makes the two belong together is not the trainer's to say.
"""

import contextlib
import json
import logging
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from transport import faults
from transport.checkpoints import TRAINER
from transport.errors import CorruptError, SchemaVersionError, StaleRunError
from transport.folders import check_large, fsync_folder, hashed, read_manifest, step_folder, write_folder
from transport.records import FileEntry, parse_json
from transport.run import library_versions
from transport.weights.base import Weight
from transport.weights.shards import safetensors_chunks

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
_SUFFIX = ".safetensors"
_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8", torch.int64: "I64"}
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The state after a step. Example: ``Checkpoint(run_id="5f0c", step=12, base_model="9a1…", settings={"seed": 42},
    metrics=None, parts={"weights": {"lora_A": tensor}})``"""

    run_id: str
    step: int
    """The last step that it contains; the next batch is that of `step` + 1."""
    base_model: str
    """Identity of the base model."""
    settings: Mapping[str, Any]
    """All settings of the trainer, as JSON."""
    metrics: Mapping[str, float] | None
    """Those of the step; None for step 0."""
    parts: Mapping[str, Tensors]
    """Tensors in main memory, by the name of their part: `weights`, `optimizer`, `average`."""


class CheckpointStore:
    """The checkpoints of one run below `folder`. One process writes; others may read."""

    def __init__(self, folder: Path, *, run_id: str) -> None:
        self._folder, self._run_id = folder, run_id

    def path(self, step: int) -> Path:
        """Where the checkpoint of `step` is, or would be."""
        return step_folder(self._folder, step) / TRAINER

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, ascending."""
        found = (path.parent.name.removeprefix("step_") for path in self._folder.glob(f"step_*/{TRAINER}"))
        return sorted(int(number) for number in found if number.isdigit())

    def write(self, checkpoint: Checkpoint) -> None:
        """Makes it visible, whole. Raises `StorageError`; nothing of it is visible then."""
        entries = dict[str, FileEntry]()
        contents = {f"{part}{_SUFFIX}": safetensors_chunks(_weights(t)) for part, t in checkpoint.parts.items() if t}
        files = {name: hashed(name, content, entries) for name, content in contents.items()}
        write_folder(self.path(checkpoint.step), files, lambda: _manifest(checkpoint, entries))
        fsync_folder(self._folder)
        faults.point("checkpoint.written")

    def read(self, step: int) -> Checkpoint:
        """The checkpoint of `step`, checked. Raises `CorruptError`, `SchemaVersionError` or `StaleRunError`."""
        folder = self.path(step)
        fields = parse_json(read_manifest(folder), f"{folder}/manifest.json")
        if (received := fields.get("schema_version")) != SCHEMA_VERSION:
            raise SchemaVersionError(f"{folder} has schema version {received!r}, this program reads {SCHEMA_VERSION}")
        try:
            return self._checked(folder, step, fields)
        except (KeyError, TypeError, AttributeError) as error:
            raise CorruptError(f"{folder}/manifest.json lacks or misuses a field: {error}") from error

    def _checked(self, folder: Path, step: int, fields: dict[str, Any]) -> Checkpoint:
        if fields["run_id"] != self._run_id:
            raise StaleRunError(f"{folder} belongs to run {fields['run_id']}, this is run {self._run_id}")
        if fields["step"] != step:
            raise CorruptError(f"{folder} holds step {fields['step']}, expected {step}")
        return Checkpoint(
            run_id=fields["run_id"],
            step=step,
            base_model=fields["base_model"],
            settings=fields["settings"],
            metrics=fields["metrics"],
            parts={
                name.removesuffix(_SUFFIX): _read_tensors(folder, name, FileEntry(**entry))
                for name, entry in fields["files"].items()
            },
        )

    def remove_old(self, *, keep_last: int | None, keep_interval: int | None) -> None:
        """Removes those that need not be kept. What cannot be removed stays, with a warning."""
        try:
            for step in removable(self.steps(), keep_last=keep_last, keep_interval=keep_interval):
                retired = self.path(step).with_name(f".{TRAINER}.{uuid.uuid4().hex}.old")
                self.path(step).rename(retired)
                faults.point("checkpoint.retired")
                _remove(retired)
                faults.point("checkpoint.removed")
        except OSError as error:
            log.warning("old checkpoints stay: %s", error)

    def remove_leftovers(self) -> None:
        """Removes what a killed writer left half done."""
        for kind in ("tmp", "old"):
            for leftover in self._folder.glob(f"step_*/.{TRAINER}.*.{kind}"):
                _remove(leftover)


def removable(steps: Sequence[int], *, keep_last: int | None, keep_interval: int | None) -> list[int]:
    """Those of the ascending `steps` that are neither among the last `keep_last` (None: all) nor multiples of
    `keep_interval` (None: none are)."""
    if keep_last is None:
        return []
    return [step for step in steps[:-keep_last] if keep_interval is None or step % keep_interval]


def _remove(folder: Path) -> None:
    """With the step's folder, if nothing else is in it."""
    shutil.rmtree(folder)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()


def _manifest(checkpoint: Checkpoint, entries: Mapping[str, FileEntry]) -> bytes:
    fields = {
        "schema_version": SCHEMA_VERSION,
        "run_id": checkpoint.run_id,
        "step": checkpoint.step,
        "next_batch": checkpoint.step + 1,
        "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "base_model": checkpoint.base_model,
        "versions": library_versions(),
        "settings": checkpoint.settings,
        "metrics": checkpoint.metrics,
        "files": {name: {"size_bytes": entry.size_bytes, "digest": entry.digest} for name, entry in entries.items()},
    }
    return json.dumps(fields, indent=1).encode()


def _weights(tensors: Tensors) -> list[Weight]:
    return [_weight(name, tensor) for name, tensor in sorted(tensors.items())]


def _weight(name: str, tensor: torch.Tensor) -> Weight:
    return Weight(
        name=name,
        dtype=_TYPES[tensor.dtype],
        shape=tuple(tensor.shape),
        read=lambda: tensor.reshape(-1).view(torch.uint8).numpy().data,
        tensor=lambda: tensor,
    )


def _read_tensors(folder: Path, name: str, entry: FileEntry) -> dict[str, torch.Tensor]:
    check_large(folder, name, entry)
    tensors: dict[str, torch.Tensor] = load_file(folder / name)
    return tensors

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from transport.checkpoints import TRAINER
from transport.errors import CorruptError, SchemaVersionError, StaleRunError
from transport.folders import (
    Content,
    check_file,
    fsync,
    read_manifest,
    remove_folder,
    step_folder,
    steps_in,
    write_folder,
)
from transport.records import FileEntry, parse_json
from transport.run import library_versions

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
_SUFFIX = ".safetensors"
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
        return steps_in(self._folder, part=TRAINER)

    def write(self, checkpoint: Checkpoint) -> None:
        """Makes it visible, whole. Raises `StorageError`; nothing of it is visible then."""
        files = {f"{part}{_SUFFIX}": _file(tensors) for part, tensors in checkpoint.parts.items() if tensors}
        write_folder(self.path(checkpoint.step), files, lambda entries: _manifest(checkpoint, entries))
        fsync(self._folder)

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
                remove_folder(self.path(step))
                with contextlib.suppress(OSError):  # unless the orchestrator's part is there
                    self.path(step).parent.rmdir()
        except OSError as error:
            log.warning("old checkpoints stay: %s", error)

    def remove_leftovers(self) -> None:
        """Removes what a killed writer left half done."""
        for leftover in self._folder.glob(f"step_*/.{TRAINER}.*.tmp"):
            shutil.rmtree(leftover)
            with contextlib.suppress(OSError):
                leftover.parent.rmdir()


def removable(steps: Sequence[int], *, keep_last: int | None, keep_interval: int | None) -> list[int]:
    """Those of the ascending `steps` that are neither among the last `keep_last` (None: all) nor multiples of
    `keep_interval` (None: none are)."""
    if keep_last is None:
        return []
    return [step for step in steps[:-keep_last] if keep_interval is None or step % keep_interval]


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


def _file(tensors: Tensors) -> Content:
    """A file's content, made when it is written, so that no two are in memory at once."""
    return lambda: (save({name: tensor.contiguous() for name, tensor in sorted(tensors.items())}),)


def _read_tensors(folder: Path, name: str, entry: FileEntry) -> dict[str, torch.Tensor]:
    check_file(folder, name, entry)
    tensors: dict[str, torch.Tensor] = load_file(folder / name)
    return tensors

"""Builds a base model on the weights that the server on the same device exports (`colocate`), without a copy.

The imported weights are checked against the checkpoint: complete, by name, shape and type. That they are laid out as in
it, the canary of version 0 proves.

When the server has ended, so does the trainer (`ExporterGone`, exit code 75): started again, it imports what the next
server exports, as at its first start.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from grpo.configs.train import TrainSettings
from grpo.trainer.errors import ExporterGone, ModelError
from grpo.trainer.loading import CheckpointTensors, filled_model, shorten
from grpo.transport.shared_base import ImportedBase, import_base
from grpo.transport.weights.identity import base_identity

log = logging.getLogger(__name__)

_RECIPES = {"float32": "fp32", "bfloat16": "bf16"}


def imported_for(settings: TrainSettings, device: torch.device) -> ImportedBase | None:
    """Returns the base weights of the run's server, once it has loaded them; None without `colocate`. Raises
    `DeadlineError`, which names whom it waited for, and other errors of `grpo.transport.errors`."""
    if not settings.colocate:
        return None
    return import_base(settings.output_dir, device, timeout_s=settings.wait_timeout_s)


def check_exporter(imported: ImportedBase | None) -> None:
    """Raises `ExporterGone` if the server that exports the base has ended. Takes a microsecond."""
    if imported is not None and not imported.exporter_lives:
        raise ExporterGone("grpo-infer, whose base weights the trainer computes on, has ended")


@contextmanager
def while_exported(imported: ImportedBase | None) -> Iterator[None]:
    """Surrounds code that reads the weights. Raises `ExporterGone` at its end if the server has ended meanwhile,
    whether or not that led to an error."""
    try:
        yield
    except Exception as error:
        if imported is None or imported.exporter_lives:
            raise
        raise ExporterGone(f"grpo-infer ended while the trainer used its base weights: {error}") from error
    check_exporter(imported)


def model_on(folder: Path, imported: ImportedBase, *, dtype: torch.dtype, attention: str) -> Any:
    """Returns the causal language model in `folder`, computing in `dtype`, frozen, on imported weights.

    Raises `ModelError` if the weights are another model's, of another type, or incomplete.
    """
    manifest, name = imported.manifest, str(dtype).removeprefix("torch.")
    if (own := base_identity(folder)) != manifest.base_model:
        raise ModelError(
            f"the server shares the base {manifest.base_model}, and the model in {folder} is {own}; give both programs "
            "the same model"
        )
    if name != manifest.dtype:
        recipe = f"the trainer's recipe: {_RECIPES[manifest.dtype]}, or " if manifest.dtype in _RECIPES else ""
        raise ModelError(
            f"the server shares weights of type {manifest.dtype}, and the trainer computes in {name}; set {recipe}the "
            f"server's dtype: {name}"
        )
    tensors = ImportedTensors(folder, imported, dtype)
    model = filled_model(tensors, attention=attention)
    read = sorted(tensors.used - tensors.shared.keys())
    log.info("base weights: %d tensors are the server's; read from disk: %s", len(tensors.shared), read or "none")
    return model


class ImportedTensors(CheckpointTensors):
    """The tensors of a checkpoint, imported from the server except for those that it leaves out."""

    def __init__(self, folder: Path, imported: ImportedBase, dtype: torch.dtype) -> None:
        self.shared = imported.tensors
        super().__init__(folder, device=next(iter(self.shared.values())).device, dtype=dtype)
        self._left = frozenset(imported.manifest.left) & super().names

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.shared) | self._left

    def read(self, name: str) -> torch.Tensor:
        """Returns the shared tensor, or reads it from the checkpoint if the server does not share it."""
        self.used.add(name)
        return self.shared[name] if name in self.shared else super().read(name)

    def plain(self, name: str, expected: torch.Tensor) -> torch.Tensor:
        if name not in self.names:
            raise ModelError(f"the server does not share {name}; turn colocate off")
        tensor = self.shared.get(name)
        if tensor is None:
            return super().plain(name, expected)
        if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
            raise ModelError(
                f"the server shares {name} as {tensor.dtype} of shape {list(tensor.shape)}, expected {expected.dtype} "
                f"of shape {list(expected.shape)}; turn colocate off"
            )
        return self.read(name)

    def check_all_used(self, model: Any, tied: str | None) -> None:
        if surplus := set(self.shared) - self.used:
            raise ModelError(f"the server shares what {type(model).__name__} has no place for: {shorten(surplus)}")

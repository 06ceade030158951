"""The tensors of a safetensors checkpoint, read one at a time."""

import json
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from trainer.errors import ModelError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class TensorSource(Protocol):
    """A checkpoint's tensors, wherever they lie."""

    folder: Path
    """Of the checkpoint."""

    @property
    def names(self) -> frozenset[str]:
        """Of all tensors."""

    def read(self, name: str) -> torch.Tensor:
        """One tensor. Raises KeyError where there is none of this name."""


class TensorFiles:
    """A folder's weights, in one file or in shards. What `read` gives belongs to the caller alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = _files_by_name(folder)

    @property
    def names(self) -> frozenset[str]:
        """Of all tensors."""
        return frozenset(self._files)

    def read(self, name: str) -> torch.Tensor:
        """One tensor, in main memory until it is released."""
        file = self._files[name]
        try:
            with safe_open(file, framework="pt", device="cpu") as tensors:
                tensor: torch.Tensor = tensors.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{name} cannot be read from {file}: {error}") from error
        return tensor

    def ends(self, name: str) -> torch.Tensor:
        """[2, ...] the first and the last row of one tensor; one without rows itself."""
        try:
            with safe_open(self._files[name], framework="pt", device="cpu") as tensors:
                rows = tensors.get_slice(name)
                if not rows.get_shape():
                    whole: torch.Tensor = tensors.get_tensor(name)
                    return whole
                return torch.cat([rows[:1], rows[-1:]])
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{name} cannot be read from {self._files[name]}: {error}") from error


def _files_by_name(folder: Path) -> dict[str, Path]:
    if (index := folder / INDEX_FILE).is_file():
        return {name: folder / file for name, file in json.loads(index.read_bytes())["weight_map"].items()}
    single = folder / SINGLE_FILE
    try:
        with safe_open(single, framework="pt", device="cpu") as tensors:
            return dict.fromkeys(tensors.keys(), single)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"the base model in {folder} cannot be loaded, expected {SINGLE_FILE}, or {INDEX_FILE} beside its shards: "
            f"{error}"
        ) from error

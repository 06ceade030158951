"""A checkpoint's tensors as a server exports them, from this process or one of its own."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from grpo.transport.shared_base import HostMemory, ImportedBase, Manifest, aligned, export_base, mapped
from grpo.transport.weights.identity import base_identity
from safetensors.torch import load_file

Change = Callable[[dict[str, torch.Tensor]], object]


def offer_of(folder: Path, change: Change | None = None, **said: Any) -> tuple[Manifest, HostMemory]:
    """The tensors of the checkpoint in `folder`, changed in what they are or what is said of them."""
    tensors = load_file(folder / "model.safetensors")
    if change is not None:
        change(tensors)
    memory = HostMemory(sum(aligned(tensor.nbytes) for tensor in tensors.values()))
    placed = {name: memory.place(tensor) for name, tensor in tensors.items()}
    manifest = Manifest(
        base_model=base_identity(folder),
        device="cpu",
        dtype="float32",
        memories=memory.memories,
        tensors={name: memory.entry(name, tensor) for name, tensor in placed.items()},
        left={},
    )
    return msgspec.structs.replace(manifest, **said), memory


class Imported(ImportedBase):
    """Imported from this process, which can pretend to have ended."""

    lives = True

    @property
    def exporter_lives(self) -> bool:
        return self.lives


def imported(folder: Path, change: Change | None = None, **said: Any) -> Imported:
    """The checkpoint in `folder` as if a server had exported it."""
    manifest, memory = offer_of(folder, change, **said)
    no_connection: Any = None
    return Imported(manifest=manifest, tensors=mapped(manifest, memory.descriptors[0]), connection=no_connection)


def export_forever(folder: Path, output_dir: Path) -> None:
    """Exports the checkpoint in `folder` to trainers of the run in `output_dir`, until it is killed."""
    offer = offer_of(folder)
    export_base(output_dir, "cpu", make=lambda: offer)
    signal.pause()

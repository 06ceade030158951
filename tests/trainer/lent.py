"""A checkpoint's tensors as a server lends them, in this process or in one of its own."""

import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file

from transport.shared_base.base import CPU, Lender, Manifest
from transport.shared_base.door import Link
from transport.shared_base.lending import Borrowed, lend
from transport.shared_base.memory import SharedMemory, aligned, mapped
from transport.weights.identity import base_identity

_LENDERS: list[socket.socket] = []
"""Their ends of connections to this process as borrower: as long as they are open, the lender lives."""
Change = Callable[[dict[str, torch.Tensor]], None]


def offer_of(folder: Path, change: Change | None = None, **said: Any) -> tuple[Manifest, SharedMemory]:
    """The tensors of the checkpoint in `folder`, changed in what they are or what is said of them."""
    tensors = load_file(folder / "model.safetensors")
    if change is not None:
        change(tensors)
    memory = SharedMemory(sum(aligned(tensor.nbytes) for tensor in tensors.values()))
    placed = {name: memory.place(tensor) for name, tensor in tensors.items()}
    manifest = Manifest(
        base_model=base_identity(folder),
        device=CPU,
        dtype="float32",
        memories=memory.memories,
        tensors={name: memory.entry(name, tensor) for name, tensor in placed.items()},
        left={},
    )
    return msgspec.structs.replace(manifest, **said), memory


def lent(folder: Path, change: Change | None = None, **said: Any) -> Borrowed:
    """Borrowed from this process."""
    manifest, memory = offer_of(folder, change, **said)
    ours, theirs = socket.socketpair()
    _LENDERS.append(theirs)
    return Borrowed(manifest=manifest, tensors=mapped(manifest, memory.descriptors), lender=Link(ours))


def lend_forever(folder: Path, output_dir: Path) -> None:
    """Lends the checkpoint in `folder` to trainers of the run in `output_dir`, until it is killed."""
    manifest, memory = offer_of(folder)

    def make() -> tuple[Manifest, Lender]:
        return manifest, memory

    lend(output_dir, CPU, make=make)
    signal.pause()

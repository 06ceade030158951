"""Exporting and importing base weights, whatever the device."""

import hashlib
import os
import socket
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from transport.errors import DeadlineError
from transport.shared_base import cuda, memory
from transport.shared_base.manifest import Manifest, decode
from transport.shared_base.rendezvous import Offer, fetch, is_open, serve

if TYPE_CHECKING:
    import torch

CPU = "cpu"
ASK_AGAIN_S = 0.2
Memory = memory.HostMemory | cuda.CudaMemory


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class ImportedBase:
    """What a trainer computes on. The memory is mapped as long as one of the tensors is held."""

    manifest: Manifest
    tensors: "dict[str, torch.Tensor]"
    """By the checkpoint's names."""
    connection: socket.socket
    """To the exporter."""

    @property
    def exporter_lives(self) -> bool:
        """Whether the server that exports the weights is there. Takes a microsecond."""
        return is_open(self.connection)


def device_key(device: "torch.device") -> str:
    """What names a device on this machine."""
    return CPU if device.type == "cpu" else cuda.uuid_of(device)


def export_base(output_dir: str | Path, device: str, *, make: Callable[[], tuple[Manifest, Memory]]) -> None:
    """Offers base weights to the trainers of the run in `output_dir`, until this process ends.

    `make` returns the manifest and the memory for each of them. Raises `SharedBaseError`.
    """

    def make_offer() -> Offer:
        manifest, exported = make()
        return msgspec.msgpack.encode(manifest), exported.descriptors

    serve(address_of(output_dir, device), make_offer)


def import_base(output_dir: str | Path, device: "torch.device", *, timeout_s: float) -> ImportedBase:
    """The base weights that the server of the run in `output_dir` exports on this device, once it does.

    Raises `DeadlineError`, `CorruptError` and `SharedBaseError`.
    """
    key, deadline_s = device_key(device), time.monotonic() + timeout_s
    while True:
        try:
            return _imported(address_of(output_dir, key), device)
        except OSError as error:  # nobody is there yet, or it has ended meanwhile
            if time.monotonic() >= deadline_s:
                raise DeadlineError(
                    f"waited {timeout_s:g} s for grpo-infer to share its base weights on {key} ({error}); start it on "
                    f"this machine with colocate: true and output_dir: {output_dir}, or see its log"
                ) from error
        time.sleep(ASK_AGAIN_S)


def _imported(address: str, device: "torch.device") -> ImportedBase:
    data, descriptors, connection = fetch(address)
    try:
        manifest = decode(data)
        on_cpu = device.type == "cpu"
        tensors = memory.mapped(manifest, descriptors) if on_cpu else cuda.mapped(manifest, device)
        base = ImportedBase(manifest=manifest, tensors=tensors, connection=connection)
        weakref.finalize(base, connection.close)
        return base
    except Exception as error:
        lives = is_open(connection)
        connection.close()
        if not lives:
            raise ConnectionError(f"the server ended before its weights were mapped: {error}") from error
        raise
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def address_of(output_dir: str | Path, device: str) -> str:
    """Where exporter and importers of a run meet on one machine and one device."""
    path = os.path.realpath(output_dir)
    return f"grpo-base-{hashlib.sha256(f'{device} {path}'.encode()).hexdigest()[:32]}"

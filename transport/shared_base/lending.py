"""Lending and borrowing, whatever the device."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from transport.shared_base import cuda, memory
from transport.shared_base.base import CPU, Lender, Manifest, address_of, manifest_from
from transport.shared_base.door import Door, Offer, ask

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Borrowed:
    """What a borrower has."""

    manifest: Manifest
    tensors: "dict[str, torch.Tensor]"
    """By the checkpoint's names. They are mapped as long as one of them is held."""


def device_key(device: "torch.device") -> str:
    """What names a device on this machine."""
    return CPU if device.type == "cpu" else cuda.uuid_of(device)


def lend(output_dir: str | Path, device: str, *, make: Callable[[], tuple[Manifest, Lender]]) -> Door:
    """Offer base weights to the trainers of the run in `output_dir`, until this process ends.

    `make` gives the manifest and the memory for each of them. Raises `SharedBaseError`.
    """

    def offer() -> Offer:
        manifest, lender = make()
        return manifest.encoded(), lender.descriptors

    return Door(address_of(output_dir, device), offer)


def borrow(output_dir: str | Path, device: "torch.device", *, timeout_s: float) -> Borrowed:
    """The base weights that the server of the run in `output_dir` lends on this device, once it does.

    Raises `DeadlineError`, `CorruptError` and `SharedBaseError`.
    """
    key = device_key(device)
    whom = (
        f"grpo-infer to lend its base weights on {key}; start it on this machine with colocate: true and "
        f"output_dir: {output_dir}, or see its log"
    )
    data, descriptors = ask(address_of(output_dir, key), timeout_s=timeout_s, whom=whom)
    try:
        manifest = manifest_from(data)
        tensors = memory.mapped(manifest, descriptors) if key == CPU else cuda.mapped(manifest, device)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return Borrowed(manifest=manifest, tensors=tensors)

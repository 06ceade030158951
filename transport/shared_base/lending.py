"""Lending and borrowing, whatever the device."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from transport.errors import DeadlineError
from transport.shared_base import cuda, memory
from transport.shared_base.base import CPU, Lender, Manifest, address_of, manifest_from
from transport.shared_base.door import EXCHANGE_S, BrokenOff, Door, Link, Offer, ask

if TYPE_CHECKING:
    import torch

OFFERED_S = 2.0
"""How long a lender that is there has to give its offer to a borrower that goes on meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Borrowed:
    """What a borrower has."""

    manifest: Manifest
    tensors: "dict[str, torch.Tensor]"
    """By the checkpoint's names. They are mapped as long as one of them is held."""
    lender: Link
    """Tells whether the process that lends them has ended."""


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


def borrow(
    output_dir: str | Path, device: "torch.device", *, timeout_s: float, exchange_s: float = EXCHANGE_S
) -> Borrowed:
    """The base weights that the server of the run in `output_dir` lends on this device, once it does; then it has
    `exchange_s` for each part of the offer.

    Raises `DeadlineError`, `CorruptError` and `SharedBaseError`.
    """
    key = device_key(device)
    whom = (
        f"grpo-infer to lend its base weights on {key}; start it on this machine with colocate: true and "
        f"output_dir: {output_dir}, or see its log"
    )
    answer = ask(address_of(output_dir, key), timeout_s=timeout_s, whom=whom, exchange_s=exchange_s)
    try:
        manifest = manifest_from(answer.data)
        tensors = memory.mapped(manifest, answer.descriptors) if key == CPU else cuda.mapped(manifest, device)
    except BaseException as error:
        ended = not answer.link.answers()
        answer.link.close()
        if ended and isinstance(error, Exception):
            raise BrokenOff(f"the lender of the base weights has ended before they were mapped: {error}") from error
        raise
    finally:
        for descriptor in answer.descriptors:
            os.close(descriptor)
    return Borrowed(manifest=manifest, tensors=tensors, lender=answer.link)


def offered(output_dir: str | Path, device: "torch.device") -> Borrowed | None:
    """What `borrow` gives at once; None while nobody lends, where a lender has ended meanwhile, and where one that is
    stopped does not give it within `OFFERED_S`."""
    try:
        return borrow(output_dir, device, timeout_s=0, exchange_s=OFFERED_S)
    except (DeadlineError, BrokenOff):
        return None

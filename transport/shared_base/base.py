"""What is lent: named tensors in memory that two processes map, and the manifest that says where each lies.

The server lends (`Lender`, `lending.lend`), trainers borrow (`lending.borrow`). The memory is a main memory without a
name in any folder (`memory`), or that of a GPU (`cuda`). It goes when the last process that maps it has ended, however
that happens, and leaves nothing behind.
"""

import hashlib
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from transport.errors import CorruptError, SharedBaseError

if TYPE_CHECKING:
    import torch

SCHEMA_VERSION = 1
CPU = "cpu"
NOT_LENT = (
    *(".input_scale", ".input_global_scale", ".activation_scale", ".output_scale"),
    *(".k_scale", ".v_scale", ".q_scale", ".rotary_emb.inv_freq"),
)
"""Ends of the names of tensors that checkpoints may have and no trainer reads."""


class CudaHandle(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What CUDA and torch need to open another process's allocation."""

    handle: bytes
    offset: int
    """Of the storage in its allocation, in bytes."""
    counter: bytes
    counter_offset: int
    event: bytes
    event_needed: bool


class Memory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stretch of memory: a file descriptor that travels beside the manifest, or a handle of CUDA in it."""

    num_bytes: int
    cuda: CudaHandle | None = None


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One contiguous tensor: `Entry(dtype="bfloat16", shape=(352, 128), memory=0, offset=4096)`."""

    dtype: str
    """As torch names it."""
    shape: tuple[int, ...]
    memory: int
    """Its place in the manifest's `memories`."""
    offset: int
    """In bytes, from the memory's begin."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that a borrower must know."""

    schema_version: int = SCHEMA_VERSION
    base_model: str
    """`base_identity` of the model."""
    device: str
    """`cpu`, or the UUID of the GPU."""
    dtype: str
    """Type that the server computes in, and of the plain weights."""
    memories: tuple[Memory, ...]
    tensors: dict[str, Entry]
    """By the checkpoint's names; parts of what the server has fused are entries of their own in the same memory."""
    left: dict[str, str]
    """Tensors that the checkpoint has and the server does not lend, each with the reason."""

    @property
    def num_bytes(self) -> int:
        """Of all tensors; those that overlap count twice."""
        return sum(num_bytes_of(entry) for entry in self.tensors.values())

    def encoded(self) -> bytes:
        """As msgpack."""
        return msgspec.msgpack.encode(self)


def manifest_from(data: bytes) -> Manifest:
    """Raises `CorruptError` for what is no manifest of this schema, and for entries beyond their memory."""
    try:
        manifest = msgspec.msgpack.decode(data, type=Manifest)
    except msgspec.MsgspecError as error:
        raise CorruptError(f"the server offers no manifest of base weights: {error}") from error
    if manifest.schema_version != SCHEMA_VERSION:
        raise CorruptError(f"the offer has schema {manifest.schema_version}, expected {SCHEMA_VERSION}")
    for name, entry in manifest.tensors.items():
        within = 0 <= entry.memory < len(manifest.memories) and entry.offset >= 0 and min(entry.shape, default=0) >= 0
        if not within or entry.offset + num_bytes_of(entry) > manifest.memories[entry.memory].num_bytes:
            raise CorruptError(f"the offer has {name} beyond its memory")
    return manifest


_ITEM_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "uint8": 1,
}


def num_bytes_of(entry: Entry) -> int:
    """Raises `CorruptError` for a type that is not lent."""
    if entry.dtype not in _ITEM_BYTES:
        raise CorruptError(f"the type {entry.dtype} is not lent, expected one of {', '.join(_ITEM_BYTES)}")
    return _ITEM_BYTES[entry.dtype] * math.prod(entry.shape)


def checked(name: str, tensor: "torch.Tensor") -> str:
    """The name of the tensor's type. Raises `SharedBaseError` for what has no plain place in memory."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _ITEM_BYTES:
        raise SharedBaseError(
            f"{name} is of type {dtype}, expected one of {', '.join(_ITEM_BYTES)}; run without colocate"
        )
    if not tensor.is_contiguous():
        raise SharedBaseError(
            f"{name} is laid out anew by the server (shape {list(tensor.shape)}, strides {list(tensor.stride())}), "
            "expected the checkpoint's layout; run without colocate"
        )
    return dtype


class Lender(Protocol):
    """Memory that can be lent."""

    @property
    def memories(self) -> tuple[Memory, ...]:
        """What the entries lie in."""

    @property
    def descriptors(self) -> Sequence[int]:
        """File descriptors that travel beside the manifest, in the order of the memories."""

    def place(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """The same values where borrowers can map them; the caller's tensor itself where it lies there already."""

    def entry(self, name: str, tensor: "torch.Tensor") -> Entry:
        """Where a placed tensor, or a contiguous view of one, lies. Raises `SharedBaseError`."""


def address_of(output_dir: str | Path, device: str) -> str:
    """Where lender and borrower of a run's folder meet on one machine and one device."""
    path = os.path.realpath(output_dir)
    return f"grpo-base-{hashlib.sha256(f'{device} {path}'.encode()).hexdigest()[:32]}"

"""Main memory that is shared: a memfd, which the server maps for writing and importers map read-only.

The kernel enforces that: once the server has its mapping, the file is sealed against every further writable mapping and
against changes of its size. A write through an importer's mapping ends that process with SIGSEGV.
"""

import fcntl
import mmap
import os
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from transport.errors import SharedBaseError
from transport.shared_base.manifest import Entry, Manifest, Memory, shareable_dtype

if TYPE_CHECKING:
    import torch

NAME = "grpo-base"
"""/proc/PID/maps shows the memory as `/memfd:grpo-base (deleted)`."""
ALIGNMENT = 64
"""Of each tensor, in bytes: a cache line."""
_SEAL_FUTURE_WRITE = 0x0010  # linux/fcntl.h; Python 3.11 has no name for it
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE


def aligned(num_bytes: int) -> int:
    """What a tensor of so many bytes takes."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class HostMemory:
    """The server's memory, of a size that is known beforehand."""

    def __init__(self, num_bytes: int) -> None:
        """Raises `SharedBaseError` where the kernel cannot seal it (before Linux 5.1)."""
        descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, num_bytes)
        self._memory = mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        try:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
        except OSError as error:
            raise SharedBaseError(
                f"this kernel cannot make shared memory read-only ({error.strerror}), which Linux does from 5.1 on; "
                "turn colocate off"
            ) from error
        self.memories = (Memory(num_bytes=num_bytes),)
        self.descriptors = (descriptor,)
        self._used = 0
        self._start = _view(self._memory, "uint8", (num_bytes,), 0).data_ptr()

    def place(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """A copy in this memory, behind what was placed before."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        placed = _view(self._memory, dtype, tuple(tensor.shape), self._used)
        self._used += aligned(tensor.nbytes)
        return placed.copy_(tensor)

    def entry(self, name: str, tensor: "torch.Tensor") -> Entry:
        """Where a placed tensor, or a contiguous view of one, lies. Raises `SharedBaseError`."""
        dtype, offset = shareable_dtype(name, tensor), tensor.data_ptr() - self._start
        if not 0 <= offset <= self.memories[0].num_bytes - tensor.nbytes:
            raise SharedBaseError(f"{name} does not lie in the shared memory")
        return Entry(dtype=dtype, shape=tuple(tensor.shape), memory=0, offset=offset)


def mapped(manifest: Manifest, descriptors: Sequence[int]) -> "dict[str, torch.Tensor]":
    """An importer's read-only tensors. Raises `SharedBaseError` for memory whose size could change."""
    memories = []
    for memory, descriptor in zip(manifest.memories, descriptors, strict=True):
        size = os.fstat(descriptor).st_size
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS or size != memory.num_bytes:
            raise SharedBaseError(f"the server offers {size} bytes, expected {memory.num_bytes} that are sealed")
        memories.append(mmap.mmap(descriptor, memory.num_bytes, mmap.MAP_SHARED, mmap.PROT_READ))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
        return {name: _view(memories[e.memory], e.dtype, e.shape, e.offset) for name, e in manifest.tensors.items()}


def _view(memory: mmap.mmap, dtype: str, shape: tuple[int, ...], offset: int) -> "torch.Tensor":
    """A tensor whose storage has the tensor's own size, so that copying or saving it takes no more."""
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    if (count := torch.Size(shape).numel()) == 0:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(memory, dtype=kind, count=count, offset=offset).view(shape)

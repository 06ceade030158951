"""Main memory that is lent: a file without a name (memfd), mapped by the server for writing and by borrowers to read.

The kernel holds borrowers to reading: once the server has its mapping, the file is sealed against every further
writable mapping and write, and against changes of its size. A write through a borrower's mapping ends that process with
SIGSEGV.
"""

import fcntl
import mmap
import os
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from transport.errors import SharedBaseError
from transport.shared_base.base import Entry, Manifest, Memory, checked

if TYPE_CHECKING:
    import torch

NAME = "grpo-base"
"""By which /proc/PID/maps shows it: `/memfd:grpo-base (deleted)`."""
ALIGNMENT = 64
"""Of each tensor, in bytes: a line of the cache, and what vector instructions read at once."""
_SEAL_FUTURE_WRITE = 0x0010  # linux/fcntl.h; Python 3.11 has no name for it
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE


def aligned(num_bytes: int) -> int:
    """What a tensor of so many bytes takes."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class SharedMemory:
    """A lender's memory, of a size that is known before. See `Lender`."""

    def __init__(self, num_bytes: int) -> None:
        self._descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._descriptor, num_bytes)
        self._memory = mmap.mmap(self._descriptor, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
        except OSError as error:
            raise SharedBaseError(
                f"this kernel cannot keep borrowers from writing ({error.strerror}), which Linux does from 5.1 on; run "
                "without colocate"
            ) from error
        self._num_bytes, self._used = num_bytes, 0
        self._begin = _tensor(self._memory, "uint8", (num_bytes,), 0).data_ptr()

    @property
    def memories(self) -> tuple[Memory, ...]:
        """The one."""
        return (Memory(num_bytes=self._num_bytes),)

    @property
    def descriptors(self) -> Sequence[int]:
        """Of the one."""
        return (self._descriptor,)

    def place(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """A copy in this memory."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        placed = _tensor(self._memory, dtype, tuple(tensor.shape), self._used)
        self._used += aligned(tensor.nbytes)
        return placed.copy_(tensor)

    def entry(self, name: str, tensor: "torch.Tensor") -> Entry:
        """Raises `SharedBaseError` for a tensor that is not in this memory, or not contiguous."""
        dtype, offset = checked(name, tensor), tensor.data_ptr() - self._begin
        if not 0 <= offset <= self._num_bytes - tensor.nbytes:
            raise SharedBaseError(f"{name} does not lie in the memory that is lent")
        return Entry(dtype=dtype, shape=tuple(tensor.shape), memory=0, offset=offset)


def mapped(manifest: Manifest, descriptors: Sequence[int]) -> "dict[str, torch.Tensor]":
    """A borrower's tensors, which can only be read. Raises `SharedBaseError` for memory that could change its size."""
    memories = []
    for memory, descriptor in zip(manifest.memories, descriptors, strict=True):
        size = os.fstat(descriptor).st_size
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS or size != memory.num_bytes:
            raise SharedBaseError(f"{size} bytes are offered, expected {memory.num_bytes} that are sealed")
        memories.append(mmap.mmap(descriptor, memory.num_bytes, mmap.MAP_SHARED, mmap.PROT_READ))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
        return {name: _tensor(memories[e.memory], e.dtype, e.shape, e.offset) for name, e in manifest.tensors.items()}


def _tensor(memory: mmap.mmap, dtype: str, shape: tuple[int, ...], offset: int) -> "torch.Tensor":
    """With a storage of its own size, so that copying or saving it takes no more than the tensor."""
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    if (count := torch.Size(shape).numel()) == 0:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(memory, dtype=kind, count=count, offset=offset).view(shape)

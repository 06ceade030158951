"""A GPU's memory that is lent, by CUDA IPC: two processes on one GPU see the same allocation.

NOT YET RUN ON A GPU: what is tested is which handle goes where, with a stand-in for torch's storages.

CUDA maps for reading and writing alike, so nothing but the trainer's own code keeps it from writing here. Processes may
number GPUs differently, so that a GPU is named by its UUID. vLLM's sleep mode and torch's expandable segments allocate
what CUDA cannot lend.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from transport.errors import SharedBaseError
from transport.shared_base.base import CudaHandle, Entry, Manifest, Memory, checked

if TYPE_CHECKING:
    import torch


def uuid_of(device: "torch.device") -> str:
    """The GPU's own name, the same in every process."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)


class CudaMemory:
    """A lender's tensors, which stay where they lie. See `Lender`."""

    def __init__(self) -> None:
        self._memories: list[Memory] = []
        self._by_storage: dict[int, int] = {}

    @property
    def memories(self) -> tuple[Memory, ...]:
        """The storages of the tensors that have an entry."""
        return tuple(self._memories)

    @property
    def descriptors(self) -> Sequence[int]:
        """None: CUDA's handles are in the memories."""
        return ()

    def place(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """The tensor itself."""
        return tensor

    def entry(self, name: str, tensor: "torch.Tensor") -> Entry:
        """Raises `SharedBaseError` for a tensor that is not contiguous, or cannot be lent."""
        dtype, storage = checked(name, tensor), tensor.untyped_storage()
        if (memory := self._by_storage.get(storage.data_ptr())) is None:
            memory = self._by_storage[storage.data_ptr()] = len(self._memories)
            self._memories.append(_lent(name, storage))
        offset = int(tensor.storage_offset()) * tensor.element_size()
        return Entry(dtype=dtype, shape=tuple(tensor.shape), memory=memory, offset=offset)


def _lent(name: str, storage: Any) -> Memory:
    try:
        _, handle, size, offset, counter, counter_offset, event, event_needed = storage._share_cuda_()
    except RuntimeError as error:
        raise SharedBaseError(f"{name} cannot be lent by CUDA IPC: {error}; run without colocate") from error
    cuda = CudaHandle(
        handle=handle,
        offset=offset,
        counter=counter,
        counter_offset=counter_offset,
        event=event,
        event_needed=event_needed,
    )
    return Memory(num_bytes=size, cuda=cuda)


def mapped(manifest: Manifest, device: "torch.device") -> "dict[str, torch.Tensor]":
    """A borrower's tensors on its `device`, which must be the lender's. Raises `SharedBaseError`."""
    import torch

    if (own := uuid_of(device)) != manifest.device:
        raise SharedBaseError(f"the base weights are on the GPU {manifest.device}, and the trainer's is {own}")
    storages = [_opened(memory, device) for memory in manifest.memories]
    tensors = {}
    for name, entry in manifest.tensors.items():
        kind: torch.dtype = getattr(torch, entry.dtype)
        size = torch.Size(entry.shape)
        empty = torch.empty(0, dtype=kind, device=device)
        strides = torch.empty(size, device="meta").stride()
        tensors[name] = empty.set_(storages[entry.memory], entry.offset // kind.itemsize, size, strides)
    return tensors


def _opened(memory: Memory, device: "torch.device") -> Any:
    import torch

    if memory.cuda is None:
        raise SharedBaseError("the offer has main memory, and the trainer is on a GPU; set device for both programs")
    cuda = memory.cuda
    torch.cuda._lazy_init()
    return torch.UntypedStorage._new_shared_cuda(
        device.index or 0,
        cuda.handle,
        memory.num_bytes,
        cuda.offset,
        cuda.counter,
        cuda.counter_offset,
        cuda.event,
        cuda.event_needed,
    )

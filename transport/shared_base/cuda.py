"""A GPU's memory that is shared by CUDA IPC: two processes on one GPU see the same allocation.

Not yet run on a GPU: the tests check which handle goes where, with a stand-in for torch's storages.

CUDA maps for reading and writing alike, so that nothing but the trainer's own code keeps it from writing. Processes may
number GPUs differently, so a GPU is named by its UUID. CUDA cannot share what vLLM's sleep mode or torch's expandable
segments allocate.
"""

from typing import TYPE_CHECKING, Any

from transport.errors import SharedBaseError
from transport.shared_base.manifest import Entry, Manifest, Memory, shareable_dtype

if TYPE_CHECKING:
    import torch


def uuid_of(device: "torch.device") -> str:
    """The GPU's own name, the same in every process."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)


class CudaMemory:
    """The server's tensors, which stay where they lie. Each importer needs one of its own, with its own handles."""

    descriptors: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._memories: list[Memory] = []
        self._index_of: dict[int, int] = {}

    @property
    def memories(self) -> tuple[Memory, ...]:
        """The storages of the tensors that have an entry."""
        return tuple(self._memories)

    def entry(self, name: str, tensor: "torch.Tensor") -> Entry:
        """Where a tensor lies. Raises `SharedBaseError` for one that is not contiguous or cannot be shared."""
        dtype, storage = shareable_dtype(name, tensor), tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self._index_of:
            self._index_of[address] = len(self._memories)
            self._memories.append(_exported(name, storage))
        offset = int(tensor.storage_offset()) * tensor.element_size()
        return Entry(dtype=dtype, shape=tuple(tensor.shape), memory=self._index_of[address], offset=offset)


def _exported(name: str, storage: Any) -> Memory:
    try:
        _, handle, size, *rest = storage._share_cuda_()
    except RuntimeError as error:
        raise SharedBaseError(f"{name} cannot be shared by CUDA IPC: {error}; turn colocate off") from error
    return Memory(num_bytes=size, cuda=(handle, *rest))


def mapped(manifest: Manifest, device: "torch.device") -> "dict[str, torch.Tensor]":
    """An importer's tensors on its `device`, which must be the exporter's. Raises `SharedBaseError`."""
    import torch

    if (own := uuid_of(device)) != manifest.device:
        raise SharedBaseError(f"the base weights are on the GPU {manifest.device}, and the trainer's is {own}")
    storages = [_opened(memory, device) for memory in manifest.memories]
    tensors = {}
    for name, entry in manifest.tensors.items():
        kind: torch.dtype = getattr(torch, entry.dtype)
        strides = torch.empty(entry.shape, device="meta").stride()
        empty = torch.empty(0, dtype=kind, device=device)
        tensors[name] = empty.set_(storages[entry.memory], entry.offset // kind.itemsize, entry.shape, strides)
    return tensors


def _opened(memory: Memory, device: "torch.device") -> Any:
    import torch

    if memory.cuda is None:
        raise SharedBaseError("the server offers main memory, and the trainer is on a GPU; set device for both")
    torch.cuda._lazy_init()
    handle, *rest = memory.cuda
    return torch.UntypedStorage._new_shared_cuda(device.index or 0, handle, memory.num_bytes, *rest)

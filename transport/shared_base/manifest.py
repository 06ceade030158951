"""The manifest of exported weights: named tensors, and the stretches of memory in which each lies."""

import math
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from transport.errors import CorruptError, SharedBaseError
from transport.records import Natural, Record, require

if TYPE_CHECKING:
    import torch

SCHEMA_VERSION = 1
NOT_SHARED = (
    *(".input_scale", ".input_global_scale", ".activation_scale", ".output_scale"),
    *(".k_scale", ".v_scale", ".q_scale", ".rotary_emb.inv_freq"),
)
"""Ends of the names of tensors that checkpoints may have and no trainer reads."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "uint8": 1}
"""By the types that can be shared, as torch names them."""


CudaHandle = tuple[bytes, int, bytes, int, bytes, bool]
"""What `UntypedStorage._share_cuda_` gives besides device and size, in its order: handle, offset of the storage in its
allocation, reference counter and its offset, event, whether that is needed."""


class Memory(Record, frozen=True, kw_only=True):
    """One stretch of memory: a file descriptor that travels beside the manifest, or a handle of CUDA."""

    num_bytes: int
    cuda: CudaHandle | None = None


class Entry(Record, frozen=True, kw_only=True):
    """One contiguous tensor: `Entry(dtype="bfloat16", shape=(352, 128), memory=0, offset=4096)`."""

    dtype: Literal["float32", "bfloat16", "float16", "float8_e4m3fn", "uint8"]
    """As torch names it."""
    shape: tuple[Natural, ...]
    memory: Natural
    """Index into the manifest's `memories`."""
    offset: Natural
    """In bytes, from the memory's start."""

    @property
    def num_bytes(self) -> int:
        """Size of its values."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


class Manifest(Record, frozen=True, kw_only=True):
    """Everything that an importer must know."""

    schema_version: int = SCHEMA_VERSION
    base_model: str
    """`base_identity` of the model."""
    device: str
    """`cpu`, or the UUID of the GPU."""
    dtype: str
    """Type that the server computes in, and of the plain weights."""
    memories: tuple[Memory, ...]
    tensors: dict[str, Entry]
    """By the checkpoint's names; parts of what the server has fused have entries of their own in the same memory."""
    left: dict[str, str]
    """Tensors of the checkpoint that are not shared, each with the reason."""

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(entry.num_bytes for entry in self.tensors.values())


def decode(data: bytes) -> Manifest:
    """Raises `CorruptError` for what is no manifest of this schema, and for entries beyond their memory."""
    try:
        manifest = msgspec.msgpack.decode(data, type=Manifest)
    except msgspec.MsgspecError as error:
        raise CorruptError(f"the server offers no manifest of base weights: {error}") from error
    require(manifest.schema_version == SCHEMA_VERSION, f"the manifest has another schema than {SCHEMA_VERSION}")
    for name, entry in manifest.tensors.items():
        size = manifest.memories[entry.memory].num_bytes if entry.memory < len(manifest.memories) else -1
        require(entry.offset + entry.num_bytes <= size, f"the manifest has {name} beyond its memory")
    return manifest


def shareable_dtype(name: str, tensor: "torch.Tensor") -> Any:
    """The name of the tensor's type. Raises `SharedBaseError` for a tensor that cannot be described by an `Entry`."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ITEM_BYTES:
        raise SharedBaseError(f"{name} is of type {dtype}, expected one of {', '.join(ITEM_BYTES)}; turn colocate off")
    if not tensor.is_contiguous():
        raise SharedBaseError(
            f"{name} is not laid out as in the checkpoint (shape {list(tensor.shape)}, strides "
            f"{list(tensor.stride())}); turn colocate off"
        )
    return dtype

"""One copy of the base weights for a server, which exports them, and trainers, which import them, on one device.

In main memory they lie in a memfd, which importers map read-only: a write there ends them with SIGSEGV. On a GPU both
map the same allocations by CUDA IPC, where nothing but the trainer's own code keeps it from writing; processes may
number GPUs differently, so a GPU is named by its UUID. Not yet run on a GPU: tests check which handle goes where.

The two meet at an abstract Unix socket, which ends with its process and leaves nothing behind; each asks the kernel who
the other is and deals only with its own user. The connection stays open as long as both live, so that its end tells an
importer that its exporter has ended. The memory goes with the last process that maps it, however that ends.
"""

import contextlib
import hashlib
import logging
import math
import mmap
import os
import socket
import struct
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from grpo.transport.errors import CorruptError, DeadlineError, SharedBaseError
from grpo.transport.records import Natural, Record, require

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
NAME = "grpo-base"
"""/proc/PID/maps shows the memory as `/memfd:grpo-base (deleted)`."""
ALIGNMENT = 64
"""Alignment of each tensor in main memory, in bytes: a cache line."""
EXCHANGE_S = 30.0
"""Deadline of one exchange, once two processes have met."""
ASK_AGAIN_S = 0.2
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "uint8": 1}
"""Bytes of a number, by the types that can be shared, as torch names them."""
_LENGTH, _PEER = struct.Struct("<Q"), struct.Struct("3i")

# --- the manifest -----------------------------------------------------------------------------------------------------


class Memory(Record, frozen=True, kw_only=True):
    """One stretch of memory: the file descriptor that travels beside the manifest, or a handle of CUDA."""

    num_bytes: int
    cuda: tuple[bytes, int, bytes, int, bytes, bool] | None = None
    """The results of `UntypedStorage._share_cuda_` besides device and size, in its order."""


class Entry(Record, frozen=True, kw_only=True):
    """One contiguous tensor: `Entry(dtype="bfloat16", shape=(352, 128), memory=0, offset=4096)`."""

    dtype: Literal["float32", "bfloat16", "float16", "float8_e4m3fn", "uint8"]
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
    """Tensors by the checkpoint's names; parts of a fused tensor have entries of their own in the same memory."""
    left: dict[str, str]
    """Tensors of the checkpoint that are not shared, each with the reason."""

    @property
    def num_bytes(self) -> int:
        """Size of all tensors' values."""
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


def _shareable_dtype(name: str, tensor: "torch.Tensor") -> Any:
    """The name of the tensor's type. Raises `SharedBaseError` for a tensor that no `Entry` describes."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ITEM_BYTES or not tensor.is_contiguous():
        raise SharedBaseError(
            f"{name} is of type {dtype}, shape {list(tensor.shape)} and strides {list(tensor.stride())}, expected a "
            f"contiguous tensor of one of {', '.join(ITEM_BYTES)}; turn colocate off"
        )
    return dtype


# --- main memory ------------------------------------------------------------------------------------------------------


class HostMemory:
    """The server's memory, of a size that is known beforehand."""

    def __init__(self, num_bytes: int) -> None:
        self.descriptors = (os.memfd_create(NAME, os.MFD_CLOEXEC),)
        os.ftruncate(self.descriptors[0], num_bytes)
        self.memories = (Memory(num_bytes=num_bytes),)
        self._memory = mmap.mmap(self.descriptors[0], num_bytes)
        self._used = 0
        self._start = _view(self._memory, "uint8", (num_bytes,), 0).data_ptr()

    def place(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """Returns a copy in this memory, behind what was placed before."""
        placed = _view(self._memory, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), self._used)
        self._used += aligned(tensor.nbytes)
        return placed.copy_(tensor)

    def entry(self, name: str, tensor: "torch.Tensor") -> Entry:
        """Returns where a placed tensor, or a contiguous view of one, lies. Raises `SharedBaseError`."""
        dtype, offset = _shareable_dtype(name, tensor), tensor.data_ptr() - self._start
        if not 0 <= offset <= self.memories[0].num_bytes - tensor.nbytes:
            raise SharedBaseError(f"{name} does not lie in the shared memory")
        return Entry(dtype=dtype, shape=tuple(tensor.shape), memory=0, offset=offset)


def aligned(num_bytes: int) -> int:
    """Returns what a tensor of so many bytes takes of `HostMemory`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def mapped(manifest: Manifest, descriptor: int) -> "dict[str, torch.Tensor]":
    """An importer's read-only tensors."""
    size, num_bytes = os.fstat(descriptor).st_size, manifest.memories[0].num_bytes
    require(size == num_bytes, f"the server offers {size} bytes, expected {num_bytes}")
    memory = mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
        return {name: _view(memory, e.dtype, e.shape, e.offset) for name, e in manifest.tensors.items()}


def _view(memory: mmap.mmap, dtype: str, shape: tuple[int, ...], offset: int) -> "torch.Tensor":
    """A tensor whose storage has the tensor's own size, so that copying or saving it takes no more."""
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    if (count := torch.Size(shape).numel()) == 0:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(memory, dtype=kind, count=count, offset=offset).view(shape)


# --- a GPU's memory ---------------------------------------------------------------------------------------------------


class CudaMemory:
    """The server's tensors, which stay where they lie. Each importer needs one of its own, with its own handles. CUDA
    cannot share what vLLM's sleep mode or torch's expandable segments allocate."""

    descriptors: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._memories: dict[int, Memory] = {}
        """Storages by address."""

    @property
    def memories(self) -> tuple[Memory, ...]:
        """The storages of the tensors that have an entry."""
        return tuple(self._memories.values())

    def entry(self, name: str, tensor: "torch.Tensor") -> Entry:
        """Returns where a tensor lies. Raises `SharedBaseError` for one that is not contiguous or cannot be shared."""
        dtype, storage = _shareable_dtype(name, tensor), tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self._memories:
            try:
                _, handle, size, *rest = storage._share_cuda_()
            except RuntimeError as error:
                raise SharedBaseError(f"{name} cannot be shared by CUDA IPC: {error}; turn colocate off") from error
            self._memories[address] = Memory(num_bytes=size, cuda=(handle, *rest))
        offset = int(tensor.storage_offset()) * tensor.element_size()
        return Entry(dtype=dtype, shape=tuple(tensor.shape), memory=[*self._memories].index(address), offset=offset)


def _mapped_cuda(manifest: Manifest, device: "torch.device") -> "dict[str, torch.Tensor]":
    """An importer's tensors on its `device`, which is the exporter's."""
    import torch

    torch.cuda._lazy_init()
    storages: list[Any] = []
    for memory in manifest.memories:
        if memory.cuda is None:
            raise SharedBaseError("the server offers main memory, and the trainer is on a GPU; set device for both")
        handle, *rest = memory.cuda
        storages.append(torch.UntypedStorage._new_shared_cuda(device.index or 0, handle, memory.num_bytes, *rest))
    tensors = {}
    for name, entry in manifest.tensors.items():
        kind: torch.dtype = getattr(torch, entry.dtype)
        strides, empty = torch.empty(entry.shape, device="meta").stride(), torch.empty(0, dtype=kind, device=device)
        tensors[name] = empty.set_(storages[entry.memory], entry.offset // kind.itemsize, entry.shape, strides)
    return tensors


def device_key(device: "torch.device") -> str:
    """Returns what names a device on this machine in every process: `cpu`, or the GPU's UUID."""
    import torch

    return "cpu" if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)


# --- exporting --------------------------------------------------------------------------------------------------------


def export_base(
    output_dir: str | Path, device: str, *, make: Callable[[], tuple[Manifest, HostMemory | CudaMemory]]
) -> None:
    """Starts a thread that offers base weights to the trainers of the run in `output_dir` until this process ends.

    `make` returns the manifest and the memory for each of them. Raises `SharedBaseError` where another process offers
    them.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_address_of(output_dir, device))
    except OSError as error:
        listener.close()
        raise SharedBaseError(
            f"another process shares base weights for this output_dir and device ({error.strerror}); end it, or give "
            "another output_dir"
        ) from None
    listener.listen()
    threading.Thread(target=_serve, args=(listener, make), name="export-base-weights", daemon=True).start()


def _serve(listener: socket.socket, make: Callable[[], tuple[Manifest, HostMemory | CudaMemory]]) -> None:
    """The loop that serves importers one after the other, and holds their connections. Waits for connections; ends with
    the process."""
    while True:
        connection, _ = listener.accept()
        try:
            connection.settimeout(EXCHANGE_S)
            _check_user(connection)
            manifest, exported = make()
            data = msgspec.msgpack.encode(manifest)
            socket.send_fds(connection, [_LENGTH.pack(len(data))], exported.descriptors)
            connection.sendall(data)
        except Exception as error:  # whatever went wrong, the next importer is another
            connection.close()
            log.warning("an importer of the base weights got none: %s: %s", type(error).__name__, error)
        else:
            threading.Thread(target=_hold, args=(connection,), name="importer", daemon=True).start()


def _hold(connection: socket.socket) -> None:
    """Keeps a connection open until its importer ends."""
    connection.settimeout(None)
    with connection, contextlib.suppress(OSError):
        connection.recv(1)


def _address_of(output_dir: str | Path, device: str) -> str:
    """Where exporter and importers of a run meet on one machine and one device."""
    digest = hashlib.sha256(f"{device} {os.path.realpath(output_dir)}".encode()).hexdigest()
    return f"\0{NAME}-{digest[:32]}"


def _check_user(connection: socket.socket) -> None:
    process, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if user != os.getuid():
        raise SharedBaseError(f"process {process} of user {user} is at the other end, expected user {os.getuid()}")


# --- importing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class ImportedBase:
    """The base weights that a trainer computes on. The memory is mapped as long as one of the tensors is held."""

    manifest: Manifest
    tensors: "Mapping[str, torch.Tensor]"
    """Tensors by the checkpoint's names."""
    connection: socket.socket
    """To the exporter."""

    @property
    def exporter_lives(self) -> bool:
        """Whether the server that exports the weights is there. Takes a microsecond."""
        try:
            return self.connection.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False


def import_base(output_dir: str | Path, device: "torch.device", *, timeout_s: float) -> ImportedBase:
    """Returns the base weights that the server of the run in `output_dir` exports on this device, once it does.

    Raises `DeadlineError`, `CorruptError` and `SharedBaseError`.
    """
    key, deadline_s = device_key(device), time.monotonic() + timeout_s
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            base = _imported(connection, _address_of(output_dir, key), device)
            weakref.finalize(base, connection.close)
            return base
        except OSError as error:  # nobody is there yet, or it has ended meanwhile
            connection.close()
            if time.monotonic() >= deadline_s:
                raise DeadlineError(
                    f"waited {timeout_s:g} s for grpo-infer to share its base weights on {key} ({error}); start it on "
                    f"this machine with colocate: true and output_dir: {output_dir}, or see its log"
                ) from error
        except BaseException:
            connection.close()
            raise
        time.sleep(ASK_AGAIN_S)


def _imported(connection: socket.socket, address: str, device: "torch.device") -> ImportedBase:
    """Raises OSError where nobody is there or the exporter ends meanwhile."""
    connection.settimeout(EXCHANGE_S)
    connection.connect(address)
    _check_user(connection)
    length, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, 1)
    try:
        num_bytes = _LENGTH.unpack(length)[0] if len(length) == _LENGTH.size else 0
        with connection.makefile("rb") as file:
            data = file.read(num_bytes)
        if not data or len(data) < num_bytes:
            raise ConnectionError("the server closed the connection without an offer; see its log")
        manifest = decode(data)
        tensors = mapped(manifest, descriptors[0]) if device.type == "cpu" else _mapped_cuda(manifest, device)
        connection.setblocking(False)
        return ImportedBase(manifest=manifest, tensors=tensors, connection=connection)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)

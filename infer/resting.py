"""The memory of the KV cache, given back while the server rests. Runs in the engine process.

On a CPU the pages go back to the system while the tensors stay, and are there again, as zeros, as soon as they are
written. On a GPU the cache lies in the pool of vLLM's sleep mode, which unmaps it and maps it again at its old
addresses. Not yet run on a GPU.

What the cache held is gone either way, so vLLM's prefix cache has to be emptied before.

The module imports no vLLM.
"""

import contextlib
import ctypes
import inspect
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from infer.lend import trim_heap


class Cache(Protocol):
    """The KV cache of one worker."""

    @property
    def num_bytes(self) -> int:
        """Its size."""

    def give_back(self) -> int:
        """The bytes that others can have now."""

    def take_back(self) -> None:
        """Without effect where nothing is missing. Raises MemoryError."""


def cache_of(worker: Any) -> Cache:
    """That of a worker of vLLM, on a CPU or a GPU. Raises TypeError where it cannot be given back."""
    storages = kv_storages(worker)
    if not storages:
        raise TypeError("this vLLM's worker has no KV cache that is known; use one of 0.24 to 0.32")
    if worker.device.type == "cpu":
        return HostCache(storages)
    allocates = inspect.signature(worker.model_runner.initialize_kv_cache).parameters
    if not hasattr(worker, "discard") or "kv_cache_allocation_context" not in allocates:
        raise TypeError("this vLLM cannot discard the KV cache alone on a GPU; use 0.32, or no sleep_mode")
    return DeviceCache(worker, storages, lambda: torch.cuda.mem_get_info(worker.device)[0])


def kv_storages(worker: Any) -> list[torch.UntypedStorage]:
    """What the worker's KV caches lie in, each once: layers may have views of the same."""
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    held = [worker.model_runner.kv_caches, *(getattr(layer, "kv_cache", ()) for layer in layers)]
    storages = (tensor.untyped_storage() for tensor in _tensors(held))
    return list({storage.data_ptr(): storage for storage in storages if storage.nbytes()}.values())


def _tensors(held: Any) -> Iterator[torch.Tensor]:
    """All in a tensor or in lists of them, of any depth."""
    if isinstance(held, torch.Tensor):
        yield held
    elif isinstance(held, Iterable):
        for one in held:
            yield from _tensors(one)


@dataclass(frozen=True, slots=True)
class HostCache:
    """In main memory."""

    storages: list[torch.UntypedStorage]

    @property
    def num_bytes(self) -> int:
        """Of all of them."""
        return sum(storage.nbytes() for storage in self.storages)

    def give_back(self) -> int:
        """Whole pages, and what the C library has kept of freed memory; measured."""
        before = _resident_bytes()
        for storage in self.storages:
            _drop_pages(storage.data_ptr(), storage.nbytes())
        trim_heap()
        return max(0, before - _resident_bytes())

    def take_back(self) -> None:
        """The system gives each page again at the first touch."""


def _drop_pages(address: int, num_bytes: int) -> None:
    """Those that lie whole in the range; they read as zeros from then on. Raises OSError."""
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end <= first:
        return
    system = ctypes.CDLL(None, use_errno=True)
    if system.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED):
        number = ctypes.get_errno()
        raise OSError(number, f"madvise of {end - first} bytes: {os.strerror(number)}")


def _resident_bytes() -> int:
    """Of this process, exactly; the cheaper figures in /proc lag behind."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss:"))


@dataclass(slots=True)
class DeviceCache:
    """On a GPU, in the pool of vLLM's sleep mode."""

    worker: Any
    storages: list[torch.UntypedStorage]
    free_bytes: Callable[[], int]
    """Of the GPU."""
    _given: bool = False
    """Whether anything may be missing. What is not must not be overwritten."""

    @property
    def num_bytes(self) -> int:
        """Of all of them."""
        return sum(storage.nbytes() for storage in self.storages)

    def give_back(self) -> int:
        """The cache, and what torch has kept of freed memory."""
        kept = torch.cuda.memory_reserved()
        torch.cuda.empty_cache()
        kept -= torch.cuda.memory_reserved()
        self._given = True
        self.worker.discard(("kv_cache",))
        return self.num_bytes + kept

    def take_back(self) -> None:
        """At the old addresses, which captured CUDA graphs have in them, and as zeros."""
        if not self._given:
            return
        try:
            self.worker.wake_up(["kv_cache"])
        except RuntimeError as error:
            raise MemoryError(
                f"the KV cache needs {self.num_bytes} bytes and {self.free_bytes()} of the GPU are free; another "
                f"program, most likely the trainer, has not given its memory back yet ({error})"
            ) from error
        for storage in self.storages:
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()
        self._given = False


class OnlyCache:
    """Before vLLM's worker for GPUs among the bases of a class: nothing but the KV cache goes into the pool.

    vLLM would put the weights there too. But a trainer that borrows them (`colocate`) could not map what comes from
    this pool, and nothing else is given back while the server rests.
    """

    def _maybe_get_memory_pool_context(self, tag: str) -> Any:
        """vLLM's context for what is allocated under a tag: `weights`, `kv_cache`, `runtime`, …"""
        if tag != "kv_cache":
            return contextlib.nullcontext()
        return super()._maybe_get_memory_pool_context(tag)  # type: ignore[misc]

"""Which of CUDA's handles goes where, with stand-ins for a GPU's storages; opening them is tests/gpu's."""

from typing import Any

import msgspec
import pytest
import torch

from transport.errors import SharedBaseError
from transport.shared_base.cuda import CudaMemory
from transport.shared_base.manifest import Manifest, Memory, decode


class FakeStorage:
    """Of a GPU at this address; each time it is shared it has a counter of its own, as torch's have."""

    def __init__(self, address: int, num_bytes: int, *, can_be_shared: bool = True) -> None:
        self._address, self._num_bytes, self._can_be_shared = address, num_bytes, can_be_shared
        self.num_shared = 0

    def data_ptr(self) -> int:
        return self._address

    def _share_cuda_(self) -> tuple[Any, ...]:
        if not self._can_be_shared:
            raise RuntimeError("cudaErrorInvalidValue")
        self.num_shared += 1
        return 0, b"handle%d" % self._address, self._num_bytes, 512, b"c", self.num_shared, b"event", True


class FakeTensor:
    """A float16 view of a storage from element `offset` on."""

    dtype = torch.float16

    def __init__(self, storage: FakeStorage, shape: tuple[int, ...], *, offset: int = 0, flipped: bool = False) -> None:
        self._storage, self.shape, self._offset, self._flipped = storage, shape, offset, flipped

    def untyped_storage(self) -> FakeStorage:
        return self._storage

    def storage_offset(self) -> int:
        return self._offset

    def element_size(self) -> int:
        return 2

    def is_contiguous(self) -> bool:
        return not self._flipped

    def stride(self) -> tuple[int, ...]:
        return (1, self.shape[0])


def test_parts_of_one_allocation_share_its_handle_and_have_their_own_offsets() -> None:
    exporter: Any = CudaMemory()
    fused, other = FakeStorage(1, 80), FakeStorage(2, 16)
    tensors = {
        "q": exporter.entry("q", FakeTensor(fused, (4, 5))),
        "k": exporter.entry("k", FakeTensor(fused, (2, 5), offset=20)),
        "o": exporter.entry("o", FakeTensor(other, (8,))),
    }
    assert [(entry.memory, entry.offset) for entry in tensors.values()] == [(0, 0), (0, 40), (1, 0)]
    assert fused.num_shared == 1
    assert exporter.memories[0] == Memory(num_bytes=80, cuda=(b"handle1", 512, b"c", 1, b"event", True))
    assert not exporter.descriptors
    manifest = Manifest(
        base_model="m", device="GPU-1", dtype="float16", memories=exporter.memories, tensors=tensors, left={}
    )
    assert decode(msgspec.msgpack.encode(manifest)) == manifest


def test_each_importer_has_handles_of_his_own() -> None:
    storage: Any = FakeStorage(1, 16)
    for counter in (1, 2):
        exporter: Any = CudaMemory()
        exporter.entry("o", FakeTensor(storage, (8,)))
        assert exporter.memories[0].cuda[3] == counter


def test_what_cannot_be_shared_is_named() -> None:
    exporter: Any = CudaMemory()
    with pytest.raises(SharedBaseError, match="cudaErrorInvalidValue"):
        exporter.entry("o", FakeTensor(FakeStorage(1, 16, can_be_shared=False), (8,)))
    with pytest.raises(SharedBaseError):
        exporter.entry("o", FakeTensor(FakeStorage(1, 16), (2, 4), flipped=True))

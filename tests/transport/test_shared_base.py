"""Tensors that two processes map: complete, read-only in main memory, and gone with their last process. Which of CUDA's
handles goes where is seen with a stand-in for a GPU's storages; opening them is tests/gpu's."""

import contextlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from grpo.transport import shared_base
from grpo.transport.errors import CorruptError, DeadlineError, SharedBaseError
from grpo.transport.shared_base import NAME, CudaMemory, Entry, HostMemory, Memory, decode, export_base, import_base

from tests.support import until
from tests.transport.shared_base_child import FUSED, HALF, exported

ROOT = Path(__file__).parents[2]
DEVICE = torch.device("cpu")


@contextlib.contextmanager
def child(what: str, output_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """A process of `shared_base_child.py`, ready."""
    command = [sys.executable, "-m", "tests.transport.shared_base_child", what, str(output_dir)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
    with process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def said_sum(process: subprocess.Popen[str]) -> float:
    assert process.stdin
    assert process.stdout
    process.stdin.write("sum\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def test_an_importer_has_the_exporters_values_and_nothing_is_copied(tmp_path: Path) -> None:
    manifest, memory, own = exported()
    offers = iter([None, (manifest, memory)])

    def make() -> Any:
        if (offer := next(offers)) is None:
            raise RuntimeError("an offer that cannot be made costs its importer alone")
        return offer

    export_base(tmp_path, "cpu", make=make)
    base = import_base(tmp_path, DEVICE, timeout_s=60)  # at the second try
    assert base.manifest == manifest
    assert torch.equal(base.tensors["a"], FUSED[:4])
    assert torch.equal(base.tensors["b"], FUSED[4:])
    assert torch.equal(base.tensors["c"], HALF)
    assert base.tensors["a"].untyped_storage().nbytes() == 4 * 2 * 4
    own[0][5, 1] = 77.0
    assert base.tensors["b"][1, 1] == 77.0
    with pytest.raises(SharedBaseError):
        export_base(tmp_path / "x" / "..", "cpu", make=make)
    export_base(tmp_path / "x", "cpu", make=make)
    export_base(tmp_path, "GPU-1", make=make)


def test_a_write_ends_the_importer_and_reaches_nobody(tmp_path: Path) -> None:
    with child("export", tmp_path):
        command = [sys.executable, "-m", "tests.transport.shared_base_child", "write", str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120, check=False)
        assert done.returncode == -signal.SIGSEGV
        assert torch.equal(import_base(tmp_path, DEVICE, timeout_s=60).tensors["a"], FUSED[:4])


def test_an_importer_sees_its_exporter_end_keeps_the_pages_and_imports_from_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with child("export", tmp_path) as first, child("import", tmp_path) as other:
        base = import_base(tmp_path, DEVICE, timeout_s=60)
        for _ in range(20):
            import_base(tmp_path, DEVICE, timeout_s=60).connection.close()
        until(lambda: len(list(Path(f"/proc/{first.pid}/fd").iterdir())) < 15)  # importers that end cost it nothing
        assert base.exporter_lives
        with monkeypatch.context() as patched:
            patched.setattr(shared_base.os, "getuid", lambda: 12345)
            with pytest.raises(SharedBaseError, match="12345"):
                import_base(tmp_path, DEVICE, timeout_s=60)
        first.kill()
        first.wait()
        assert not base.exporter_lives
        assert said_sum(other) == base.tensors["a"].sum() == FUSED[:4].sum()
        with pytest.raises(DeadlineError, match="grpo-infer"):
            import_base(tmp_path, DEVICE, timeout_s=0.3)
        with child("export", tmp_path):
            assert import_base(tmp_path, DEVICE, timeout_s=60).exporter_lives
    assert list(tmp_path.iterdir()) == []
    assert not [file for file in Path("/dev/shm").iterdir() if NAME in file.name]


def test_an_exporter_that_ends_in_the_exchange_is_one_that_is_not_there_yet(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(shared_base._address_of(tmp_path, "cpu"))
        listener.listen()
        ending = threading.Thread(target=lambda: listener.accept()[0].close())
        ending.start()
        with pytest.raises(DeadlineError):
            import_base(tmp_path, DEVICE, timeout_s=0.0)
        ending.join()


def test_a_tensor_that_cannot_be_shared_is_named() -> None:
    memory = HostMemory(256)
    placed = memory.place(FUSED)
    for tensor in (placed.T, FUSED, torch.arange(3)):
        with pytest.raises(SharedBaseError, match="q_proj"):
            memory.entry("q_proj", tensor)


def entry(**change: Any) -> dict[str, Any]:
    return {"tensors": {"a": {"dtype": "float32", "shape": [2], "memory": 0, "offset": 0} | change}}


@pytest.mark.parametrize(
    "change",
    [{"schema_version": 2}, entry(shape=[1000]), entry(offset=-4), entry(memory=1), entry(dtype="int64")],
)
def test_a_spoiled_manifest_is_refused(change: dict[str, Any]) -> None:
    manifest, *_ = exported()
    data = msgspec.msgpack.encode(msgspec.to_builtins(manifest, builtin_types=(bytes,)) | change)
    for spoiled in (data, b"nonsense"):
        with pytest.raises(CorruptError):
            decode(spoiled)


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


def gpu_tensor(storage: FakeStorage, shape: tuple[int, ...], *, offset: int = 0) -> Any:
    """A contiguous float16 view of a storage from element `offset` on."""
    return SimpleNamespace(
        dtype=torch.float16,
        shape=shape,
        untyped_storage=lambda: storage,
        storage_offset=lambda: offset,
        element_size=lambda: 2,
        is_contiguous=lambda: True,
    )


def test_parts_of_one_gpu_allocation_share_its_handle_and_each_importer_has_one_of_its_own() -> None:
    fused, other = FakeStorage(1, 80), FakeStorage(2, 16)
    for counter in (1, 2):
        exporter: Any = CudaMemory()
        q, k = exporter.entry("q", gpu_tensor(fused, (4, 5))), exporter.entry("k", gpu_tensor(fused, (2, 5), offset=20))
        o = exporter.entry("o", gpu_tensor(other, (8,)))
        assert [(one.memory, one.offset) for one in (q, k, o)] == [(0, 0), (0, 40), (1, 0)]
        assert fused.num_shared == counter
        assert exporter.memories[0] == Memory(num_bytes=80, cuda=(b"handle1", 512, b"c", counter, b"event", True))
    with pytest.raises(SharedBaseError, match="cudaErrorInvalidValue"):
        exporter.entry("o", gpu_tensor(FakeStorage(3, 16, can_be_shared=False), (8,)))
    assert Entry(dtype="uint8", shape=(0, 4), memory=0, offset=0).num_bytes == 0

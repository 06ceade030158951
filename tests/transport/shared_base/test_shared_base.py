"""Tensors in main memory that two processes map: complete, read-only, and gone with their last process."""

import contextlib
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.transport.shared_base.child import FUSED, HALF, exported
from transport.errors import CorruptError, DeadlineError, SharedBaseError
from transport.shared_base import rendezvous
from transport.shared_base.manifest import Entry, decode, shareable_dtype
from transport.shared_base.memory import NAME, HostMemory, mapped
from transport.shared_base.sharing import CPU, address_of, export_base, import_base

ROOT = Path(__file__).parents[3]
DEVICE = torch.device(CPU)


@contextlib.contextmanager
def child(what: str, output_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """A process of `child.py`, ready."""
    command = [sys.executable, "-m", "tests.transport.shared_base.child", what, str(output_dir)]
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
    export_base(tmp_path, CPU, make=lambda: (manifest, memory))
    base = import_base(tmp_path, DEVICE, timeout_s=60)
    assert base.manifest == manifest
    assert torch.equal(base.tensors["a"], FUSED[:4])
    assert torch.equal(base.tensors["b"], FUSED[4:])
    assert torch.equal(base.tensors["c"], HALF)
    assert base.tensors["a"].untyped_storage().nbytes() == 4 * 2 * 4
    own[0][5, 1] = 77.0
    assert base.tensors["b"][1, 1] == 77.0
    with pytest.raises(SharedBaseError):
        export_base(tmp_path, CPU, make=lambda: (manifest, memory))


def test_runs_and_devices_have_addresses_of_their_own(tmp_path: Path) -> None:
    addresses = {address_of(folder, device) for folder in (tmp_path, tmp_path / "x") for device in (CPU, "GPU-1")}
    assert len(addresses) == 4
    assert address_of(tmp_path / "x" / "..", CPU) in addresses


def test_a_write_ends_the_importer_and_reaches_nobody(tmp_path: Path) -> None:
    with child("export", tmp_path):
        command = [sys.executable, "-m", "tests.transport.shared_base.child", "write", str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=False)
        assert done.returncode == -signal.SIGSEGV
        assert torch.equal(import_base(tmp_path, DEVICE, timeout_s=60).tensors["a"], FUSED[:4])


def test_the_kernel_refuses_importers_every_way_to_write() -> None:
    _, memory, _ = exported()
    descriptor = memory.descriptors[0]
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, 64, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
    for attempt in (lambda: os.pwrite(again, b"x", 0), lambda: os.ftruncate(again, 8)):
        with pytest.raises(PermissionError):
            attempt()
    os.close(again)


def test_an_importer_sees_its_exporter_end_keeps_the_pages_and_imports_from_the_next(tmp_path: Path) -> None:
    with child("export", tmp_path) as first, child("import", tmp_path) as other:
        base = import_base(tmp_path, DEVICE, timeout_s=60)
        assert base.exporter_lives
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


def test_importers_that_end_cost_the_exporter_nothing(tmp_path: Path) -> None:
    with child("export", tmp_path) as exporter:
        descriptors = Path(f"/proc/{exporter.pid}/fd")
        held = import_base(tmp_path, DEVICE, timeout_s=60)
        for _ in range(20):
            import_base(tmp_path, DEVICE, timeout_s=60).connection.close()
        with child("import", tmp_path) as importer:
            importer.kill()
        assert len(list(descriptors.iterdir())) < 15
        assert held.exporter_lives


def test_a_tensor_that_cannot_be_shared_is_named() -> None:
    memory = HostMemory(256)
    placed = memory.place(FUSED)
    with pytest.raises(SharedBaseError, match=r"q_proj.*\[1, 2\]"):
        memory.entry("q_proj", placed.T)
    with pytest.raises(SharedBaseError, match="q_proj"):
        memory.entry("q_proj", FUSED)
    with pytest.raises(SharedBaseError, match=r"q_proj.*int64"):
        shareable_dtype("q_proj", torch.arange(3))


def spoiled(**change: object) -> bytes:
    manifest, *_ = exported()
    return msgspec.msgpack.encode(msgspec.to_builtins(manifest, builtin_types=(bytes,)) | change)


def entry(**change: Any) -> dict[str, Any]:
    return {"tensors": {"a": {"dtype": "float32", "shape": [2], "memory": 0, "offset": 0} | change}}


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense",
        spoiled(schema_version=2),
        spoiled(more=1),
        spoiled(**entry(shape=[1000])),
        spoiled(**entry(shape=[-1])),
        spoiled(**entry(offset=-4)),
        spoiled(**entry(memory=1)),
        spoiled(**entry(memory=-1)),
        spoiled(**entry(dtype="int64")),
    ],
)
def test_a_spoiled_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptError):
        decode(data)


def test_an_empty_tensor_is_within_its_memory() -> None:
    manifest, *_ = exported()
    empty = Entry(dtype="uint8", shape=(0, 4), memory=0, offset=0)
    assert decode(msgspec.msgpack.encode(msgspec.structs.replace(manifest, tensors={"a": empty}))).num_bytes == 0


def test_memory_whose_size_could_change_is_refused() -> None:
    manifest, *_ = exported()
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, manifest.memories[0].num_bytes)
    with pytest.raises(SharedBaseError):
        mapped(manifest, [loose])
    os.close(loose)


def test_an_exporter_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with child("export", tmp_path):
        monkeypatch.setattr(rendezvous.os, "getuid", lambda: 12345)
        with pytest.raises(SharedBaseError, match="12345"):
            import_base(tmp_path, DEVICE, timeout_s=60)


def closing(connection: socket.socket) -> None:
    """Ends without an offer."""


def torn(connection: socket.socket) -> None:
    """Gives a manifest that is none, and ends."""
    rendezvous._give(connection, b"nonsense", [])


@pytest.mark.parametrize("end", [closing, torn])
def test_an_exporter_that_ends_in_the_exchange_is_one_that_is_not_there_yet(
    tmp_path: Path, end: Callable[[socket.socket], None]
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0{address_of(tmp_path, CPU)}")
        listener.listen()

        def give() -> None:
            connection, _ = listener.accept()
            with connection:
                end(connection)
            listener.close()

        thread = threading.Thread(target=give)
        thread.start()
        with pytest.raises((DeadlineError, CorruptError)):
            import_base(tmp_path, DEVICE, timeout_s=0.5)
        thread.join()


def test_an_offer_that_cannot_be_made_costs_its_importer_alone(tmp_path: Path) -> None:
    manifest, memory, _ = exported()
    offers = iter([None, (manifest, memory)])

    def make() -> Any:
        if (offer := next(offers)) is None:
            raise RuntimeError("boo")
        return offer

    export_base(tmp_path, CPU, make=make)
    assert import_base(tmp_path, DEVICE, timeout_s=60).manifest == manifest  # at the second try

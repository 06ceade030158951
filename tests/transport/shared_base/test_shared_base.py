"""Tensors in main memory that two processes map: complete, read-only, and gone with their last process."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from tests.transport.shared_base.child import FUSED, HALF, lent_tensors
from transport.errors import CorruptError, DeadlineError, SharedBaseError
from transport.shared_base import door, lending
from transport.shared_base.base import CPU, Entry, Lender, Manifest, address_of, checked, manifest_from
from transport.shared_base.door import Door, Offer, ask
from transport.shared_base.lending import borrow, lend, offered
from transport.shared_base.memory import NAME, SharedMemory, mapped
from transport.shared_base.usage import usage_of

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


def told_sum(process: subprocess.Popen[str]) -> float:
    assert process.stdin
    assert process.stdout
    process.stdin.write("sum\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def test_a_borrower_has_the_lenders_values_under_all_names(tmp_path: Path) -> None:
    manifest, memory, own = lent_tensors()

    def make() -> tuple[Manifest, Lender]:
        return manifest, memory

    lend(tmp_path, CPU, make=make)
    borrowed = borrow(tmp_path, DEVICE, timeout_s=60)
    assert borrowed.manifest == manifest
    assert torch.equal(borrowed.tensors["a"], FUSED[:4])
    assert torch.equal(borrowed.tensors["b"], FUSED[4:])
    assert torch.equal(borrowed.tensors["c"], HALF)
    assert borrowed.tensors["a"].untyped_storage().nbytes() == 4 * 2 * 4
    own[0][5, 1] = 77.0  # the same memory: nothing was copied
    assert borrowed.tensors["b"][1, 1] == 77.0


def test_two_folders_and_two_devices_are_four_addresses(tmp_path: Path) -> None:
    addresses = {address_of(folder, device) for folder in (tmp_path, tmp_path / "x") for device in (CPU, "GPU-1")}
    assert len(addresses) == 4
    assert address_of(tmp_path / "x" / "..", CPU) in addresses


def test_a_write_ends_the_borrower_and_reaches_nobody(tmp_path: Path) -> None:
    with child("lend", tmp_path):
        command = [sys.executable, "-m", "tests.transport.shared_base.child", "write", str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=False)
        assert done.returncode == -signal.SIGSEGV
        assert torch.equal(borrow(tmp_path, DEVICE, timeout_s=60).tensors["a"], FUSED[:4])


def test_the_kernel_refuses_borrowers_every_way_to_write(tmp_path: Path) -> None:
    import mmap

    _, memory, _ = lent_tensors()
    descriptor = memory.descriptors[0]
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, 64, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
    for attempt in (lambda: os.pwrite(again, b"x", 0), lambda: os.ftruncate(again, 8)):
        with pytest.raises(PermissionError):
            attempt()
    os.close(again)


def test_two_processes_have_the_same_pages_and_a_killed_lender_leaves_the_borrower_them(tmp_path: Path) -> None:
    with child("lend", tmp_path) as lender, child("borrow", tmp_path) as borrower:
        assert told_sum(borrower) == FUSED[:4].sum()
        (lent,), (borrowed,) = usage_of(lender.pid), usage_of(borrower.pid)
        assert lent.inode == borrowed.inode
        assert (lent.writable, borrowed.writable) == (True, False)
        assert borrowed.proportional == borrowed.resident // 2
        lender.kill()
        lender.wait()
        assert told_sum(borrower) == FUSED[:4].sum()
        with pytest.raises(
            DeadlineError, match=r"waited 0\.3 s for grpo-infer to lend its base weights on cpu; start it"
        ):
            borrow(tmp_path, DEVICE, timeout_s=0.3)
    assert list(tmp_path.iterdir()) == []
    assert not [name for name in Path("/dev/shm").iterdir() if NAME in name.name]


def test_a_killed_borrower_leaves_the_lender_to_the_next(tmp_path: Path) -> None:
    with child("lend", tmp_path) as lender:
        for _ in range(2):
            with child("borrow", tmp_path) as borrower:
                borrower.kill()
                borrower.wait()
        assert lender.poll() is None
        assert borrow(tmp_path, DEVICE, timeout_s=60).manifest.base_model == "m"


def test_a_borrower_sees_its_lender_end_and_borrows_of_the_next(tmp_path: Path) -> None:
    assert offered(tmp_path, DEVICE) is None
    with child("lend", tmp_path) as first:
        borrowed = borrow(tmp_path, DEVICE, timeout_s=60)
        for _ in range(3):
            assert borrowed.lender.answers(timeout_s=60)
            assert not borrowed.lender.is_broken()
        first.kill()
        assert not borrowed.lender.answers()  # not even while its connections are still open
        first.wait()
    assert borrowed.lender.is_broken()
    assert offered(tmp_path, DEVICE) is None
    assert torch.equal(borrowed.tensors["a"], FUSED[:4])
    with child("lend", tmp_path):
        again = offered(tmp_path, DEVICE)
        assert again is not None
        assert not again.lender.is_broken()
        assert torch.equal(again.tensors["a"], borrowed.tensors["a"])
        assert again.tensors["a"].data_ptr() != borrowed.tensors["a"].data_ptr()


def stop(process: subprocess.Popen[str]) -> None:
    """Returns when it has stopped."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


def test_a_lender_that_is_stopped_gives_no_sign_of_life_and_counts_as_ended_from_then_on(tmp_path: Path) -> None:
    with child("lend", tmp_path) as lender:
        link = borrow(tmp_path, DEVICE, timeout_s=60).lender
        stop(lender)
        assert not link.is_broken()  # its connection is open
        assert not link.answers(timeout_s=0.05)
        assert link.is_broken()
        lender.send_signal(signal.SIGCONT)
        assert borrow(tmp_path, DEVICE, timeout_s=60).lender.answers(timeout_s=60)
        assert not link.answers()


def test_a_lender_that_is_stopped_holds_nobody_up_who_goes_on_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with child("lend", tmp_path) as lender:
        stop(lender)
        began_s = time.monotonic()
        assert offered(tmp_path, DEVICE) is None
        assert time.monotonic() - began_s < 30
        monkeypatch.setattr(lending, "OFFERED_S", 0.001)
        for _ in range(500):  # more than may wait for a lender
            assert offered(tmp_path, DEVICE) is None
        with pytest.raises(DeadlineError, match="waited 0 s for somebody"):
            ask(address_of(tmp_path, CPU), timeout_s=0, whom="somebody")
        lender.send_signal(signal.SIGCONT)
        monkeypatch.undo()
        deadline_s = time.monotonic() + 60
        while offered(tmp_path, DEVICE) is None:
            assert time.monotonic() < deadline_s


def test_a_lender_lets_go_of_borrowers_that_have_ended(tmp_path: Path) -> None:
    with child("lend", tmp_path) as lender:
        held = borrow(tmp_path, DEVICE, timeout_s=60)
        descriptors = Path(f"/proc/{lender.pid}/fd")
        num_before = len(list(descriptors.iterdir()))
        for _ in range(20):
            borrow(tmp_path, DEVICE, timeout_s=60).lender.close()
        deadline_s = time.monotonic() + 60
        while len(list(descriptors.iterdir())) > num_before:
            assert time.monotonic() < deadline_s
        assert not held.lender.is_broken()


def test_a_second_lender_of_a_folder_is_refused(tmp_path: Path) -> None:
    def offer() -> tuple[bytes, list[int]]:
        return b"", []

    door = Door(address_of(tmp_path, CPU), offer)
    with pytest.raises(SharedBaseError, match="another process lends base weights for this output_dir"):
        Door(address_of(tmp_path, CPU), offer)
    assert door


def test_a_tensor_that_is_laid_out_anew_is_named() -> None:
    memory = SharedMemory(256)
    placed = memory.place(FUSED)
    with pytest.raises(
        SharedBaseError, match=r"q_proj is laid out anew by the server \(shape \[2, 6\], strides \[1, 2\]\)"
    ):
        memory.entry("q_proj", placed.T)
    with pytest.raises(SharedBaseError, match="q_proj does not lie in the memory that is lent"):
        memory.entry("q_proj", FUSED)
    with pytest.raises(SharedBaseError, match="q_proj is of type int64, expected one of float32, bfloat16"):
        checked("q_proj", torch.arange(3))


def spoiled(**change: object) -> bytes:
    manifest, *_ = lent_tensors()
    return msgspec.msgpack.encode(msgspec.to_builtins(manifest, builtin_types=(bytes,)) | change)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"nonsense", "no manifest of base weights"),
        (spoiled(schema_version=2), "the offer has schema 2, expected 1"),
        (spoiled(more=1), "no manifest of base weights"),
        (spoiled(tensors={"a": {"dtype": "float32", "shape": [99], "memory": 0, "offset": 0}}), "a beyond its memory"),
        (spoiled(tensors={"a": {"dtype": "float32", "shape": [1], "memory": 1, "offset": 0}}), "a beyond its memory"),
        (spoiled(tensors={"a": {"dtype": "float32", "shape": [1], "memory": 0, "offset": -4}}), "a beyond its memory"),
        (
            spoiled(tensors={"a": {"dtype": "object", "shape": [1], "memory": 0, "offset": 0}}),
            "type object is not lent",
        ),
    ],
)
def test_an_offer_that_is_none_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(CorruptError, match=message):
        manifest_from(data)


def test_memory_that_could_shrink_under_the_borrower_is_refused() -> None:
    manifest, _, _ = lent_tensors()
    descriptor = os.memfd_create("loose")
    os.ftruncate(descriptor, manifest.memories[0].num_bytes)
    with pytest.raises(SharedBaseError, match="expected 128 that are sealed"):
        mapped(manifest, [descriptor])
    os.close(descriptor)


def test_an_offer_that_breaks_off_is_an_error_and_no_hang(tmp_path: Path) -> None:
    address = address_of(tmp_path, CPU)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0{address}")
        listener.listen()

        def half() -> None:
            connection, _ = listener.accept()
            connection.send(b"\0\0\0\0\0\0\0\7abc")
            connection.close()

        thread = threading.Thread(target=half)
        thread.start()
        with pytest.raises(CorruptError, match="broke off: closed after 3 of 7 bytes"):
            ask(address, timeout_s=60, whom="somebody")
        thread.join()
        thread = threading.Thread(target=half)
        thread.start()
        assert offered(tmp_path, DEVICE) is None  # to one that has weights already, it is not there yet
        thread.join()


def test_an_empty_entry_is_within_its_memory() -> None:
    entry = Entry(dtype="uint8", shape=(0, 4), memory=0, offset=0)
    manifest, *_ = lent_tensors()
    assert manifest_from(msgspec.structs.replace(manifest, tensors={"a": entry}).encoded()).num_bytes == 0


def test_an_offer_that_fails_costs_its_borrower_alone(tmp_path: Path) -> None:
    offers = iter([RuntimeError("boo"), (b"manifest", [])])

    def offer() -> Offer:
        made = next(offers)
        if isinstance(made, RuntimeError):
            raise made
        return made

    address = address_of(tmp_path, CPU)
    Door(address, offer)
    with pytest.raises(CorruptError, match="broke off"):
        ask(address, timeout_s=60, whom="somebody")
    answer = ask(address, timeout_s=60, whom="somebody")
    assert (answer.data, answer.descriptors) == (b"manifest", [])


def test_a_borrower_that_takes_nothing_does_not_keep_a_sign_of_life_from_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(door, "GIVE_S", 0.2)
    address = f"grpo-test-{uuid.uuid4().hex}"
    Door(address, lambda: (bytes(1 << 23), ()))
    link = ask(address, timeout_s=60, whom="the lender").link
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.connect(f"\0{address}")
        assert link.answers(timeout_s=60)
    link.close()

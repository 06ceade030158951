"""The contract of batch and policy channels, on every backend."""

import itertools
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.transport.samples import SPEC, equal, free_port, micro_batch
from transport.batches.base import BatchReceiver, BatchSender
from transport.batches.filesystem import FilesystemBatchReceiver, FilesystemBatchSender
from transport.batches.memory import MemoryBatches, MemoryBatchReceiver, MemoryBatchSender
from transport.batches.store import StepStore
from transport.batches.zmq import ZmqBatchReceiver, ZmqBatchSender
from transport.codec import encode
from transport.errors import CorruptError, DeadlineError, StaleRunError, StorageError, TransportError
from transport.folders import STABLE, step_folder
from transport.records import BatchManifest, MicroBatch
from transport.weights.base import ADAPTER_FILE, PolicyPublisher, PolicyReader
from transport.weights.filesystem import FilesystemPolicyPublisher, FilesystemPolicyReader, verify_policy
from transport.weights.memory import MemoryPolicies


@pytest.fixture
def small_disk() -> Iterator[Callable[[Path], None]]:
    """Mounts a disk of 256 KiB at a folder."""
    mounted: list[Path] = []

    def mount(folder: Path) -> None:
        folder.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"mounting a small disk needs privileges that this user lacks: {done.stderr.strip()}")
        mounted.append(folder)

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def unprivileged() -> Iterator[None]:
    """Gives up root's right to write anywhere, in this thread's file accesses too."""
    if os.geteuid() != 0:
        pytest.skip("already unprivileged: the folders of this test belong to this user")
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


FILES = {ADAPTER_FILE: b"weights", "canary.json": b"{}"}


class Batches:
    """Makes both ends of one channel, and remakes them as a restart of a process would."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder, self.port = kind, folder / "batches", free_port()
        self._channel = MemoryBatches(run_id="run")
        self._open: list[BatchSender | BatchReceiver] = []

    def sender(self, run_id: str = "run", hwm: int = 10, send_timeout_s: float = 60, num_ranks: int = 1) -> BatchSender:
        made: BatchSender
        options: dict[str, Any] = {"hwm": hwm, "send_timeout_s": send_timeout_s}
        if self.kind == "memory":
            made = MemoryBatchSender(self._channel, **options)
        elif self.kind == "filesystem":
            made = FilesystemBatchSender(self.folder, run_id=run_id, num_ranks=num_ranks, **options)
        else:
            made = ZmqBatchSender(self.folder, run_id=run_id, num_ranks=num_ranks, port=self.port, **options)
        self._open.append(made)
        return made

    def receiver(self, rank: int = 0, run_id: str = "run") -> BatchReceiver:
        made: BatchReceiver
        if self.kind == "memory":
            made = MemoryBatchReceiver(self._channel, rank=rank)
        elif self.kind == "filesystem":
            made = FilesystemBatchReceiver(self.folder, run_id=run_id, rank=rank)
        else:
            made = ZmqBatchReceiver(self.folder / "quarantine", run_id=run_id, rank=rank, port=self.port)
        self._open.append(made)
        return made

    def close(self) -> None:
        for end in self._open:
            end.close()


@pytest.fixture(params=["filesystem", "zmq", "memory"])
def batches(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Batches]:
    made = Batches(request.param, tmp_path)
    yield made
    made.close()


def receive(receiver: BatchReceiver, step: int, timeout_s: float = 60) -> MicroBatch:
    """The only micro-batch of a step."""
    received = receiver.receive(step, timeout_s=timeout_s)
    assert received is not None
    (batch,) = received
    return batch


@pytest.fixture(params=["filesystem", "memory"])
def policies(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[PolicyPublisher, PolicyReader]:
    if request.param == "memory":
        channel = MemoryPolicies(run_id="run")
        return channel, channel
    return FilesystemPolicyPublisher(tmp_path, run_id="run"), FilesystemPolicyReader(tmp_path, run_id="run")


def test_each_rank_receives_its_own_micro_batches(batches: Batches) -> None:
    sender, receivers = batches.sender(), [batches.receiver(0), batches.receiver(1)]
    ranks = [[micro_batch(rank=r, index=i, of=2, seed=10 * r + i) for i in range(2)] for r in range(2)]
    sender.send(1, ranks)
    for receiver, sent in zip(receivers, ranks, strict=True):
        received = receiver.receive(1, timeout_s=60)
        assert received is not None
        assert all(equal(a, b) for a, b in zip(sent, received, strict=True))


def test_steps_arrive_in_the_order_in_which_they_are_asked_for(batches: Batches) -> None:
    sender, receiver = batches.sender(), batches.receiver()
    for step in range(1, 6):
        sender.send(step, [[micro_batch(step=step, seed=step)]])
    assert [receive(receiver, step).step for step in range(1, 6)] == [1, 2, 3, 4, 5]


def test_a_receiver_waits_for_a_step_that_comes_later(batches: Batches) -> None:
    sender, receiver = batches.sender(), batches.receiver()
    timer = threading.Timer(0.2, sender.send, (1, [[micro_batch()]]))
    timer.start()
    assert receive(receiver, 1).step == 1
    timer.join()


def test_receiving_twice_gives_the_same_batch(batches: Batches) -> None:
    sender, receiver = batches.sender(), batches.receiver()
    sender.send(1, [[micro_batch()]])
    assert equal(receive(receiver, 1), receive(receiver, 1))


def test_sending_a_step_again_replaces_it(batches: Batches) -> None:
    sender, receiver = batches.sender(), batches.receiver()
    sender.send(1, [[micro_batch(seed=1)]])
    sender.send(1, [[micro_batch(seed=2)]])
    assert equal(receive(receiver, 1), micro_batch(seed=2))


def test_a_wait_that_is_too_long_names_the_orchestrator(batches: Batches) -> None:
    batches.sender()
    with pytest.raises(DeadlineError, match=r"waited 0\.05 s for the orchestrator to deliver batch 3"):
        batches.receiver().receive(3, timeout_s=0.05)


def test_after_the_end_later_steps_are_none_and_earlier_ones_still_there(batches: Batches) -> None:
    sender, receiver = batches.sender(), batches.receiver()
    sender.send(1, [[micro_batch()]])
    sender.finish(1)
    assert receive(receiver, 1).step == 1
    assert receiver.receive(2, timeout_s=60) is None


def test_a_receiver_that_waits_is_told_of_the_end(batches: Batches) -> None:
    sender, receiver = batches.sender(), batches.receiver()
    timer = threading.Timer(0.2, sender.finish, (0,))
    timer.start()
    assert receiver.receive(1, timeout_s=60) is None
    timer.join()


def test_a_receiver_that_restarts_asks_for_the_step_after_its_checkpoint(batches: Batches) -> None:
    sender, receiver = batches.sender(), batches.receiver()
    for step in (1, 2, 3):
        sender.send(step, [[micro_batch(step=step, seed=step)]])
    assert [receive(receiver, step).step for step in (1, 2, 3)] == [1, 2, 3]
    receiver.checkpointed(1)
    receiver.close()
    again = batches.receiver()
    assert [receive(again, step).step for step in (2, 3)] == [2, 3]


def wait_until_removed(receiver: BatchReceiver, step: int) -> None:
    deadline = time.monotonic() + 60
    with pytest.raises(DeadlineError):  # noqa: PT012 (how often it is still there is the sender's to say)
        while time.monotonic() < deadline:
            receiver.receive(step, timeout_s=0.1)


def test_a_trainer_that_resumes_an_earlier_step_receives_what_is_sent_again(batches: Batches) -> None:
    sender, receiver = batches.sender(), batches.receiver()
    for step in (1, 2, 3):
        sender.send(step, [[micro_batch(step=step, seed=step)]])
        assert receive(receiver, step).step == step
    receiver.checkpointed(3)
    wait_until_removed(receiver, 3)
    receiver.close()
    again = batches.receiver()
    again.resumed(1)
    for step in (2, 3):
        sender.send(step, [[micro_batch(step=step, seed=step)]])
    assert receive(again, 2).step == 2
    again.checkpointed(2)  # and not 3, as the process before it said
    wait_until_removed(again, 2)
    assert receive(again, 3).step == 3


def test_a_sender_counts_from_the_step_that_a_trainer_resumes(batches: Batches) -> None:
    sender, receiver = batches.sender(hwm=2, send_timeout_s=3), batches.receiver()
    for step in (1, 2, 3):
        sender.send(step, [[micro_batch(step=step)]])
        assert receive(receiver, step).step == step
    receiver.close()
    again = batches.receiver()
    again.resumed(1)
    assert receive(again, 2).step == 2
    for step in (3, 4):
        sender.send(step, [[micro_batch(step=step)]])
    with pytest.raises(DeadlineError, match="for the trainer to receive batch 3"):
        sender.send(5, [[micro_batch(step=5)]])


@pytest.mark.parametrize("batches", ["filesystem", "zmq"], indirect=True)
def test_a_trainer_that_resumes_before_what_was_removed_is_warned(
    batches: Batches, caplog: pytest.LogCaptureFixture
) -> None:
    sender, receiver = batches.sender(), batches.receiver()
    for step in (1, 2, 3):
        sender.send(step, [[micro_batch(step=step)]])
        assert receive(receiver, step).step == step
    receiver.checkpointed(2)
    wait_until_removed(receiver, 2)
    receiver.close()
    again = batches.receiver()
    again.resumed(2)
    assert receive(again, 3).step == 3
    assert not caplog.records
    again.close()
    again = batches.receiver()
    again.resumed(1)
    with pytest.raises(DeadlineError):
        again.receive(2, timeout_s=1)
    assert "again" in caplog.records[-1].getMessage()


def test_a_sender_that_restarts_still_has_what_no_checkpoint_has_passed(batches: Batches) -> None:
    sender, receiver = batches.sender(), batches.receiver()
    sender.send(1, [[micro_batch(step=1)]])
    sender.send(2, [[micro_batch(step=2)]])
    assert receive(receiver, 1).step == 1
    sender.close()
    again = batches.sender()
    assert receive(receiver, 2).step == 2
    again.send(3, [[micro_batch(step=3)]])
    assert receive(receiver, 3).step == 3


def test_the_two_ends_may_start_in_either_order(batches: Batches) -> None:
    receiver = batches.receiver()
    result: list[MicroBatch] = []
    thread = threading.Thread(target=lambda: result.append(receive(receiver, 1)))
    thread.start()
    time.sleep(0.1)
    batches.sender().send(1, [[micro_batch()]])
    thread.join(60)
    assert [batch.step for batch in result] == [1]


@pytest.mark.parametrize("batches", ["filesystem", "zmq"], indirect=True)
def test_a_sender_that_restarts_still_keeps_a_step_for_the_rank_without_a_checkpoint(batches: Batches) -> None:
    sender, receivers = batches.sender(num_ranks=2), [batches.receiver(0), batches.receiver(1)]
    sender.send(1, [[micro_batch(rank=rank)] for rank in (0, 1)])
    assert [receive(receiver, 1).rank for receiver in receivers] == [0, 1]
    sender.close()
    batches.sender(num_ranks=2)
    receivers[0].checkpointed(1)
    time.sleep(0.4)
    assert receive(receivers[1], 1).step == 1


def test_steps_are_removed_only_when_every_rank_has_a_checkpoint_past_them(batches: Batches) -> None:
    sender, receivers = batches.sender(), [batches.receiver(0), batches.receiver(1)]
    for step in (1, 2):
        sender.send(step, [[micro_batch(step=step, rank=rank)] for rank in (0, 1)])
        for receiver in receivers:
            assert receive(receiver, step).step == step
    receivers[0].checkpointed(2)
    time.sleep(0.4)
    assert receive(receivers[1], 1).step == 1
    receivers[1].checkpointed(1)
    deadline = time.monotonic() + 60
    while True:
        try:
            receivers[1].receive(1, timeout_s=0.1)
        except DeadlineError:
            break
        assert time.monotonic() < deadline
    assert receive(receivers[1], 2).step == 2


def test_a_sender_that_is_too_far_ahead_is_slowed_and_nothing_is_dropped(batches: Batches) -> None:
    sender, receiver = batches.sender(hwm=3), batches.receiver()
    sent: list[int] = []

    def send_all() -> None:
        for step in range(1, 9):
            sender.send(step, [[micro_batch(step=step)]])
            sent.append(step)

    thread = threading.Thread(target=send_all)
    thread.start()
    deadline = time.monotonic() + 60
    while len(sent) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.2)
    assert len(sent) == 3
    assert [receive(receiver, step).step for step in range(1, 9)] == list(range(1, 9))
    thread.join(60)
    assert sent == list(range(1, 9))


def test_a_sender_that_is_slowed_too_long_names_the_trainer(batches: Batches) -> None:
    sender = batches.sender(hwm=1, send_timeout_s=0.1)
    sender.send(1, [[micro_batch(step=1)]])
    with pytest.raises(DeadlineError, match=r"waited 0\.1 s for the trainer to receive batch 1"):
        sender.send(2, [[micro_batch(step=2)]])


def test_a_clock_that_jumps_disturbs_no_wait(batches: Batches, monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.cycle([1e9, 5.0, 2e9, -3.0])
    monkeypatch.setattr(time, "time", lambda: next(now))
    sender, receiver = batches.sender(), batches.receiver()
    timer = threading.Timer(0.2, sender.send, (1, [[micro_batch()]]))
    timer.start()
    assert receive(receiver, 1).step == 1
    timer.join()


@pytest.mark.parametrize("wrong", [{"step": 2}, {"rank": 1}, {"of": 2}])
def test_a_sender_refuses_micro_batches_of_another_step_rank_or_number(batches: Batches, wrong: dict[str, int]) -> None:
    with pytest.raises(CorruptError, match=r"\(step, rank, index, of\)"):
        batches.sender().send(1, [[micro_batch(**wrong)]])  # type: ignore[arg-type]


def test_a_sender_refuses_micro_batches_of_another_run(batches: Batches) -> None:
    with pytest.raises(StaleRunError, match="micro-batch of run other, this is run run"):
        batches.sender().send(1, [[micro_batch(run_id="other")]])


@pytest.mark.parametrize("batches", ["filesystem", "zmq"], indirect=True)
def test_a_batch_of_another_run_is_refused(batches: Batches) -> None:
    batches.sender(run_id="old").send(1, [[micro_batch(run_id="old")]])
    with pytest.raises(StaleRunError, match="run old"):
        batches.receiver().receive(1, timeout_s=60)


def test_a_rank_that_was_not_sent_is_named_and_the_others_get_theirs(batches: Batches) -> None:
    batches.sender().send(1, [[micro_batch()]])
    with pytest.raises(TransportError, match="batch 1 is split over 1 ranks, and this is rank 1"):
        batches.receiver(rank=1).receive(1, timeout_s=60)
    assert receive(batches.receiver(), 1).step == 1


DAMAGES = [
    ("rank_0.msgpack", "flip", "has digest"),
    ("rank_0.msgpack", "truncate", "bytes, the manifest says"),
    ("rank_0.msgpack", "remove", "is missing, the manifest lists it"),
    ("manifest.json", "flip", "has digest"),
    ("manifest.json", "remove", r"has no manifest\.json"),
    (STABLE, "remove", "has no STABLE"),
]


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "remove":
        path.unlink()
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data[: len(data) // 2] if how == "truncate" else data)


@pytest.mark.parametrize(("name", "how", "message"), DAMAGES)
def test_a_damaged_batch_is_set_aside_and_comes_again(tmp_path: Path, name: str, how: str, message: str) -> None:
    with (
        FilesystemBatchSender(tmp_path, run_id="run") as sender,
        FilesystemBatchReceiver(tmp_path, run_id="run") as receiver,
    ):
        sender.send(1, [[micro_batch(seed=7)]])
        damage(step_folder(tmp_path, 1) / name, how)
        assert equal(receive(receiver, 1), micro_batch(seed=7))
    (aside,) = (tmp_path / "quarantine").iterdir()
    assert re.search(message, (aside / "error.txt").read_text())
    manifest = BatchManifest.from_json((step_folder(tmp_path, 1) / "manifest.json").read_bytes())
    assert manifest.attempt == 1


@pytest.mark.parametrize(("name", "how", "message"), DAMAGES)
def test_a_damaged_batch_without_a_sender_is_reported_at_the_deadline(
    tmp_path: Path, name: str, how: str, message: str
) -> None:
    FilesystemBatchSender(tmp_path, run_id="run").close()
    StepStore(tmp_path, run_id="run").write(1, [encode([micro_batch()])])
    damage(step_folder(tmp_path, 1) / name, how)
    with (
        FilesystemBatchReceiver(tmp_path, run_id="run") as receiver,
        pytest.raises(DeadlineError, match=f"{message}.*was asked for again"),
    ):
        receiver.receive(1, timeout_s=0.2)


def test_a_batch_that_is_always_corrupt_is_given_up(tmp_path: Path) -> None:
    store = StepStore(tmp_path, run_id="run")
    stop = threading.Event()

    def write_torn_batches() -> None:
        while not stop.wait(0.01):
            if not step_folder(tmp_path, 1).exists():
                store.write(1, [b"torn"])

    thread = threading.Thread(target=write_torn_batches)
    thread.start()
    try:
        with (
            FilesystemBatchReceiver(tmp_path, run_id="run") as receiver,
            pytest.raises(CorruptError, match="batch 1 was corrupt 3 times, lastly: message of 4 bytes is shorter"),
        ):
            receiver.receive(1, timeout_s=60)
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("batches", ["filesystem", "zmq"], indirect=True)
def test_a_full_disk_is_an_error_that_loses_nothing(
    batches: Batches, tmp_path: Path, small_disk: Callable[[Path], None]
) -> None:
    small_disk(batches.folder)
    sender, receiver = batches.sender(), batches.receiver()
    sender.send(1, [[micro_batch(step=1, lengths=(4000,))]])
    ballast = batches.folder / "ballast"
    ballast.write_bytes(bytes(150_000))
    with pytest.raises(StorageError, match="No space left on device; make room"):
        sender.send(2, [[micro_batch(step=2, lengths=(20_000,))]])
    assert not list(batches.folder.glob(".*"))
    ballast.unlink()
    sender.send(2, [[micro_batch(step=2, lengths=(4000,))]])
    assert [receive(receiver, step).step for step in (1, 2)] == [1, 2]


@pytest.mark.parametrize("batches", ["filesystem", "zmq"], indirect=True)
def test_a_folder_that_forbids_writing_is_an_error_that_loses_nothing(batches: Batches) -> None:
    sender, receiver = batches.sender(), batches.receiver()
    sender.send(1, [[micro_batch(step=1)]])
    with unprivileged(), pytest.raises(StorageError, match="Permission denied; make room or mend the permissions"):
        sender.send(2, [[micro_batch(step=2)]])
    sender.send(2, [[micro_batch(step=2)]])
    assert [receive(receiver, step).step for step in (1, 2)] == [1, 2]


def test_leftovers_of_a_killed_sender_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".step_000001.abc.tmp").mkdir()
    (tmp_path / ".step_000001.abc.old").mkdir()
    with FilesystemBatchSender(tmp_path, run_id="run"):
        assert not list(tmp_path.glob(".*"))


def test_versions_are_read_as_published(policies: tuple[PolicyPublisher, PolicyReader]) -> None:
    publisher, reader = policies
    assert reader.latest() is None
    assert reader.poll(0) is None
    for version in (0, 1, 12):
        manifest = publisher.publish(version=version, spec=SPEC, files=FILES)
    assert reader.latest() == 12
    published = reader.wait_for(12, timeout_s=1)
    assert published.manifest == manifest
    assert published.small_files == {"canary.json": b"{}"}


def test_waiting_too_long_for_a_version_names_the_trainer(policies: tuple[PolicyPublisher, PolicyReader]) -> None:
    with pytest.raises(DeadlineError, match=r"waited 0.05 s for the trainer to publish version 7"):
        policies[1].wait_for(7, timeout_s=0.05)


def test_a_version_folder_is_checked_file_by_file(tmp_path: Path) -> None:
    FilesystemPolicyPublisher(tmp_path, run_id="run").publish(version=2, spec=SPEC, files=FILES)
    folder = step_folder(tmp_path, 2)
    manifest, files = verify_policy(folder, run_id="run", version=2)
    assert (manifest.version, files) == (2, FILES)
    with pytest.raises(StaleRunError):
        verify_policy(folder, run_id="other", version=2)
    with pytest.raises(CorruptError, match="holds version 2, expected 3"):
        verify_policy(folder, run_id="run", version=3)
    (folder / ADAPTER_FILE).write_bytes(b"weighty")
    with pytest.raises(CorruptError, match="digest"):
        verify_policy(folder, run_id="run", version=2)


def test_nothing_temporary_is_left_behind(tmp_path: Path) -> None:
    publisher = FilesystemPolicyPublisher(tmp_path, run_id="run")
    publisher.publish(version=1, spec=SPEC, files=FILES)
    publisher.publish(version=1, spec=SPEC, files=FILES)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]

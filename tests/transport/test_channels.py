"""The contract of batch and policy channels, on every backend."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.transport.samples import SPEC, equal, micro_batch
from transport.batches.base import BatchReceiver, BatchSender
from transport.batches.filesystem import FilesystemBatchReceiver, FilesystemBatchSender
from transport.batches.memory import MemoryBatches, MemoryBatchReceiver, MemoryBatchSender
from transport.errors import CorruptError, DeadlineError, StaleRunError
from transport.files import STABLE, step_folder
from transport.weights.base import ADAPTER_FILE, PolicyPublisher, PolicyReader
from transport.weights.filesystem import FilesystemPolicyPublisher, FilesystemPolicyReader, verify_policy
from transport.weights.memory import MemoryPolicies

Batches = Callable[[int], tuple[BatchSender, BatchReceiver]]
FILES = {ADAPTER_FILE: b"weights", "canary.json": b"{}"}


@pytest.fixture(params=["filesystem", "memory"])
def batches(request: pytest.FixtureRequest, tmp_path: Path) -> Batches:
    channel = MemoryBatches(run_id="run")

    def make(rank: int = 0) -> tuple[BatchSender, BatchReceiver]:
        if request.param == "memory":
            return MemoryBatchSender(channel), MemoryBatchReceiver(channel, rank=rank)
        return (
            FilesystemBatchSender(tmp_path, run_id="run"),
            FilesystemBatchReceiver(tmp_path, run_id="run", rank=rank),
        )

    return make


@pytest.fixture(params=["filesystem", "memory"])
def policies(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[PolicyPublisher, PolicyReader]:
    if request.param == "memory":
        channel = MemoryPolicies(run_id="run")
        return channel, channel
    return FilesystemPolicyPublisher(tmp_path, run_id="run"), FilesystemPolicyReader(tmp_path, run_id="run")


def test_each_rank_receives_its_own_micro_batches(batches: Batches) -> None:
    sender, first = batches(0)
    _, second = batches(1)
    ranks = [[micro_batch(rank=r, index=i, of=2, seed=10 * r + i) for i in range(2)] for r in range(2)]
    sender.send(1, ranks)
    for receiver, sent in zip((first, second), ranks, strict=True):
        received = receiver.receive(1, timeout_s=1)
        assert received is not None
        assert all(equal(a, b) for a, b in zip(sent, received, strict=True))


def test_a_receiver_waits_for_a_step_that_comes_later(batches: Batches) -> None:
    sender, receiver = batches(0)
    timer = threading.Timer(0.1, sender.send, (1, [[micro_batch()]]))
    timer.start()
    assert receiver.receive(1, timeout_s=5) is not None
    timer.join()


def test_receiving_twice_gives_the_same_batch(batches: Batches) -> None:
    sender, receiver = batches(0)
    sender.send(1, [[micro_batch()]])
    first, again = receiver.receive(1, timeout_s=1), receiver.receive(1, timeout_s=1)
    assert first is not None
    assert again is not None
    assert equal(first[0], again[0])


def test_sending_a_step_again_replaces_it(batches: Batches) -> None:
    sender, receiver = batches(0)
    sender.send(1, [[micro_batch(seed=1)]])
    sender.send(1, [[micro_batch(seed=2)]])
    received = receiver.receive(1, timeout_s=1)
    assert received is not None
    assert equal(received[0], micro_batch(seed=2))


def test_a_wait_that_is_too_long_names_the_orchestrator(batches: Batches) -> None:
    _, receiver = batches(0)
    began = time.monotonic()
    with pytest.raises(DeadlineError, match=r"waited 0.05 s for the orchestrator to deliver batch 3"):
        receiver.receive(3, timeout_s=0.05)
    assert time.monotonic() - began < 2


def test_after_the_end_later_steps_are_none_and_earlier_ones_still_there(batches: Batches) -> None:
    sender, receiver = batches(0)
    sender.send(1, [[micro_batch()]])
    sender.finish(1)
    assert receiver.receive(1, timeout_s=1) is not None
    assert receiver.receive(2, timeout_s=1) is None


@pytest.mark.parametrize("wrong", [{"step": 2}, {"rank": 1}, {"of": 2}])
def test_a_sender_refuses_micro_batches_of_another_step_rank_or_number(batches: Batches, wrong: dict[str, int]) -> None:
    sender, _ = batches(0)
    with pytest.raises(CorruptError, match=r"\(step, rank, index, of\)"):
        sender.send(1, [[micro_batch(**wrong)]])  # type: ignore[arg-type]


def test_a_sender_refuses_micro_batches_of_another_run(batches: Batches) -> None:
    sender, _ = batches(0)
    with pytest.raises(StaleRunError, match="micro-batch of run other, this is run run"):
        sender.send(1, [[micro_batch(run_id="other")]])


def test_a_batch_left_by_another_run_is_refused(tmp_path: Path) -> None:
    FilesystemBatchSender(tmp_path, run_id="old").send(1, [[micro_batch(run_id="old")]])
    with pytest.raises(StaleRunError, match="belongs to run old, this is run run"):
        FilesystemBatchReceiver(tmp_path, run_id="run").receive(1, timeout_s=1)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("rank_0.msgpack", "flip", "has digest"),
        ("rank_0.msgpack", "truncate", "bytes, the manifest says"),
        ("rank_0.msgpack", "remove", "is missing, the manifest lists it"),
        ("manifest.json", "flip", "has digest"),
        ("manifest.json", "remove", "has no manifest.json"),
        (STABLE, "remove", "has no STABLE"),
    ],
)
def test_a_damaged_batch_is_refused(tmp_path: Path, name: str, damage: str, message: str) -> None:
    FilesystemBatchSender(tmp_path, run_id="run").send(1, [[micro_batch()]])
    path = step_folder(tmp_path, 1) / name
    data = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data[: len(data) // 2] if damage == "truncate" else data)
    with pytest.raises(CorruptError, match=message):
        FilesystemBatchReceiver(tmp_path, run_id="run").receive(1, timeout_s=1)


def test_a_rank_that_was_not_sent_is_named(tmp_path: Path) -> None:
    FilesystemBatchSender(tmp_path, run_id="run").send(1, [[micro_batch()]])
    with pytest.raises(CorruptError, match=r"holds step 1 with rank_0.msgpack; expected step 1 with rank_1.msgpack"):
        FilesystemBatchReceiver(tmp_path, run_id="run", rank=1).receive(1, timeout_s=1)


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

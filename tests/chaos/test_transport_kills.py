"""`kill -9` of the sender and the receiver: every step is trained exactly once, none lost, and nobody hangs."""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.transport.samples import equal, free_port, micro_batch
from transport import faults
from transport.batches.base import BatchReceiver, BatchSender
from transport.batches.filesystem import FilesystemBatchReceiver, FilesystemBatchSender
from transport.batches.zmq import ZmqBatchReceiver, ZmqBatchSender
from transport.folders import write_atomic

pytestmark = pytest.mark.chaos
CHECKPOINT_EVERY = 3
NUM_RANDOM_KILLS = int(os.environ.get("GRPO_TEST_KILLS", "60"))
"""How many of each transport; more are worth it where the transports change."""
SENDER_POINTS = [p for p in faults.POINTS if p.startswith("folder.") or p in ("batch.sent", "batch.removed")]
RECEIVER_POINTS = ["batch.received", "batch.acknowledged"]


class Channel:
    """What both processes know."""

    def __init__(self, kind: str, folder: Path, num_steps: int, train_s: float = 0.0) -> None:
        self.kind, self.folder, self.num_steps, self.port = kind, folder, num_steps, free_port()
        self.train_s = train_s
        self.sent, self.checkpoint = folder / "sent.json", folder / "checkpoint.json"

    def sender(self) -> BatchSender:
        if self.kind == "zmq":
            return ZmqBatchSender(self.folder / "batches", run_id="run", port=self.port, send_timeout_s=20)
        return FilesystemBatchSender(self.folder / "batches", run_id="run", send_timeout_s=20)

    def receiver(self) -> BatchReceiver:
        if self.kind == "zmq":
            return ZmqBatchReceiver(self.folder / "quarantine", run_id="run", port=self.port)
        return FilesystemBatchReceiver(self.folder / "batches", run_id="run")


def read(path: Path) -> list[int]:
    return list(json.loads(path.read_text())) if path.exists() else []


def send_all(channel: Channel) -> None:
    """An orchestrator: sends the steps in order, and after a restart goes on after the last that it had sent."""
    sent = read(channel.sent)
    with channel.sender() as sender:
        for step in range(len(sent) + 1, channel.num_steps + 1):
            sender.send(step, [[micro_batch(step=step, seed=step, lengths=(40,))]])
            sent.append(step)
            write_atomic(channel.sent, json.dumps(sent).encode(), durable=False)
        sender.finish(channel.num_steps)
        deadline = time.monotonic() + 20
        # Until the last is removed, too: with the sender's end removals end, wherever they are.
        while any((channel.folder / "batches").glob("step_*")) and time.monotonic() < deadline:
            time.sleep(0.01)


def train_all(channel: Channel) -> None:
    """A trainer: trains the steps in order, and after a restart goes on after its last checkpoint."""
    trained = read(channel.checkpoint)
    with channel.receiver() as receiver:
        if len(trained) == channel.num_steps:  # the sender may have ended with the step's removal
            receiver.checkpointed(channel.num_steps)
            return
        while (batches := receiver.receive(len(trained) + 1, timeout_s=20)) is not None:
            step = len(trained) + 1
            assert equal(batches[0], micro_batch(step=step, seed=step, lengths=(40,)))
            time.sleep(channel.train_s)
            trained.append(batches[0].step)
            if step % CHECKPOINT_EVERY == 0 or step == channel.num_steps:
                write_atomic(channel.checkpoint, json.dumps(trained).encode(), durable=False)
                receiver.checkpointed(step)


def start(work: Callable[[Channel], None], channel: Channel, kill_at: tuple[str, int] | None = None) -> int:
    """Forks a process that does `work`, and kills itself when it comes to a point for the n-th time."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        if kill_at is not None:
            left = [kill_at[1]]

            def kill(name: str) -> None:
                if name == kill_at[0]:
                    left[0] -= 1
                    if left[0] == 0:
                        os.kill(os.getpid(), signal.SIGKILL)

            faults.on_point = kill
        work(channel)
        status = 0
    finally:
        os._exit(status)


def wait_for_end(pid: int, timeout_s: float) -> int | None:
    """The process's status (negative for a signal), or None where it still runs."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return None


def run_to_the_end(channel: Channel, running: dict[Callable[[Channel], None], int]) -> None:
    """Restarts whoever was killed until both have ended by themselves."""
    deadline = time.monotonic() + 60
    while running:
        assert time.monotonic() < deadline, f"hangs: {[work.__name__ for work in running]}"
        for work, pid in list(running.items()):
            status = wait_for_end(pid, 0.01)
            if status == 0:
                del running[work]
            elif status is not None:
                assert status == -signal.SIGKILL, f"{work.__name__} ended with {status}"
                running[work] = start(work, channel)
    assert read(channel.checkpoint) == list(range(1, channel.num_steps + 1))


@pytest.mark.parametrize("kind", ["filesystem", "zmq"])
@pytest.mark.parametrize("nth", [1, 2, 5])
@pytest.mark.parametrize(
    ("work", "point"), [(send_all, p) for p in SENDER_POINTS] + [(train_all, p) for p in RECEIVER_POINTS]
)
def test_a_kill_at_every_point_of_a_delivery_loses_and_repeats_nothing(
    tmp_path: Path, kind: str, work: Callable[[Channel], None], point: str, nth: int
) -> None:
    channel = Channel(kind, tmp_path, num_steps=9)
    other = train_all if work is send_all else send_all
    running = {other: start(other, channel), work: start(work, channel, kill_at=(point, nth))}
    status = wait_for_end(running[work], 30)
    assert status == -signal.SIGKILL, f"never came to {point} for the {nth}. time"
    running[work] = start(work, channel)
    run_to_the_end(channel, running)


def test_a_receiver_killed_as_it_sets_a_corrupt_batch_aside_asks_for_it_again(tmp_path: Path) -> None:
    channel = Channel("filesystem", tmp_path, num_steps=3)
    sender = start(send_all, channel)
    deadline = time.monotonic() + 20
    while len(read(channel.sent)) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (tmp_path / "batches" / "step_000002" / "rank_0.msgpack").write_bytes(b"torn")
    receiver = start(train_all, channel, kill_at=("batch.quarantined", 1))
    assert wait_for_end(receiver, 20) == -signal.SIGKILL
    run_to_the_end(channel, {send_all: sender, train_all: start(train_all, channel)})


@pytest.mark.parametrize("kind", ["filesystem", "zmq"])
def test_kills_at_random_moments_lose_and_repeat_nothing(tmp_path: Path, kind: str) -> None:
    channel, rng = Channel(kind, tmp_path, num_steps=8 * NUM_RANDOM_KILLS + 50, train_s=0.005), random.Random(0)
    running = {work: start(work, channel) for work in (send_all, train_all)}
    for _ in range(NUM_RANDOM_KILLS):
        time.sleep(rng.uniform(0.001, 0.06))
        work = rng.choice([send_all, train_all])
        os.kill(running[work], signal.SIGKILL)
        status = wait_for_end(running[work], 60)
        assert status in (-signal.SIGKILL, 0)  # it may have come to its end before the last kills
        running[work] = start(work, channel)
    run_to_the_end(channel, running)

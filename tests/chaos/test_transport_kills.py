"""`kill -9` of the sender and the receiver: every step is trained exactly once, none lost, and nobody hangs."""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from grpo.transport.batches.filesystem import BatchReceiver, BatchSender, FilesystemBatchReceiver
from grpo.transport.batches.store import StepStore
from grpo.transport.batches.zmq import ZmqBatchReceiver, ZmqBatchSender
from grpo.transport.folders import write_atomic
from grpo.transport.keys import SharedKey
from grpo.transport.ports import free_port

from tests.chaos.kill_points import DISK_CALLS, start
from tests.support import until
from tests.transport.samples import equal, micro_batch

pytestmark = pytest.mark.chaos
CHECKPOINT_EVERY = 3
NUM_RANDOM_KILLS = int(os.environ.get("TEST_KILLS", "20"))
"""How many of each transport; more are worth it where the transports change."""
KEY = SharedKey("a secret of enough characters")


class Channel:
    """What both processes know."""

    def __init__(self, kind: str, folder: Path, num_steps: int, train_s: float = 0.0) -> None:
        self.kind, self.folder, self.num_steps, self.port = kind, folder, num_steps, free_port()
        self.batches, self.train_s, self.checkpoint = folder / "batches", train_s, folder / "checkpoint.json"

    def sender(self) -> BatchSender:
        def checkpointed() -> int:
            return len(self.trained())

        if self.kind == "zmq":
            return ZmqBatchSender(self.batches, run_id="run", port=self.port, key=KEY, checkpointed=checkpointed)
        return BatchSender(self.batches, run_id="run", checkpointed=checkpointed)

    def receiver(self) -> BatchReceiver:
        if self.kind == "zmq":
            return ZmqBatchReceiver(run_id="run", port=self.port, key=KEY)
        return FilesystemBatchReceiver(self.batches, run_id="run")

    def trained(self) -> list[int]:
        return list(json.loads(self.checkpoint.read_text())) if self.checkpoint.exists() else []


def send_all(channel: Channel) -> None:
    """An orchestrator: sends the steps in order, and after a restart goes on after the newest that is on disk."""
    store = StepStore(channel.batches, run_id="run")
    newest = max([len(channel.trained()), *store.steps()])
    with channel.sender() as sender:
        for step in range(newest + 1, channel.num_steps + 1):
            sender.send(step, [[micro_batch(step=step, seed=step, lengths=(40,))]])
        sender.finish(channel.num_steps)
        until(lambda: len(channel.trained()) == channel.num_steps, poll_s=0.01)


def train_all(channel: Channel) -> None:
    """A trainer: trains the steps in order, and after a restart goes on after its last checkpoint."""
    trained = channel.trained()
    with channel.receiver() as receiver:
        while len(trained) < channel.num_steps:
            step = len(trained) + 1
            batches = receiver.receive(step, timeout_s=120)
            assert batches is not None
            assert equal(batches[0], micro_batch(step=step, seed=step, lengths=(40,)))
            time.sleep(channel.train_s)
            trained.append(batches[0].step)
            if step % CHECKPOINT_EVERY == 0 or step == channel.num_steps:
                write_atomic(channel.checkpoint, json.dumps(trained).encode(), durable=False)


Work = Callable[[Channel], None]


def wait_for_end(pid: int, timeout_s: float) -> int | None:
    """The process's status (negative for a signal), or None where it still runs."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return None


def run_to_the_end(channel: Channel, running: dict[Work, int]) -> None:
    """Restarts whoever was killed until both have ended by themselves."""
    deadline = time.monotonic() + 300
    while running:
        assert time.monotonic() < deadline, f"hangs: {[work.__name__ for work in running]}"
        for work, pid in list(running.items()):
            status = wait_for_end(pid, 0.01)
            if status == 0:
                del running[work]
            elif status is not None:
                assert status == -signal.SIGKILL, f"{work.__name__} ended with {status}"
                running[work] = start(partial(work, channel))
    assert channel.trained() == list(range(1, channel.num_steps + 1))


@pytest.mark.parametrize("kind", ["filesystem", "zmq"])
@pytest.mark.parametrize("nth", [1, 4])
@pytest.mark.parametrize(
    ("work", "call"), [(send_all, call) for call in DISK_CALLS if call not in ("unlink", "rmdir", "replace", "fsync")]
)
def test_a_kill_at_every_call_of_a_delivery_loses_and_repeats_nothing(
    tmp_path: Path, kind: str, work: Work, call: str, nth: int
) -> None:
    channel = Channel(kind, tmp_path, num_steps=9)
    running = {train_all: start(partial(train_all, channel)), work: start(partial(work, channel), (call, nth))}
    assert wait_for_end(running[work], 120) == -signal.SIGKILL, f"never came to {call} for the {nth}. time"
    running[work] = start(partial(work, channel))
    run_to_the_end(channel, running)


@pytest.mark.parametrize("kind", ["filesystem", "zmq"])
def test_kills_at_random_moments_lose_and_repeat_nothing(tmp_path: Path, kind: str) -> None:
    channel, rng = Channel(kind, tmp_path, num_steps=8 * NUM_RANDOM_KILLS + 50, train_s=0.005), random.Random(0)
    running: dict[Work, int] = {work: start(partial(work, channel)) for work in (send_all, train_all)}
    for _ in range(NUM_RANDOM_KILLS):
        time.sleep(rng.uniform(0.001, 0.06))
        work = rng.choice([send_all, train_all])
        os.kill(running[work], signal.SIGKILL)
        status = wait_for_end(running[work], 120)
        assert status in (-signal.SIGKILL, 0)  # it may have come to its end before the last kills
        running[work] = start(partial(work, channel))
    run_to_the_end(channel, running)

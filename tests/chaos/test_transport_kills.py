"""`kill -9` at every call that writes and at random moments, of the senders and receivers of batches, and of those who
publish and take up versions: every step is trained once and none is lost, a version is seen whole or not at all, none
that is in use is removed, and nobody hangs."""

import json
import os
import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
from grpo.transport.batches.filesystem import BatchReceiver, BatchSender, FilesystemBatchReceiver
from grpo.transport.batches.store import StepStore
from grpo.transport.batches.zmq import ZmqBatchReceiver, ZmqBatchSender
from grpo.transport.folders import step_folder, write_atomic
from grpo.transport.keys import SharedKey
from grpo.transport.ports import free_port
from grpo.transport.weights.store import (
    ADAPTER_FILE,
    CANARY_FILE,
    HeldVersion,
    InUse,
    PolicyPublisher,
    PolicyReader,
    read_in_use,
    verify_policy,
    write_in_use,
)

from tests.chaos.kill_points import DISK_CALLS, Restarted
from tests.support import until
from tests.transport.samples import SPEC, equal, micro_batch

pytestmark = pytest.mark.chaos
CHECKPOINT_EVERY = 3
NUM_RANDOM_KILLS = int(os.environ.get("TEST_KILLS", "20"))
"""How many of each transport; more are worth it where the transports change."""
KEY = SharedKey("a secret of enough characters")
NUM_VERSIONS = 14
PINNED = frozenset({2, 3})
HELD = HeldVersion(snapshot=None, pins={"evaluation": 1})


class Batches:
    """Batches over one transport, as both processes know them."""

    def __init__(self, kind: str, folder: Path, num_steps: int = 9, train_s: float = 0.0) -> None:
        self._kind, self._num_steps, self._train_s, self._port = kind, num_steps, train_s, free_port()
        self._batches, self._checkpoint = folder / "batches", folder / "checkpoint.json"
        self.works: Mapping[str, Callable[[], object]] = {"sender": self.send_all, "receiver": self.train_all}

    def _sender(self) -> BatchSender:
        options = {"run_id": "run", "checkpointed": lambda: len(self.trained())}
        if self._kind == "zmq":
            return ZmqBatchSender(self._batches, port=self._port, key=KEY, **options)
        return BatchSender(self._batches, **options)  # type: ignore[arg-type]

    def _receiver(self) -> BatchReceiver:
        if self._kind == "zmq":
            return ZmqBatchReceiver(run_id="run", port=self._port, key=KEY)
        return FilesystemBatchReceiver(self._batches, run_id="run")

    def trained(self) -> list[int]:
        return list(json.loads(self._checkpoint.read_text())) if self._checkpoint.exists() else []

    def send_all(self) -> None:
        """An orchestrator: sends the steps in order, and after a restart goes on after the newest that is on disk."""
        newest = max([len(self.trained()), *StepStore(self._batches, run_id="run").steps()])
        with self._sender() as sender:
            for step in range(newest + 1, self._num_steps + 1):
                sender.send(step, [[micro_batch(step=step, seed=step, lengths=(40,))]])
            sender.finish(self._num_steps)
            until(lambda: len(self.trained()) == self._num_steps)

    def train_all(self) -> None:
        """A trainer: trains the steps in order, and after a restart goes on after its last checkpoint."""
        trained = self.trained()
        with self._receiver() as receiver:
            while len(trained) < self._num_steps:
                step = len(trained) + 1
                batches = receiver.receive(step, timeout_s=120)
                assert batches is not None
                assert equal(batches[0], micro_batch(step=step, seed=step, lengths=(40,)))
                time.sleep(self._train_s)
                trained.append(batches[0].step)
                if step % CHECKPOINT_EVERY == 0 or step == self._num_steps:
                    write_atomic(self._checkpoint, json.dumps(trained).encode(), durable=False)

    def check(self) -> None:
        """Only at the end is there something to be seen."""

    def check_end(self) -> None:
        assert self.trained() == list(range(1, self._num_steps + 1))


class Versions:
    """Versions from the process that publishes them to the one that takes them up."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._reader = folder, PolicyReader(folder, run_id="run")
        self.works: Mapping[str, Callable[[], object]] = {"publisher": self.publish_all, "reader": self.take_up_all}

    def files(self, version: int) -> dict[str, bytes]:
        """Large enough to be caught while they are written."""
        return {ADAPTER_FILE: b"%06d" % version * 20_000, CANARY_FILE: b'{"version": %d}' % version}

    def newest_in_use(self) -> int:
        used = read_in_use(self._folder, run_id="run")
        return -1 if used is None else used.newest

    def publish_all(self) -> None:
        """A trainer: publishes versions, each when the one before is in use; after a restart, the newest one again."""
        publisher = PolicyPublisher(self._folder, run_id="run", keep_last=2)
        for version in range(self._reader.latest() or 0, NUM_VERSIONS + 1):
            publisher.publish(version=version, spec=SPEC, files=self.files(version))
            until(lambda version=version: self.newest_in_use() >= version or version == NUM_VERSIONS, poll_s=0.001)  # type: ignore[misc]

    def take_up_all(self) -> None:
        """An orchestrator: takes up each version in turn and says so; two versions are pinned for good."""
        for version in range(self.newest_in_use() + 1, NUM_VERSIONS + 1):
            policy = until(partial(self._reader.poll, version), poll_s=0.001)
            assert policy is not None
            assert policy.small_files[CANARY_FILE] == self.files(version)[CANARY_FILE]
            pinned = {number for number in PINNED if number <= version}
            held = dict.fromkeys({version} | pinned, HELD)
            write_in_use(self._folder, InUse(run_id="run", versions=held, newest=version))

    def check(self) -> None:
        """What is visible is whole, and what was said to be in use is there."""
        used = read_in_use(self._folder, run_id="run")
        for version in [] if used is None else sorted(used.versions):
            assert self._reader.poll(version) is not None, f"version {version} is in use and gone"
        newest = self._reader.latest()
        if newest is not None and self._reader.poll(newest) is not None:
            _, held = verify_policy(step_folder(self._folder, newest), run_id="run", version=newest)
            assert held == self.files(newest)

    def check_end(self) -> None:
        self.check()
        there = {version for version in range(NUM_VERSIONS + 1) if self._reader.poll(version) is not None}
        assert there >= PINNED | {NUM_VERSIONS - 1, NUM_VERSIONS}
        assert not there & {0, 1, 4, 5, 6}
        assert [path.name for path in self._folder.glob(".step_*")] == []


MATRIX = [
    *(("batches", "sender", call, nth) for call in ("open", "mkdir", "rename") for nth in (1, 4)),
    *(("versions", "publisher", call, nth) for call in DISK_CALLS if call != "replace" for nth in (1, 9)),
    *(("versions", "reader", "replace", nth) for nth in (1, 9)),
]
"""What is delivered, who is killed, at which of its calls, and when it makes that call for the n-th time."""


@pytest.mark.parametrize(
    ("kind", "who", "call", "nth"),
    [(kind, *row) for what, *row in MATRIX for kind in (("filesystem", "zmq") if what == "batches" else ("versions",))],
)
def test_a_kill_at_every_call_loses_repeats_and_shows_halves_of_nothing(
    tmp_path: Path, kind: str, who: str, call: str, nth: int
) -> None:
    delivery = Versions(tmp_path) if kind == "versions" else Batches(kind, tmp_path)
    processes = Restarted(delivery.works, {who: (call, nth)})
    processes.to_the_end(delivery.check)
    assert processes.num_kills == 1, f"never came to {call} for the {nth}. time"
    delivery.check_end()


@pytest.mark.parametrize("kind", ["filesystem", "zmq"])
def test_kills_at_random_moments_lose_and_repeat_nothing(tmp_path: Path, kind: str) -> None:
    delivery, rng = Batches(kind, tmp_path, num_steps=8 * NUM_RANDOM_KILLS + 50, train_s=0.005), random.Random(0)
    processes = Restarted(delivery.works)
    for _ in range(NUM_RANDOM_KILLS):
        time.sleep(rng.uniform(0.001, 0.06))
        processes.kill(rng.choice([*delivery.works]))
    processes.to_the_end()
    delivery.check_end()

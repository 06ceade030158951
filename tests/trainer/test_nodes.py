"""`grpo-train` on two machines that meet at `rendezvous`: here two processes of this machine, one for each."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from grpo.trainer.errors import RankFailed
from grpo.trainer.launch import own_address
from grpo.transport.batches.filesystem import BatchSender
from grpo.transport.errors import START_AGAIN
from grpo.transport.folders import steps_in
from grpo.transport.ports import free_port
from grpo.transport.run import create_run

from tests.support import until, until_gone
from tests.trainer.forked import Forked, forked
from tests.trainer.models import tiny_batch

ARGUMENTS = ["--device", "cpu", "--recipe", "fp32", "--optimizer", "adamw", "--num_threads", "1"]
ARGUMENTS += ["--sequence_len", "128"]


class Nodes:
    """Machines that start the same command, and the orchestrator that sends them batches for two ranks."""

    def __init__(self, model: Path, tmp_path: Path, stack: ExitStack) -> None:
        self.run, self._logs, self._stack = create_run(tmp_path / "run"), tmp_path / "logs", stack
        self._arguments = ["--model", str(model), "--output_dir", str(self.run.path), "--run_id", self.run.run_id]
        self.sender = stack.enter_context(BatchSender(self.run.batches, run_id=self.run.run_id, num_ranks=2))

    def start(
        self, num: int, *more: str, interval: int = 1, timeout_s: int = 240, latecomers_s: int = 10
    ) -> list[Forked]:
        where = ["--rendezvous", f"127.0.0.1:{free_port()}", "--nodes", "2", *more]
        where += ["--wait_timeout_s", str(timeout_s), "--ckpt.interval", str(interval)]
        number, words = len(list(self._logs.glob("*"))), [*ARGUMENTS, *self._arguments, *where]
        return [
            self._stack.enter_context(forked(self._logs / str(number + one), words, LATECOMERS_S=str(latecomers_s)))
            for one in range(num)
        ]

    def send(self, step: int) -> None:
        place = {"run_id": self.run.run_id, "step": step}
        self.sender.send(step, [[tiny_batch((6, 9), rank=rank, **place)] for rank in (0, 1)])

    def wait_for(self, there: Callable[[], bool]) -> None:
        until(there, log=lambda: [path.read_text() for path in self._logs.glob("*/stderr")])

    def published(self) -> list[int]:
        return steps_in(self.run.broadcasts)

    def checkpoints(self) -> list[int]:
        return steps_in(self.run.checkpoints, part="trainer")


@pytest.fixture
def nodes(tiny_model: Path, tmp_path: Path) -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(tiny_model, tmp_path, stack)


def test_a_trainer_that_loses_a_machine_ends_with_75_and_goes_on_with_those_that_are_left(nodes: Nodes) -> None:
    both = nodes.start(2, "--min_nodes", "1")
    nodes.send(1)
    nodes.wait_for(lambda: nodes.checkpoints() == [1])
    workers = [one.pid for one in psutil.Process(both[1].process.pid).children(recursive=True)]
    both[1].process.kill()  # as a machine ends whose power fails: its workers end with the one that started them
    until_gone(workers)
    nodes.send(2)
    assert both[0].end() == START_AGAIN
    (left,) = nodes.start(1, "--min_nodes", "1", latecomers_s=1)
    nodes.wait_for(lambda: 2 in nodes.published())
    nodes.sender.finish(2)
    assert left.end() == 0


def test_sigusr1_to_every_machine_ends_a_trainer_with_75_and_a_checkpoint(nodes: Nodes) -> None:
    both = nodes.start(2, interval=100)
    nodes.send(1)
    nodes.wait_for(lambda: 1 in nodes.published())
    for node in both:
        assert node.process.pid is not None
        os.kill(node.process.pid, signal.SIGUSR1)
    assert [node.end() for node in both] == [START_AGAIN, START_AGAIN]
    assert nodes.checkpoints() == [1]


def test_a_machine_that_does_not_come_is_waited_for_and_named(nodes: Nodes) -> None:
    (alone,) = nodes.start(1, timeout_s=3)
    assert alone.end() == START_AGAIN
    assert "did not come" in alone.stderr


def test_a_machine_tells_the_others_the_address_by_which_it_leaves_and_not_its_loopback_one() -> None:
    assert own_address("192.0.2.7:1", timeout_s=1) == own_address("localhost:1", timeout_s=1)


def test_a_place_to_meet_that_the_dns_does_not_know_is_named() -> None:
    with pytest.raises(RankFailed, match=r"nowhere\.invalid"):
        own_address("nowhere.invalid:1", timeout_s=0)

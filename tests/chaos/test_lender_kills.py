"""`kill -9` of the process that lends the base weights and of the trainer that borrows them: the trainer goes on with
what it has, borrows anew of the next lender, and comes to the same weights, bit for bit; one copy is left each time."""

import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.chaos.training import Training, batch_of, start
from tests.trainer.forked import forks
from tests.trainer.lent import lend_forever
from tests.trainer.models import save_tiny_model
from transport.batches.filesystem import FilesystemBatchSender
from transport.run import found_run
from transport.shared_base.usage import Usage, usage_of
from transport.status import read_status

pytestmark = pytest.mark.chaos

WAIT_S = 60.0
NUM_BATCHES = 6


def until(condition: Callable[[], bool], *processes: BaseProcess) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert all(process.is_alive() for process in processes)
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def kill(process: BaseProcess) -> None:
    process.kill()
    process.join(WAIT_S)


class Run:
    """A run whose batches are sent one by one."""

    def __init__(self, folder: Path, model: Path, context: ForkServerContext) -> None:
        founded = found_run(folder)
        self.training = Training(folder=founded, model=model, optimizer="adamw")
        self._context, self._sender = context, FilesystemBatchSender(founded.batches, run_id=founded.run_id)
        self._num_sent = 0

    def lender(self, model: Path) -> BaseProcess:
        process = self._context.Process(target=lend_forever, args=(model, self.training.folder.path))
        process.start()
        return process

    def trainer(self, *, resume_step: int | None = None, colocate: bool = True) -> BaseProcess:
        changes = {"colocate": colocate, "wait_timeout_s": WAIT_S}
        return start(self._context, self.training.settings(resume_step=resume_step) | changes)

    def train(self, trainer: BaseProcess, *, to: int) -> None:
        """Sends batches, and returns when the version is there that follows from them."""
        for step in range(self._num_sent + 1, to + 1):
            self._sender.send(step, [[batch_of(step, self.training.folder.run_id)]])
        self._num_sent = max(self._num_sent, to)
        until(lambda: f"step_{to:06d}" in self.training.versions(), trainer)

    def close(self) -> None:
        self._sender.close()


def mapped(process: BaseProcess) -> list[Usage]:
    assert process.pid is not None
    return usage_of(process.pid)


def share(trainer: BaseProcess, lender: BaseProcess) -> bool:
    """Whether what the trainer maps is the lender's memory, and nothing else."""
    inodes = [use.inode for use in mapped(trainer)]
    return bool(inodes) and inodes == [use.inode for use in mapped(lender)]


@pytest.mark.timeout(200)
def test_a_trainer_outlives_lenders_and_borrows_of_the_next(tmp_path: Path) -> None:
    context = forks()
    model = save_tiny_model(tmp_path / "model")
    straight, run = (Run(tmp_path / name, model, context) for name in ("straight", "run"))
    alone = straight.trainer(colocate=False)
    processes = [alone]
    try:
        straight.train(alone, to=NUM_BATCHES)
        kill(alone)
        first, trainer = run.lender(model), run.trainer()
        processes += [first, trainer]
        run.train(trainer, to=2)
        assert share(trainer, first)
        kill(first)
        run.train(trainer, to=3)  # on what it has
        second = run.lender(model)
        processes.append(second)
        until(lambda: share(trainer, second), trainer, second)  # while it waits for a batch
        run.train(trainer, to=4)
        kill(trainer)
        trainer = run.trainer(resume_step=-1)  # borrows of the living one
        processes.append(trainer)
        run.train(trainer, to=NUM_BATCHES)
        assert share(trainer, second)
        assert run.training.versions() == straight.training.versions()

        kill(second)
        processes.append(run.lender(save_tiny_model(tmp_path / "other", rms_norm_eps=1e-5)))
        trainer.join(WAIT_S)
        assert trainer.exitcode == 1
        said = read_status(run.training.folder.status / "train.json")
        assert said is not None
        assert said["state"] == "failed"
        assert said["message"].startswith("ModelError: the server lends the base ")
        assert len(run.training.versions()) == NUM_BATCHES + 1
    finally:
        for process in processes:
            kill(process)
        run.close()
        straight.close()

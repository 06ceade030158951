"""`kill -9` of the exporter of the base weights, and of the trainer that imports them: the trainer ends with it, and
started again by the same command it comes to the weights of a run that nothing interrupts, bit for bit."""

from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest
from grpo.transport.batches.filesystem import BatchSender
from grpo.transport.run import create_run

from tests.chaos.training import Training, batch_of, start
from tests.support import END_S, until
from tests.trainer.exported import export_forever
from tests.trainer.forked import forks
from tests.trainer.models import save_tiny_model

pytestmark = pytest.mark.chaos

NUM_BATCHES = 6


def kill(process: BaseProcess) -> None:
    process.kill()
    process.join(END_S)


class Run:
    """A run whose batches are sent one by one."""

    def __init__(self, folder: Path, model: Path, context: ForkServerContext, *, colocate: bool) -> None:
        founded = create_run(folder)
        self.training = Training(folder=founded, model=model, optimizer="adamw")
        self._context, self._colocate = context, colocate
        self._sender = BatchSender(founded.batches, run_id=founded.run_id)
        self._num_sent = 0
        self.processes: list[BaseProcess] = []

    def exporter(self) -> BaseProcess:
        process = self._context.Process(target=export_forever, args=(self.training.model, self.training.folder.path))
        process.start()
        self.processes.append(process)
        return process

    def trainer(self) -> BaseProcess:
        changes = {"colocate": self._colocate, "wait_timeout_s": END_S}
        self.processes.append(start(self._context, self.training.settings() | changes))
        return self.processes[-1]

    def train(self, trainer: BaseProcess, *, to: int) -> None:
        """Sends batches, and returns when the version is there that follows from them."""
        for step in range(self._num_sent + 1, to + 1):
            self._sender.send(step, [[batch_of(step, self.training.folder.run_id)]])
        self._num_sent = max(self._num_sent, to)
        until(lambda: f"step_{to:06d}" in self.training.versions(), trainer)

    def close(self) -> None:
        for process in self.processes:
            kill(process)
        self._sender.close()


def shared_maps(process: BaseProcess) -> list[str]:
    """What a process maps of shared base weights."""
    return [m.path for m in psutil.Process(process.pid).memory_maps() if "grpo-base" in m.path]


@pytest.mark.timeout(900)
def test_a_trainer_ends_with_its_exporter_and_goes_on_from_its_checkpoint_with_the_next(tmp_path: Path) -> None:
    context, model = forks(), save_tiny_model(tmp_path / "model")
    straight = Run(tmp_path / "straight", model, context, colocate=False)
    run = Run(tmp_path / "run", model, context, colocate=True)
    try:
        straight.train(straight.trainer(), to=NUM_BATCHES)
        first, trainer = run.exporter(), run.trainer()
        run.train(trainer, to=3)
        assert len(shared_maps(trainer)) == 1
        kill(first)
        trainer.join(END_S)
        assert trainer.exitcode == 1  # an error that the command turns into 75
        second, trainer = run.exporter(), run.trainer()
        run.train(trainer, to=4)
        kill(trainer)
        trainer = run.trainer()
        run.train(trainer, to=NUM_BATCHES)
        assert second.is_alive()
        assert run.training.versions() == straight.training.versions()
    finally:
        run.close()
        straight.close()
    assert not [file for file in Path("/dev/shm").iterdir() if "grpo" in file.name]

"""`grpo-train` in processes that are made quickly: torch is imported once, in a server that forks them."""

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import grpo.trainer.startup  # noqa: F401  what takes long
from grpo.trainer import launch
from grpo.trainer.cli import main
from grpo.transport.ports import free_port

from tests.support import END_S

ROOT = Path(__file__).parents[2]


def forks() -> ForkServerContext:
    """Makes processes that have this module imported already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "tests.trainer.models"])
    return context


class Forked:
    """One process of `grpo-train` with `arguments`, which writes its standard output and error into files."""

    def __init__(self, folder: Path, arguments: Sequence[str], environment: dict[str, str]) -> None:
        """`folder` is made for the files."""
        folder.mkdir(parents=True)
        self._outputs = (folder / "stdout", folder / "stderr")
        self.process: BaseProcess = forks().Process(
            target=_main, args=(list(arguments), environment, tuple(map(str, self._outputs)))
        )
        self.process.start()

    @property
    def stdout(self) -> str:
        return self._outputs[0].read_text()

    @property
    def stderr(self) -> str:
        return self._outputs[1].read_text()

    def end(self) -> int:
        """Its exit status."""
        self.process.join(END_S)
        assert self.process.exitcode is not None, f"did not end within {END_S:g} s: {self.stderr}"
        return self.process.exitcode


@contextmanager
def forked(folder: Path, arguments: Sequence[str], **environment: str) -> Iterator[Forked]:
    """A process that is killed at the end where it still runs."""
    one = Forked(folder, arguments, environment)
    try:
        yield one
    finally:
        one.process.kill()
        one.process.join()


@contextmanager
def forked_ranks(folder: Path, arguments: Sequence[str], *, num_ranks: int = 2) -> Iterator[list[Forked]]:
    """The ranks of one trainer, with torchrun's variables and without its agent."""
    group = rank_variables(num_ranks)
    with ExitStack() as stack:
        ranks = []
        for rank in range(num_ranks):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(stack.enter_context(forked(folder / f"rank_{rank}", arguments, **group, **place)))
        yield ranks


def run_ranks(worker: Callable[..., None], *arguments: Path, num_ranks: int) -> None:
    """Calls `worker` in a process for each rank, with torchrun's variables as its last argument, and waits for all."""
    group = rank_variables(num_ranks)
    ranks = [forks().Process(target=worker, args=(*arguments, group | {"RANK": str(n)})) for n in range(num_ranks)]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(END_S)
            assert process.exitcode == 0
    finally:
        for process in ranks:
            process.kill()
            process.join()


def rank_variables(num_ranks: int) -> dict[str, str]:
    """torchrun's variables that are the same for all ranks of this machine."""
    return {
        "TORCHELASTIC_RUN_ID": "test",
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _main(arguments: list[str], environment: dict[str, str], outputs: tuple[str, str]) -> None:
    for descriptor, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ.update(environment)
    os.chdir(ROOT)
    launch.LATECOMERS_S = int(os.environ.get("LATECOMERS_S", "10"))
    sys.argv = ["grpo-train", *arguments]
    main()

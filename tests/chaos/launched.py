"""A real `grpo configs/quickstart`, whose processes are found and killed by tests."""

import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.kills import MODULES, is_engine
from tests.e2e.runs import END_S, ROOT, until

MARK = "GRPO_CHAOS_TEST"
SMALL = ("--orch.batch_size", "32", "--orch.sampling.max_tokens", "4", "--orch.eval.num_examples", "0")


def marked(mark: str) -> list[psutil.Process]:
    """Whatever lives and was started with this mark in its environment, wherever it has got to."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                found.append(process)
    return found


class Launched:
    """A launcher that was started, and all processes that carry its mark in their environment."""

    def __init__(self, output_dir: Path, *options: str) -> None:
        self.output_dir, self.mark = output_dir, uuid.uuid4().hex
        long = () if "--max_steps" in options else ("--max_steps", "1000")
        arguments = ["configs/quickstart", "--output_dir", str(output_dir), *SMALL, *long, *options]
        self.launcher = subprocess.Popen(
            [sys.executable, "-m", "grpo.cli", *arguments],
            cwd=ROOT,
            env=os.environ | {MARK: self.mark},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def program(self, role: str) -> psutil.Process | None:
        """The program itself, not what it started."""
        for process in marked(self.mark):
            with suppress(psutil.Error):
                if process.cmdline()[1:4] == ["-P", "-m", MODULES[role]] and not is_engine(process):
                    return process
        return None

    def until(self, reached: Callable[[], object]) -> None:
        """Fails where the run ends before, or does not get that far."""
        until(reached, self.launcher)

    def end(self) -> tuple[int, str]:
        """Exit code and standard error; fails unless everything has ended in time."""
        _, errors = self.launcher.communicate(timeout=END_S)
        until(lambda: not marked(self.mark), log=lambda: str(marked(self.mark)))
        return self.launcher.returncode, errors

    def close(self) -> None:
        """Kills what is left."""
        self.launcher.kill()
        for process in marked(self.mark):
            process.kill()
        self.launcher.communicate()

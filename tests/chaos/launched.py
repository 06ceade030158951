"""A real `grpo configs/quickstart`, whose processes are found and killed by tests."""

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.kills import MODULES, is_engine

ROOT = Path(__file__).parent.parent.parent
MARK = "GRPO_CHAOS_TEST"
END_S = 90.0
"""How long a whole run may take to end on a machine that does much else."""
SMALL = (*("--orch.batch_size", "32", "--orch.eval.eval_base_model", "false", "--orch.sampling.max_tokens", "4"),)


def marked(mark: str) -> list[psutil.Process]:
    """Whatever lives and was started with this mark in its environment, wherever it has got to."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                found.append(process)
    return found


def expect_nothing_left(mark: str, within_s: float) -> None:
    """Returns when nothing with this mark lives; fails after the time."""
    deadline = time.monotonic() + within_s
    while left := marked(mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


class Run:
    """A launcher that was started, and all processes that carry its mark in their environment."""

    def __init__(self, output_dir: Path, *options: str) -> None:
        self.output_dir, self.mark = output_dir, uuid.uuid4().hex
        long = () if "--max_steps" in options else ("--max_steps", "1000")
        arguments = ["configs/quickstart", "--output_dir", str(output_dir), *SMALL, *long, *options]
        self.launcher = subprocess.Popen(
            [sys.executable, "-m", "grpo.cli", *arguments],
            cwd=ROOT,
            env=os.environ | {MARK: self.mark},
            stdout=subprocess.PIPE,
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

    def until(self, reached: Callable[[], bool], timeout_s: float = 240.0) -> None:
        """Fails where the run ends before, or does not get that far."""
        deadline = time.monotonic() + timeout_s
        while not reached():
            assert self.launcher.poll() is None, self.launcher.communicate()[1]
            assert time.monotonic() < deadline, "the run did not get that far"
            time.sleep(0.05)

    def until_step(self, step: int) -> None:
        """Until so many lines are in metrics.jsonl."""
        metrics = self.output_dir / "metrics.jsonl"
        self.until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= step)

    def end(self, timeout_s: float = END_S) -> tuple[int, str]:
        """Exit code and standard error; fails unless everything has ended in time."""
        _, errors = self.launcher.communicate(timeout=timeout_s)
        expect_nothing_left(self.mark, END_S)
        return self.launcher.returncode, errors

    def close(self) -> None:
        """Kills what is left."""
        self.launcher.kill()
        for process in marked(self.mark):
            process.kill()
        self.launcher.communicate()

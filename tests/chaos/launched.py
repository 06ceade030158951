"""A real `grpo configs/quickstart`, whose processes are found and killed by tests and by `benchmarks.kills`."""

import os
import re
import subprocess
import sys
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from tests.e2e.runs import ROOT
from tests.support import END_S, until

MARK = "CHAOS_TEST"
MODULES = {"infer": "grpo.infer.cli", "train": "grpo.trainer.cli", "orch": "grpo.orchestrator.cli"}
SMALL = {
    "--orch.batch_size": "32",
    "--orch.sampling.max_tokens": "4",
    "--orch.eval.num_examples": "0",
    "--max_steps": "1000",
}


class Launched:
    """A launcher that was started, and all processes that carry its mark in their environment."""

    def __init__(self, output_dir: Path, *options: str) -> None:
        """`options` are words of the command line, and stand before those of `SMALL`."""
        self._mark, self._seen = uuid.uuid4().hex, set[psutil.Process]()
        small = [word for key, value in SMALL.items() if key not in options for word in (key, value)]
        self.launcher = subprocess.Popen(
            [sys.executable, "-m", "grpo.cli", "configs/quickstart", "--output_dir", output_dir, *small, *options],
            cwd=ROOT,
            env=os.environ | {MARK: self._mark},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def living(self) -> list[psutil.Process]:
        """Whatever lives and was started by the launcher, wherever it has got to. An engine gives itself a name, over
        its environment: it is known by having been seen below the others."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self._mark:
                    self._seen.update((process, *process.children(recursive=True)))
        return [process for process in self._seen if _lives(process)]

    def program(self, role: str) -> psutil.Process | None:
        """One of `MODULES` itself and not what it started, the `launcher`, the server's `engine`, or an environment's
        `worker`; None where there is none now."""
        for process in self.living():
            with suppress(psutil.Error):
                if role == _role(process) or (role == "launcher" and process.pid == self.launcher.pid):
                    return process
        return None

    def until(self, reached: Callable[[], object]) -> None:
        """Fails where the run ends before, or does not get that far."""
        until(reached, self.launcher)

    def end(self) -> tuple[int, str]:
        """Exit code and standard error; fails unless everything has ended in time."""
        _, errors = self.launcher.communicate(timeout=END_S)
        until(lambda: not self.living(), log=lambda: str(self.living()))
        return self.launcher.returncode, errors

    def close(self) -> None:
        """Kills what is left."""
        for process in self.living():
            with suppress(psutil.Error):
                process.kill()
        self.launcher.communicate()


def _role(process: psutil.Process) -> str | None:
    words, parent = process.cmdline(), process.parent()
    if any("grpo.orchestrator.workers" in word for word in words):
        return "worker"
    # vLLM starts its engine anew, or forks it from the server, with the server's words then.
    if parent is not None and parent.cmdline()[1:4] == ["-P", "-m", MODULES["infer"]]:
        return "engine" if words == parent.cmdline() or "EngineCore" in " ".join(words) else None
    return next((role for role, module in MODULES.items() if words[1:4] == ["-P", "-m", module]), None)


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def shared() -> set[str]:
    """This user's files in /dev/shm that no process has in its memory."""
    mapped = set[str]()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            mapped.update(re.findall(r" /dev/shm/(\S+)", maps.read_text()))
    return {file.name for file in Path("/dev/shm").iterdir()} - mapped

"""Types the commands of docs/first_run.md as they stand there, with tiny models under the published names."""

import os
import resource
import shlex
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.hub_cache import put_model, put_sums
from tests.e2e.runs import PROGRAMS
from tests.pages import Page
from tests.support import END_S

PAGE = Page("docs/first_run.md")
NOT_HERE = ("python", "pip ", "hf ")
"""Beginnings of the page's commands that need a network."""
SMALL = {
    "GRPO_ORCH_BATCH_SIZE": "16",
    "GRPO_ORCH_EVAL__NUM_EXAMPLES": "2",
    "GRPO_ORCH_SAMPLING__MAX_TOKENS": "24",
}
"""Settings by which the page's runs are small enough for two cores; the command line overrules them."""
SHORTER = {
    "--max_steps 100": "--max_steps 1",
    "--max_steps 50": "--max_steps 1",
    "max_tokens 4096": "max_tokens 48",
    "--num_examples 100": "--num_examples 2",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Typed:
    """A command that has ended."""

    line: str
    code: int
    said: str
    """Standard output, then standard error."""
    took_s: float
    cpu_s: float
    """Seconds of all cores together."""


class Desk:
    """An empty folder and a Hugging Face cache that has what the page fetches."""

    def __init__(self, folder: Path, family: str) -> None:
        self.folder, self.home = folder / "work", folder / "huggingface"
        self.folder.mkdir(parents=True)
        self.model = put_model(self.home / "hub", "Qwen/Qwen3-4B", family)
        put_sums(self.home / "hub", "openai/gsm8k")
        for name, text in PAGE.files.items():
            (self.folder / name).write_text(text)

    def type(self, line: str, said: str = "", limit_s: float = END_S) -> Typed:
        """Types a line of the page; `said` goes to standard input."""
        for long, short in SHORTER.items():
            line = line.replace(long, short)
        program, *words = shlex.split(line)
        if words[0] == "view" and "--export" not in words:
            words += ["--export", "view.html"]  # the page that it would serve
        began_s, began_cpu_s = time.monotonic(), _children_s()
        ended = subprocess.run(
            [PROGRAMS / program, *words],
            cwd=self.folder,
            env=os.environ | SMALL | {"HF_HOME": str(self.home), "HF_HUB_OFFLINE": "1"},
            input=said,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
        return Typed(
            line=line,
            code=ended.returncode,
            said=ended.stdout + ended.stderr,
            took_s=time.monotonic() - began_s,
            cpu_s=_children_s() - began_cpu_s,
        )


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def lines() -> list[str]:
    """Returns the commands of the page that need no network, in their order."""
    return [line for line in PAGE.commands() if not line.startswith(NOT_HERE)]

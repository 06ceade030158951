"""Types the commands of docs/first_run.md as they stand there, with tiny models under the published names."""

import os
import resource
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.hub_cache import put_model, put_sums
from tests.e2e.runs import PROGRAMS
from tests.pages import Page
from tests.support import END_S

PAGE, ENVIRONMENTS = Page("docs/first_run.md"), Page("docs/environments.md")
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
        (self.folder / "code_word.py").write_text(ENVIRONMENTS.files["code_word.py"])

    def type(self, line: str, said: str = "", limit_s: float = END_S) -> Typed:
        """Types a line of the page; `said` goes to standard input."""
        for long, short in SHORTER.items():
            line = line.replace(long, short)
        program, *words = shlex.split(line)
        options: dict[str, Any] = {
            "cwd": self.folder,
            "env": os.environ | SMALL | {"HF_HOME": str(self.home), "HF_HUB_OFFLINE": "1"},
            "text": True,
        }
        began_s, began_cpu_s = time.monotonic(), _children_s()
        if words[0] == "serve":
            code, heard = _served([PROGRAMS / program, *words], said, limit_s=limit_s, **options)
            return _typed(line, code, heard, began_s, began_cpu_s)
        if words[0] == "view" and "--export" not in words:
            words += ["--export", "view.html"]  # the page that it would serve
        ended = subprocess.run(
            [PROGRAMS / program, *words], input=said, capture_output=True, timeout=limit_s, **options
        )
        return _typed(line, ended.returncode, ended.stdout + ended.stderr, began_s, began_cpu_s)


def _typed(line: str, code: int, said: str, began_s: float, began_cpu_s: float) -> Typed:
    took_s, cpu_s = time.monotonic() - began_s, _children_s() - began_cpu_s
    return Typed(line=line, code=code, said=said, took_s=took_s, cpu_s=cpu_s)


def _served(command: Sequence[str | Path], question: str, *, limit_s: float, **options: Any) -> tuple[int, str]:
    """Starts a server, asks it one question over the OpenAI API when it says where it is, and ends it with Ctrl-C.
    Returns 0 where it has answered and ended as Ctrl-C ends it, and what it said."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options) as process:
        assert process.stdout is not None
        heard = ""
        try:
            for line in process.stdout:
                heard += line
                if line.startswith("http"):
                    break
            else:
                return process.wait() or 1, heard
            url, model = line.split()[0], line.split()[2]
            asked = {"model": model, "messages": [{"role": "user", "content": question.strip()}], "max_tokens": 4}
            answer = httpx.post(f"{url}/chat/completions", json=asked, timeout=limit_s)
            heard += answer.text
        finally:
            process.send_signal(signal.SIGINT)
        heard += process.stdout.read()
    as_expected = answer.is_success and process.returncode == 128 + signal.SIGINT
    return 0 if as_expected else process.returncode or 1, heard


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def lines() -> list[str]:
    """Returns the commands of the page that need no network, in their order."""
    return [line for line in PAGE.commands() if not line.startswith(NOT_HERE)]

"""The commands of README.md and docs/runs.md as words, for tests that run them."""

import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
README, RUNS = ((ROOT / page).read_text() for page in ("README.md", "docs/runs.md"))
NUM_STEPS = 14
"""Of the one run that several modules look at."""


def blocks(language: str) -> list[str]:
    """The code blocks of one language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", f"{README}\n{RUNS}", flags=re.M | re.S)
    return [text for name, text in found if name == language]


def command(start: str) -> list[str]:
    """The only command that starts so, as words, with the interpreter's folder before the program."""
    (found,) = {line for block in blocks("sh") for line in block.splitlines() if line.startswith(start)}
    program, *rest = shlex.split(found)
    return [str(Path(sys.executable).parent / program), *rest]


def into(words: list[str], folder: Path) -> list[str]:
    """The same command with its output below `folder`."""
    return [str(folder / word) if word.startswith("outputs/") else word for word in words]


def run(
    words: list[str], folder: Path, environment: Mapping[str, str], cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, with its output below `folder`."""
    return subprocess.run(into(words, folder), cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)

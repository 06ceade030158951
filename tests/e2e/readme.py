"""The commands of README.md and docs/runs.md as words, for tests that run them."""

import re
import shlex

from tests.e2e.runs import ROOT

README, RUNS = ((ROOT / page).read_text() for page in ("README.md", "docs/runs.md"))


def blocks(language: str, text: str = f"{README}\n{RUNS}") -> list[str]:
    """The code blocks of one language."""
    return [
        block for name, block in re.findall(r"^```(\w*).*?\n(.*?)^```", text, flags=re.M | re.S) if name == language
    ]


def command(start: str) -> list[str]:
    """The words after the program of the only command that starts so."""
    (found,) = {line for block in blocks("sh") for line in block.splitlines() if line.startswith(start)}
    return shlex.split(found)[1:]

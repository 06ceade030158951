"""The pages for people, README.md and docs/, taken apart: code blocks, files, commands, tables."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A code block."""

    language: str
    title: str | None
    """The file that it is; None where it is none."""
    text: str
    line: int
    """Number of its first line on the page, from 1."""


class Page:
    """One page."""

    def __init__(self, path: str | Path) -> None:
        """`path` below the repository."""
        self.path = ROOT / path
        self.text = self.path.read_text()

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """All code blocks."""
        return tuple(self._blocks())

    def _blocks(self) -> Iterator[Block]:
        for found in re.finditer(r"^```(\w*)([^\n]*)\n(.*?)^```$", self.text, flags=re.M | re.S):
            title = re.search(r'title="([\w.]+)"', found[2])
            line = self.text[: found.start()].count("\n") + 2
            yield Block(language=found[1], title=title and title[1], text=found[3], line=line)

    def of(self, language: str) -> list[Block]:
        """Returns the blocks of one language that are no files."""
        return [block for block in self.blocks if block.language == language and block.title is None]

    @property
    def files(self) -> dict[str, str]:
        """The files of the page, by name."""
        return {block.title: block.text for block in self.blocks if block.title is not None}

    def write_files(self, folder: Path) -> None:
        """Writes the page's files to a folder, with the presets beside them."""
        for name, text in self.files.items():
            (folder / name).write_text(text)
        (folder / "configs").symlink_to(ROOT / "configs")

    def commands(self, start: str = "") -> list[str]:
        """Returns the command lines that begin so."""
        texts = [block.text.replace("\\\n", " ") for language in ("sh", "bash") for block in self.of(language)]
        return [line for text in texts for line in text.splitlines() if line.startswith(start)]

    def command(self, start: str) -> list[str]:
        """Returns the words after the program of the only command that begins so."""
        [found] = set(self.commands(start))
        return shlex.split(found)[1:]

    def table(self, heading: str) -> list[tuple[str, ...]]:
        """Returns the rows of the only table whose first row is `heading`."""
        [found] = re.findall(rf"^{re.escape(heading)}\n\|[-|]+\|\n((?:\|.*\n)+)", self.text, flags=re.M)
        return [tuple(cell.strip() for cell in row.strip("|").split(" | ")) for row in found.splitlines()]


def in_backticks(cell: str) -> list[str]:
    """Returns what stands in backticks."""
    return re.findall(r"`([^`]+)`", cell)


README = Page("README.md")
PAGES = (README, *(Page(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").glob("*.md"))))

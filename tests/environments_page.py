"""docs/environments.md, taken apart."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/environments.md").read_text()


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A code block."""

    language: str
    title: str | None
    """The file that it is; None where it is none."""
    text: str
    line: int
    """Of the page, from 1."""


def _blocks() -> Iterator[Block]:
    for found in re.finditer(r'^```(\w*)(?: title="([\w.]+)")?\n(.*?)^```$', PAGE, flags=re.M | re.S):
        language, title, text = found.groups()
        yield Block(language=language, title=title, text=text, line=PAGE[: found.start()].count("\n") + 2)


BLOCKS = tuple(_blocks())


def of(language: str) -> list[Block]:
    """The blocks of one language, but for files."""
    return [block for block in BLOCKS if block.language == language and block.title is None]


def commands(start: str) -> list[str]:
    """The command lines that start so."""
    return [line for block in of("sh") for line in block.text.splitlines() if line.startswith(start)]


def write_files(folder: Path) -> None:
    """The page's files, and the presets beside them."""
    for block in BLOCKS:
        if block.title is not None:
            (folder / block.title).write_text(block.text)
    (folder / "configs").symlink_to(ROOT / "configs")


def table(heading: str) -> list[tuple[str, ...]]:
    """The rows of the only table whose first row is `heading`."""
    [found] = re.findall(rf"^{re.escape(heading)}\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE, flags=re.M)
    return [tuple(cell.strip() for cell in row.strip("|").split(" | ")) for row in found.splitlines()]


def named(cell: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", cell)

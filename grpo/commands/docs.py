"""`grpo docs [PAGE]`: the documentation's pages, which are installed with the program."""

import argparse
import difflib
import re
from pathlib import Path

import grpo
from grpo.transport.errors import UserError

EPILOG = "exit codes: 0 done; 2 there is no such page"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("page", metavar="PAGE", nargs="?", help="a page to print, as Markdown; none: lists all")


def main(options: argparse.Namespace) -> int:
    """Prints the page, or the names and titles of all, and returns the exit code."""
    package = Path(grpo.__file__).parent
    folder = package / "docs" if (package / "docs").is_dir() else package.parent / "docs"  # a checkout
    pages = {path.stem: path for path in sorted(folder.glob("*.md"))}
    if options.page is None:
        for name, path in pages.items():
            [title] = re.findall(r"^# (.+)", path.read_text(), flags=re.M)[:1]
            print(f"{name:<18} {title}")
    elif options.page in pages:
        print(pages[options.page].read_text(), end="")
    else:
        close = difflib.get_close_matches(options.page, pages, n=1)
        raise UserError(f"no page {options.page!r}; " + (f"did you mean {close[0]}?" if close else "see grpo docs"))
    return 0

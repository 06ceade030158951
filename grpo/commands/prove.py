"""`grpo prove RUN`: what is proved of a run, what is not, and whether anything is broken."""

import argparse
import json
import textwrap
from pathlib import Path

from grpo.proofs import Page
from grpo.service_proofs import prove
from grpo.transport.logs import printable

_WIDTH = 120
EPILOG = """\
It reads the run's folder alone, or a copy of it, and needs neither torch nor a network. `grpo docs proofs` says what
each part proves, and what it does not.

exit codes: 0 nothing is broken; 1 something is broken; 2 there is no run, or the command line is wrong; 3 with
--strict, nothing is broken and something is unproved"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's folder (its output_dir), or a copy of it")
    parser.add_argument("--strict", action="store_true", help="exit with 3 where something is unproved")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def main(options: argparse.Namespace) -> int:
    """Prints the page, and returns the exit code."""
    page = prove(options.run)
    print(json.dumps(page.as_fields(), indent=1) if options.json else printable(as_text(page)))
    return page.exit_code(strict=options.strict)


def as_text(page: Page) -> str:
    """Returns the page for a screen."""
    steps = f"step {page.step:,}" + (f" of {page.max_steps:,}" if page.max_steps is not None else "")
    width = max(len(part.name) for part in page.parts) + 2
    lines = [f"run {page.run_id}, {page.state}, {steps}", ""]
    for part in page.parts:
        lines += _wrapped(part.summary, f"  {part.name:{width}}")
    for title, found in (("unproved", page.unproved), ("BROKEN", page.broken)):
        lines += ["", f"{title}:"] if found else []
        for one in found:
            lines += _wrapped(one, "  - ")
    return "\n".join([*lines, "", page.verdict])


def _wrapped(text: str, start: str) -> list[str]:
    """Returns lines of at most `_WIDTH` characters, the first of which begins with `start`."""
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [start.rstrip()]

"""docs/architecture.md names files that are there, and tells the ways of a rollout and of a batch in a dozen each."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
NAMED = set(re.findall(r"`((?:orchestrator|infer|trainer|transport)/[\w/]*(?:\.py)?)`", PAGE))
MANY = 15


def way(what: str) -> list[str]:
    """The files in a table of the page."""
    section = PAGE.partition(f"## The way of a {what}\n")[2].partition("\n##")[0]
    return re.findall(r"^\| \d+ \| `([\w/.]+)`", section, flags=re.M)


def test_every_file_that_is_named_is_there_and_both_ways_are_short() -> None:
    assert not {name for name in NAMED if not (ROOT / name).exists()}
    for what in ("rollout", "batch"):
        assert 10 <= len(way(what)) <= MANY

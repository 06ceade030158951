"""docs/coverage.md: what a row says shows it is there, and where it says it is, it is."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/coverage.md").read_text()


def rows() -> Iterator[tuple[str, str, str]]:
    """What is asked, where it is, what shows it, for each row of the tables."""
    for line in PAGE.splitlines():
        if line.startswith("| ") and not line.startswith("| asked"):
            asked, where, shown = (cell.strip() for cell in line.strip("|").split(" | "))
            yield asked, where, shown


def test_each_row_names_what_there_is() -> None:
    for asked, where, shown in rows():
        check_row(asked, where, shown)


def check_row(asked: str, where: str, shown: str) -> None:
    paths = re.findall(
        r"`((?:configs|deploy|grpo|infer|orchestrator|tests|trainer|transport)/[\w/.]*)`", where
    ) + re.findall(r"\]\(([\w.]+)\)", where)
    assert [one for one in paths if not (ROOT / one).exists() and not (ROOT / "docs" / one).exists()] == [], asked
    tests = re.findall(r"`(tests/[\w/.]+)(?:::(\w+))?`", shown)
    assert tests, asked
    for path, name in tests:
        functions = [one.name for one in ast.walk(ast.parse((ROOT / path).read_text())) if hasattr(one, "name")]
        assert any(one.startswith("test_") for one in functions), path
        assert not name or name in functions, (path, name)

"""The problems of a run: those of a file, or those that come with the product."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from orchestrator.envs.critique.operators import records
from orchestrator.envs.critique.problems import Problem, UnknownRecord, problem_from_record


def load_problems(path: str | None, split: Literal["train", "eval"], seed: int) -> list[Problem]:
    """The problems of a JSONL file, one record of any style a line, each with a candidate `program`; without a path
    those of `operators`. Raises UnknownRecord that names the line."""
    if path is None:
        return [problem_from_record(record) for record in records(split, seed)]
    return [_problem(record, place) for place, record in _lines(Path(path))]


def _lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    num = 0
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise UnknownRecord(f"{path}:{number} is not JSON: {error}") from None
            if not isinstance(record, dict):
                raise UnknownRecord(f"{path}:{number} is {line[:100].strip()!r}: expected an object with a problem")
            num += 1
            yield f"{path}:{number}", record
    if not num:
        raise UnknownRecord(f"{path} has no problems in it: expected one record a line")


def _problem(record: Mapping[str, Any], place: str) -> Problem:
    try:
        problem = problem_from_record(record)
    except UnknownRecord as error:
        raise UnknownRecord(f"{place}: {error}") from None
    if problem.program is None:
        raise UnknownRecord(
            f"{place} has no candidate program, which is what is criticised: give it a 'program'; it has the keys "
            f"{sorted(record)}"
        )
    return problem

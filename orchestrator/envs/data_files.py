"""Records from files that people bring: JSONL or Parquet."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class WrongRecord(ValueError):
    """A file that cannot be used; says which record, and why."""


def read_records(path: Path, parse: Callable[[Mapping[str, Any]], T]) -> list[T]:
    """What `parse` makes of each record of a file, one a line of JSON, or a row where the name ends with `.parquet`;
    empty lines are skipped. Raises WrongRecord, with what `parse` raises."""
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            rows: list[Any] = pyarrow.parquet.read_table(path).to_pylist()
        else:
            rows = path.read_bytes().splitlines()
    except (OSError, ValueError) as error:
        raise WrongRecord(f"{path.absolute()} cannot be read: {error}") from None
    made: list[T] = []
    for number, row in enumerate(rows, start=1):
        if isinstance(row, bytes) and not row.strip():
            continue
        try:
            record = json.loads(row) if isinstance(row, bytes) else row
            if not isinstance(record, dict):
                raise TypeError(f"expected an object, got {str(record)[:100]}")
            made.append(parse(record))
        except (ValueError, TypeError, AttributeError, KeyError, SyntaxError, RecursionError) as error:
            raise WrongRecord(
                f"{path}:{number}: {type(error).__name__}: {error}; it begins {str(row)[:100]!r}"
            ) from None
    if not made:
        raise WrongRecord(f"{path} has no records, expected one JSON object a line, or rows of a Parquet file")
    return made

"""Reads traces for the page: columns without tokens of a whole step, and single rollouts with them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from grpo.run_files import read_file
from grpo.transport.traces import FOLDER, MASKS, SCHEMA, TOKENS, VOCABULARY_FILE, trace_path

_PER_ROLLOUT = [name for name in SCHEMA.names if name not in (*TOKENS, "messages", "hint")]
_DECIMALS = 5
"""Decimal places of log-probabilities and the like; the fifth is below a server's rounding."""


def _open(run: Path, step: int, *, evaluation: bool) -> pq.ParquetFile | None:
    """None where there is no trace, or only one of another release."""
    path = trace_path(run, step, evaluation=evaluation)
    try:
        file = pq.ParquetFile(read_file(run, path))
    except (OSError, pa.ArrowException):
        return None
    return file if file.schema_arrow.equals(SCHEMA) else None


def rollouts_of(run: Path, step: int, *, evaluation: bool = False) -> list[dict[str, Any]]:
    """Returns one entry for each training row of a step, without tokens; none where there is no trace."""
    file = _open(run, step, evaluation=evaluation)
    if file is None:
        return []
    with file:
        rows = file.read(columns=_PER_ROLLOUT).to_pylist()
    return [_plain(row) for row in rows]


def rollout(run: Path, step: int, rollout_id: str, *, evaluation: bool = False) -> list[dict[str, Any]]:
    """The rows of one rollout and of its sub-episodes, with tokens."""
    file = _open(run, step, evaluation=evaluation)
    if file is None:
        return []
    found = []
    with file:
        for index, places in _places(file, rollout_id):
            table = file.read_row_group(index)
            found += [_with_tokens(run, table.slice(place, 1)) for place in places]
    return found


def _places(file: pq.ParquetFile, rollout_id: str) -> Iterator[tuple[int, list[int]]]:
    """Row groups that have rows of the rollout, and their places in it."""
    ids = file.read(columns=["rollout"])["rollout"].to_pylist()
    begin = 0
    for index in range(file.num_row_groups):
        num_rows = file.metadata.row_group(index).num_rows
        here = ids[begin : begin + num_rows]
        begin += num_rows
        places = [place for place, one in enumerate(here) if one == rollout_id or one.startswith(f"{rollout_id}.")]
        if places:
            yield index, places


def _with_tokens(run: Path, row: pa.Table) -> dict[str, Any]:
    """Returns one row as JSON takes it: per-token columns as lists, texts of tokens beside them."""
    plain = _plain(row.select([name for name in row.column_names if name not in TOKENS]).to_pylist()[0])
    for name in TOKENS:
        column = row[name].combine_chunks()
        plain[name] = None if column.null_count else _rounded(column.flatten().to_numpy(zero_copy_only=False))
    texts = vocabulary(run)
    plain["tokens"] = [texts.get(token) for token in plain["token_ids"] or []]
    plain["mask_names"] = MASKS
    return plain


def _rounded(values: Any) -> list[Any]:
    if values.dtype.kind != "f":
        return list(values.tolist())
    return [number if np.isfinite(number) else None for number in values.astype(float).round(_DECIMALS).tolist()]


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """JSON texts as what they say, and numbers that are not finite as null."""
    plain: dict[str, Any] = {}
    for name, value in row.items():
        if name in ("rewards", "measures", "messages", "players"):
            plain[name] = json.loads(value) if value else [] if name == "messages" else {}
        else:
            plain[name] = _finite(value) if isinstance(value, float) else value
    return plain


def _finite(number: float | None) -> float | None:
    return None if number is None or not np.isfinite(number) else number


def vocabulary(run: Path) -> Mapping[int, str]:
    """The text of each token id; empty where the run has not written it."""
    path = run / FOLDER / VOCABULARY_FILE
    try:
        return _vocabulary(read_file(run, path), path.stat().st_mtime_ns)
    except (OSError, pa.ArrowException):
        return {}


@lru_cache(maxsize=4)
def _vocabulary(path: Path, _changed_ns: int) -> dict[int, str]:
    table = pq.read_table(path)
    return dict(zip(table["id"].to_pylist(), table["text"].to_pylist(), strict=True))


def versions_of(run: Path, steps: Sequence[int], env: str, example: int, *, evaluation: bool) -> list[dict[str, Any]]:
    """The rollouts of one example in the traces of these steps, in their order, without tokens."""
    found = []
    for step in steps:
        if (file := _open(run, step, evaluation=evaluation)) is None:
            continue
        with file:
            keys = file.read(columns=["env", "example"]).to_pylist()
            hits = [place for place, key in enumerate(keys) if key == {"env": env, "example": example}]
            if hits:
                names = [*_PER_ROLLOUT, "messages"]
                found += [_plain(row) for row in file.read(columns=names).take(hits).to_pylist()]
    return found

"""The metrics of a run as columns that are kept: of a living run only what was appended is read again."""

import json
import math
import os
import threading
from array import array
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from grpo.run_files import EVALUATED, METRICS_FILE, STEP, read_file

POINTS = 500
"""Points of a curve that are sent; of a longer run the least and the greatest of neighbours."""
_TAIL_BYTES = 64
"""Bytes before the end of what was read, by which a file that was written anew is known."""
_DECODER = msgspec.json.Decoder(dict[str, float])
Columns = Mapping[str, NDArray[np.float64]]


class MetricColumns:
    """The columns of one run's `metrics.jsonl`: `train` by step, `eval` by version; NaN where a line lacks a metric."""

    def __init__(self, run: Path) -> None:
        self._run, self._lock = run, threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._file, self._offset, self._tail = 0, 0, b""
        self._columns: tuple[dict[str, array[float]], dict[str, array[float]]] = ({}, {})
        self._sizes = [0, 0]

    def read(self) -> tuple[Columns, Columns]:
        """Returns the columns as they are now; none where there is no file."""
        with self._lock:
            try:
                with read_file(self._run, self._run / METRICS_FILE).open("rb") as file:
                    self._append(file)
            except OSError:
                self._begin()
            train, evaluated = map(self._padded, (0, 1))
            return train, evaluated

    def _append(self, file: Any) -> None:
        inode = os.fstat(file.fileno()).st_ino
        file.seek(max(0, self._offset - _TAIL_BYTES))
        if inode != self._file or file.read(min(self._offset, _TAIL_BYTES)) != self._tail:
            self._begin()
            self._file = inode
        file.seek(self._offset)
        whole, newline, _ = file.read().rpartition(b"\n")
        for line in whole.split(b"\n") if newline else ():
            self._add(line)
        if newline:
            self._offset += len(whole) + 1
            self._tail = (self._tail + whole + b"\n")[-_TAIL_BYTES:]

    def _add(self, line: bytes) -> None:
        try:
            record = _DECODER.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            try:  # NaN and Infinity, which JSON does not have and Python writes
                record = msgspec.convert(json.loads(line), dict[str, float])
            except (ValueError, RecursionError, msgspec.ValidationError):
                return
        if not math.isfinite(record.get(STEP, math.nan)):
            return
        kind = int(EVALUATED in record)
        columns, size = self._columns[kind], self._sizes[kind]
        for name, value in record.items():
            if (column := columns.get(name)) is None:
                column = columns[name] = array("d")
            if len(column) < size:
                column.extend([math.nan] * (size - len(column)))
            column.append(value)
        self._sizes[kind] += 1

    def _padded(self, kind: int) -> Columns:
        padded = {}
        for name, column in sorted(self._columns[kind].items()):
            values = np.full(self._sizes[kind], np.nan)
            values[: len(column)] = column
            padded[name] = values
        return padded


@lru_cache(maxsize=64)
def columns_of(run: Path) -> MetricColumns:
    """Returns the kept columns of a run."""
    return MetricColumns(run)


def thinned(columns: Columns, low: float | None, high: float | None) -> dict[str, list[float | None]]:
    """Returns the columns between two steps as JSON takes them, with at most `POINTS` points: of more steps the least
    and the greatest value of neighbours, in their order, so that no spike is lost."""
    if not columns:
        return {}
    steps = columns[STEP]
    inside = (steps >= (-np.inf if low is None else low)) & (steps <= (np.inf if high is None else high))
    size = -(-int(inside.sum()) // (POINTS // 2)) if inside.sum() > POINTS else 0
    return {
        name: _plain(_extremes(values[inside], size, is_step=name == STEP) if size else values[inside])
        for name, values in columns.items()
    }


def _extremes(values: NDArray[np.float64], size: int, *, is_step: bool) -> NDArray[np.float64]:
    parts = -(-len(values) // size)
    padded = np.full(parts * size, np.nan)
    padded[: len(values)] = values
    rows = padded.reshape(parts, size)
    found = np.full(2 * parts, np.nan)
    if is_step:
        last = np.minimum(np.arange(parts) * size + size // 2, len(values) - 1)
        found[0::2], found[1::2] = rows[:, 0], values[last]
        found[-1] = values[-1]
        return found
    known = ~np.isnan(rows)
    least, most = np.where(known, rows, np.inf), np.where(known, rows, -np.inf)
    rising = least.argmin(1) <= most.argmax(1)
    first, second = np.where(rising, least.min(1), most.max(1)), np.where(rising, most.max(1), least.min(1))
    found[0::2], found[1::2] = first, second
    return found


def _plain(values: NDArray[np.float64]) -> list[float | None]:
    """Returns numbers with six digits; None for those that are not finite."""
    finite = np.isfinite(values) & (values != 0)
    digits = np.zeros_like(values)
    np.log10(np.abs(values), out=digits, where=finite)
    scale = 10.0 ** np.clip(5 - np.floor(digits), -290, 290)
    rounded = np.where(finite, np.round(np.where(finite, values, 0) * scale) / scale, 0.0)
    known = np.isfinite(values)
    return [number if one else None for number, one in zip(rounded.tolist(), known.tolist(), strict=True)]

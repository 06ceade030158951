"""Reads what Weights & Biases has logged offline: a file of records in LevelDB's log format, each a protobuf."""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

HEADER, BLOCK = 7, 32768
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(path: Path) -> Iterator[Any]:
    """Every record of a `.wandb` file."""
    data, at, parts = path.read_bytes(), HEADER, b""
    assert data[:4] == b":W&B"
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + HEADER])
        at += HEADER
        parts += data[at : at + length]
        at += length
        assert kind in (WHOLE, FIRST, MIDDLE, LAST)
        if kind in (WHOLE, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


@dataclass(slots=True)
class Logged:
    """One run, as it was logged."""

    project: str = ""
    name: str = ""
    run_id: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    step_metrics: dict[str, str] = field(default_factory=dict)
    exit_code: int | None = None


def logged(folder: Path) -> Logged:
    """The one run in a run's folder."""
    [path] = (folder / "wandb").glob("*run-*/*.wandb")
    run = Logged()
    for record in records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.project, run.name, run.run_id = record.run.project, record.run.display_name, record.run.run_id
            run.config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "history":
            run.history.append(_tree(record.history.item))
        elif kind == "summary":
            run.summary |= _tree(record.summary.update)
        elif kind == "metric":
            run.step_metrics[record.metric.name or record.metric.glob_name] = record.metric.step_metric
        elif kind == "exit":
            run.exit_code = record.exit.exit_code
    return run


def _tree(items: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for item in items:
        *above, last = item.nested_key or [item.key]
        inside = tree
        for key in above:
            inside = inside.setdefault(key, {})
        inside[last] = json.loads(item.value_json)
    return tree

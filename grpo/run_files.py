"""Reads the files of a run's folder for people: every file is checked by decoding, and one that is missing, torn or not
what it should be is None. Nothing here writes."""

import json
import os
import socket
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from grpo.transport.errors import UserError
from grpo.transport.run import RUN_FILE, RunFile
from grpo.transport.status import process_start

T = TypeVar("T")
METRICS_FILE, SUMMARY_FILE = "metrics.jsonl", "summary.json"
STEP, REWARD, EVALUATED = "progress/step", "reward/mean", "eval/failed"
"""Keys in `metrics.jsonl`: of every line, of those that are of a training step with rollouts, and of evaluations."""


class NoRun(UserError):
    """A folder that holds no run."""


class ProgramStatus(msgspec.Struct):
    """State of one program, as it writes it to `status/NAME.json`."""

    state: str
    step: int | None = None
    waiting_for: str | None = None
    message: str | None = None
    since: float | None = None
    """Wall clock in seconds."""
    pid: int | None = None
    host: str | None = None
    started: int | None = None

    @property
    def alive(self) -> bool | None:
        """Returns whether the process is still there; None where that cannot be told from here."""
        if self.pid is None or self.host != socket.gethostname():
            return None
        start = process_start(self.pid)
        return start is not None and self.started in (None, start)


def read_file(folder: Path, path: Path) -> Path:
    """Returns `path` if it leads to a file of the run in `folder`. Raises `FileNotFoundError` where there is none, and
    `PermissionError` for a link that leads elsewhere."""
    real = path.resolve(strict=True)
    if not real.is_relative_to(folder.resolve()):
        raise PermissionError(f"{path} leads out of the run's folder, to {real}")
    return real


def read(path: Path, kind: type[T]) -> T | None:
    """Returns the JSON in `path` as `kind`; None where there is no such file, or it is no such JSON."""
    try:
        return msgspec.convert(json.loads(path.read_bytes()), kind, str_keys=True)
    except (OSError, ValueError, RecursionError, msgspec.ValidationError):
        return None


def read_run(folder: Path) -> RunFile:
    """`run.json`. Raises `NoRun`."""
    if not (folder / RUN_FILE).is_file():
        raise NoRun(f"{folder} holds no run: it has no {RUN_FILE}; give the output_dir of a run")
    if (run := read(folder / RUN_FILE, RunFile)) is None:
        raise NoRun(f"{folder / RUN_FILE} cannot be read, or is not a run of this release")
    return run


def orch_settings(run: RunFile) -> dict[str, Any]:
    """Returns the orchestrator's settings; none before it has joined."""
    settings: dict[str, Any] = run.programs.get("orch", {}).get("settings", {})
    return settings


def metrics(folder: Path, *, last_bytes: int | None = None) -> list[dict[str, float]]:
    """Returns the lines of `metrics.jsonl` in their order, with `last_bytes` only those at the end of the file."""
    try:
        with (folder / METRICS_FILE).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0 if last_bytes is None else max(0, size - last_bytes))
            lines = file.read().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            record = msgspec.convert(json.loads(line), dict[str, float])
            int(record[STEP])
        except (ValueError, KeyError, OverflowError, RecursionError, msgspec.ValidationError):
            continue
        found.append(record)
    return found

"""What a process is doing, as a small file that others may read: who waits for whom."""

import json
import os
import time
from pathlib import Path
from typing import Any

from transport.files import write_atomic


class StatusFile:
    """Writes `{state, step, waiting_for, since, pid}`; `since` is the wall clock in seconds of the last change."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last: tuple[Any, ...] | None = None

    def set(self, state: str, *, step: int | None = None, waiting_for: str | None = None) -> None:
        """Says what this process does now. Repeating the same costs nothing."""
        current = (state, step, waiting_for)
        if current == self._last:
            return
        self._last = current
        fields = {
            "state": state,
            "step": step,
            "waiting_for": waiting_for,
            "since": time.time(),
            "pid": os.getpid(),
        }
        write_atomic(self._path, json.dumps(fields).encode(), durable=False)


def read_status(path: Path) -> dict[str, Any] | None:
    """The fields that `StatusFile` wrote last, or None where there are none."""
    try:
        fields: dict[str, Any] = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return fields

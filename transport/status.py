"""The state of a process as a small file for the others: who waits for whom, and who has failed."""

import errno
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from grpo.transport.errors import PeerFailed
from grpo.transport.folders import remove_leftovers, write_atomic

FAILED = "failed"
FINISHED = "finished"
STOPPED = "stopped"
"""The state of a launcher that a person has ended; started again, the run goes on."""
LAUNCHER_FILE = "launcher.json"
"""The launcher's status file: whether it is at work, or how the run has ended."""
AWAY = "ended, to be started again"
"""The state of a program that its launcher starts again; the launcher writes it in the program's stead."""


class StatusFile:
    """Writes `{state, step, waiting_for, message, since, pid, host, started}`; `since` is the wall clock in seconds of
    the last change, `started` is `process_start` of the process."""

    def __init__(self, path: Path, *, pid: int | None = None) -> None:
        """`pid` is the process that the file describes; None for this one."""
        remove_leftovers(path.parent, path.name)
        self._path, self._pid = path, pid
        self._last: tuple[Any, ...] | None = None

    def set(
        self, state: str, *, step: int | None = None, waiting_for: str | None = None, message: str | None = None
    ) -> None:
        """Writes what the process does now. Repeating the same costs nothing."""
        current = (state, step, waiting_for, message)
        if current == self._last:
            return
        self._last = current
        fields: dict[str, Any] = {"state": state, "step": step, "waiting_for": waiting_for, "message": message}
        pid = self._pid or os.getpid()
        fields |= {"since": time.time(), "pid": pid, "host": socket.gethostname(), "started": process_start(pid)}
        write_atomic(self._path, json.dumps(fields).encode(), durable=False)

    @property
    def step(self) -> int | None:
        """The step that was written last."""
        return None if self._last is None else self._last[1]

    def failed(self, error: BaseException) -> None:
        """Writes that the process ends, and why, so that nobody waits for it."""
        self.set(FAILED, message=f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


def read_status(path: Path) -> dict[str, Any] | None:
    """Returns the fields that `StatusFile` wrote last, or None where there are none, or none can be read now: on a
    network file system a file that is just being replaced may be stale."""
    try:
        fields: dict[str, Any] = json.loads(path.read_bytes())
    except ValueError:
        return None
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):
            raise
        return None
    return fields


def server_file(host: str, port: int) -> str:
    """Returns the name of a server's status file, which has its address: that of this machine for a server that listens
    on all of them. Example: ``infer.127.0.0.1_8000.json``"""
    return f"infer.{socket.gethostname() if host in ('0.0.0.0', '::') else host}_{port}.json"


def server_of(path: Path) -> str:
    """Returns the address of the server whose status file this is. Example: ``http://127.0.0.1:8000``"""
    host, _, port = path.name.removeprefix("infer.").removesuffix(".json").rpartition("_")
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def process_start(pid: int) -> int | None:
    """Returns when a process of this machine started, in clock ticks since the boot; None where it has ended. It tells
    apart two processes that had the same number."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


class PeerWatch:
    """Looks about once a second whether another process has failed or is gone, for whoever waits for it."""

    interval_s = 1.0
    grace_s = 3.0
    """Time after a process is gone without a word, in which its launcher may write first that it has ended."""

    def __init__(self, path: Path, *, name: str, resuming: bool = True) -> None:
        """`resuming`: a process that has ended already belongs to an earlier start; its successor is still to come."""
        self._path, self._name = path, name
        fields = read_status(path) or {}
        self._before = fields if resuming and (fields.get("state") in (FAILED, FINISHED) or _is_gone(fields)) else None
        self._next_s = 0.0
        self._gone_since_s: float | None = None

    def check(self) -> None:
        """Raises `PeerFailed` where the process has failed or is gone. Cheap: most calls do nothing."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + self.interval_s
        fields = read_status(self._path) or {}
        if self._before is not None and fields == self._before:
            return
        if fields.get("state") == FAILED:
            raise PeerFailed(f"{self._name} has failed: {fields.get('message')}")
        if not _is_gone(fields):
            self._gone_since_s = None
        elif self._gone_since_s is None:
            self._gone_since_s = now_s
        elif now_s - self._gone_since_s >= self.grace_s:
            doing = f"it was {fields.get('state')} in step {fields.get('step')}"
            raise PeerFailed(f"{self._name} (pid {fields['pid']}) is gone without a word; {doing}; see its log")


def _is_gone(fields: dict[str, Any]) -> bool:
    """Returns whether the process has ended without having finished; never true of other machines' processes."""
    if fields.get("host") != socket.gethostname() or fields.get("state") == FINISHED:
        return False
    start = process_start(fields["pid"])
    return start is None or fields.get("started") not in (None, start)

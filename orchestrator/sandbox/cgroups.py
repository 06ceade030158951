"""Limits on a whole sandbox by the kernel's control groups, where this process may make some.

Without them the first process inside measures memory and processes a few dozen times a second, and the kernel limits
each process. With them the kernel counts memory and processes of the whole sandbox exactly.
"""

import contextlib
import os
from pathlib import Path

from orchestrator.sandbox.records import Limits

_NEEDED = {"memory", "pids"}


class Cgroup:
    """A control group (version 2) for one sandbox."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()

    def admit(self, pid: int) -> None:
        """Moves the process in; what it starts from now on is in it too."""
        (self.path / "cgroup.procs").write_text(str(pid))

    def set_limits(self, limits: Limits) -> None:
        """The watcher inside and what lies in `/tmp` and `/dev/shm` count too, so there is room for them."""
        room = 64 * 1024 * 1024 + 2 * limits.disk_bytes + 4 * limits.output_bytes
        (self.path / "memory.max").write_text(str(limits.memory_bytes + room))
        with contextlib.suppress(FileNotFoundError):
            (self.path / "memory.swap.max").write_text("0")
        (self.path / "pids.max").write_text(str(limits.processes + 2))

    def remove(self) -> None:
        """Once no process is in it. What cannot be removed stays behind empty."""
        with contextlib.suppress(OSError):
            self.path.rmdir()


def find_parent(root: Path = Path("/sys/fs/cgroup"), membership: str | None = None) -> Path | None:
    """The control group in which this process may make others with limits on memory and processes, or None.

    It is the parent of the process's own group: a group that holds processes may not divide its resources.
    """
    try:
        membership = Path("/proc/self/cgroup").read_text() if membership is None else membership
    except OSError:
        return None
    own = next((line[3:] for line in membership.splitlines() if line.startswith("0::")), None)
    if own is None or own == "/":
        return None
    parent = (root / own.lstrip("/")).parent
    try:
        divided = set((parent / "cgroup.subtree_control").read_text().split())
    except OSError:
        return None
    may_move = os.access(parent, os.W_OK) and os.access(parent / "cgroup.procs", os.W_OK)
    return parent if may_move and divided >= _NEEDED else None

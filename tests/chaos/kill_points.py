"""`kill -9` of this process at a call that changes the disk."""

import os
import signal
from collections.abc import Callable
from typing import Any

DISK_CALLS = ("open", "mkdir", "fsync", "rename", "replace", "unlink", "rmdir")
"""What the product calls of `os`, by itself or through `pathlib` and `shutil`. All writing of files begins with `open`
and ends with one of the others."""


def kill_at(call: str, nth: int) -> None:
    """Has this process end when it calls `os.CALL` for the n-th time from now on; the call is not made."""
    made, left = getattr(os, call), [nth]

    def counted(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return made(*arguments, **options)

    setattr(os, call, counted)


def start(work: Callable[[], object], at: tuple[str, int] | None = None) -> int:
    """Forks a process that does `work`, and kills itself at a call for the n-th time. Gives its number."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        if at is not None:
            kill_at(*at)
        work()
        status = 0
    finally:
        os._exit(status)

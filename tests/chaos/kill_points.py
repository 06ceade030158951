"""`kill -9` of this process at a call that changes the disk, and processes that are started again after it."""

import os
import signal
from collections.abc import Callable, Mapping
from typing import Any

from tests.support import until

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


class Restarted:
    """Processes that are started again after each kill, until all have ended by themselves."""

    def __init__(
        self, works: Mapping[str, Callable[[], object]], at: Mapping[str, tuple[str, int]] | None = None
    ) -> None:
        """`at`: who kills itself, at which call for the n-th time."""
        self._works, self.num_kills = works, 0
        self._running = {name: start(work, (at or {}).get(name)) for name, work in works.items()}

    def kill(self, name: str) -> None:
        """Kills one, if it has not ended, and starts it again."""
        if name in self._running:
            os.kill(self._running[name], signal.SIGKILL)
            self._after(name, os.waitpid(self._running[name], 0)[1])

    def to_the_end(self, after_kill: Callable[[], object] = lambda: None) -> None:
        """Fails where one ends with an error, or all together take too long."""

        def all_ended() -> bool:
            for name, pid in list(self._running.items()):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done and self._after(name, status):
                    after_kill()
            return not self._running

        until(all_ended, log=lambda: [*self._running], poll_s=0.002)

    def _after(self, name: str, status: int) -> bool:
        """Whether it was killed, and has been started again."""
        del self._running[name]
        code = os.waitstatus_to_exitcode(status)
        assert code in (0, -signal.SIGKILL), f"{name} ended with {code}"
        if code == 0:
            return False
        self.num_kills += 1
        self._running[name] = start(self._works[name])
        return True

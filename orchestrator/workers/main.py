"""The program of an environment worker: `python -m orchestrator.workers.main ADDRESS PARENT ENV_ID`.

It forks at once. The child becomes the worker, the parent its guard: whatever the worker starts, in sessions of its own
too, is a descendant of the guard (PR_SET_CHILD_SUBREAPER), which ends all of it when the worker has ended, when it is
told to (SIGTERM), and when the process that started it is gone (PR_SET_PDEATHSIG).
"""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
END_LIMIT_S = 10
"""For the kernel to end processes that were killed."""


def main() -> None:
    """Returns in no process but the worker's."""
    address, parent, only = sys.argv[1:]
    _guard(int(parent))
    from orchestrator.workers.worker import serve

    serve(address, only)


def _guard(parent: int) -> None:
    """Returns in the worker. The guard exits as the worker does; with 128 + the number of the signal that ended it."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit("the process that started this one is gone")
    awaited = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    guard, worker = os.getpid(), os.fork()
    if worker == 0:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)
        if os.getppid() != guard:
            raise SystemExit("the guard is gone")
        return
    status: int | None = None
    while status is None:
        if signal.sigwait(awaited) == signal.SIGTERM:
            os.kill(worker, signal.SIGKILL)
        status = _reaped(worker)
    _end_descendants()
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _reaped(worker: int) -> int | None:
    """Reaps all children that have ended. Returns the worker's status, where it is among them."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            status = ended[1] if ended[0] == worker else status
    return status


def _end_descendants() -> None:
    """Orphans of those that end become children of this process, until there are none."""
    signal.alarm(END_LIMIT_S)
    me = os.getpid()
    while children := Path(f"/proc/{me}/task/{me}/children").read_text().split():
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


if __name__ == "__main__":
    main()

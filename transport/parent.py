"""A process that ends with the one that started it, however that one ends. Linux only."""

import ctypes
import os
import select
import signal
import threading

PARENT_VAR = "GRPO_PARENT_PID"
"""Environment variable with the number of the process that has started a program, and whose end must end it."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def end_with(parent: int) -> None:
    """Makes the kernel kill this process when `parent`, which started it, ends; at once if it has ended already.

    Strictly, the kernel watches the thread that started this process: start children from a thread that stays.
    """
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed; grpo needs Linux")
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def watch(parent: int) -> None:
    """Does what `end_with` does for a process whose starting thread may end before it: a thread of this process waits
    for the parent's end."""
    try:
        descriptor = os.pidfd_open(parent)
    except ProcessLookupError:
        descriptor = -1
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)

    def wait() -> None:
        select.select([descriptor], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def end_with_starter() -> None:
    """Calls `end_with` for the process that `PARENT_VAR` names, if any; child processes do not inherit the variable."""
    if (parent := os.environ.pop(PARENT_VAR, None)) is not None:
        end_with(int(parent))

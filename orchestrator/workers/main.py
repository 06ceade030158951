"""The program that environment workers are forked from: `python -m grpo.orchestrator.workers.main PARENT ENV_ID`.

It imports what workers need, the environment's module included, and then forks one for each request on its standard
input, a socket, so that a worker is there in milliseconds. Between it and each worker stands a guard: whatever the
worker starts, in sessions of its own too, is a descendant of the guard (PR_SET_CHILD_SUBREAPER), which ends all of it
when the worker has ended, when it is told to (SIGTERM), and when this program has ended (PR_SET_PDEATHSIG), which does
so with who started it.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
END_LIMIT_S = 10
"""For the kernel to end processes that were killed."""


def main() -> None:
    """Ends when nobody can ask for workers any more; returns as well in each worker that has ended."""
    parent, env_id = int(sys.argv[1]), sys.argv[2]
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _check_parent(parent)
    from grpo.orchestrator.rollouts.registry import find_class
    from grpo.orchestrator.workers.worker import serve

    with contextlib.suppress(BaseException):  # a worker raises it again, for who asks
        find_class(env_id)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for guards: they say themselves how it ended
    requests, own_pid = socket.socket(fileno=0), os.getpid()
    while True:
        said, fds, _, _ = socket.recv_fds(requests, 4096, 1)
        if not said:
            return
        if os.fork() == 0:
            break
        os.close(fds[0])
    os.dup2(os.open(os.devnull, os.O_RDONLY), requests.detach())
    address, only = said.decode().split("\n")
    _guard(own_pid, fds[0])
    serve(address, only)


def _guard(parent: int, report: int) -> None:
    """Returns in the worker. The guard writes to `report` its number, and at the end the worker's exit code; 128 + the
    number of the signal that ended it."""
    os.setpgid(0, 0)  # the terminal's Ctrl-C is not for workers
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    awaited = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _check_parent(parent)
    guard, worker = os.getpid(), os.fork()
    if worker == 0:
        os.close(report)
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)
        _check_parent(guard)
        if "numpy.random" in sys.modules:  # else all workers of one program would draw the same
            sys.modules["numpy.random"].seed()
        return
    _say(report, guard)
    status: int | None = None
    while status is None:
        if signal.sigwait(awaited) == signal.SIGTERM:
            os.kill(worker, signal.SIGKILL)
        status = _reaped(worker)
    _end_descendants()
    code = os.waitstatus_to_exitcode(status)
    _say(report, code if code >= 0 else 128 - code)
    os._exit(0)


def _say(report: int, number: int) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more
        os.write(report, b"%d\n" % number)


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


def _check_parent(pid: int) -> None:
    """What tells that a parent ends does so only from when it was asked for."""
    if os.getppid() != pid:
        raise SystemExit("the process that started this one is gone")


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


if __name__ == "__main__":
    main()

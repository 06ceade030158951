"""The program that environment workers are forked from: `python -m grpo.orchestrator.workers.main PARENT ENV_ID`.

It imports what workers need, the environment's module included, and then forks one for each request on its standard
input, a socket, so that a worker is there in milliseconds. Between it and each worker stands a guard. Whatever the
worker starts, in sessions of its own too, is a descendant of the guard (PR_SET_CHILD_SUBREAPER). The guard ends all of
it when the worker has ended, when it gets SIGTERM, and when this program has ended (PR_SET_PDEATHSIG), which ends with
the process that started it.
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
"""The kernel has so long to end processes that were killed."""


def main() -> None:
    """Serves requests until the socket is closed. Returns in each worker as well, when that has ended."""
    parent, env_id = int(sys.argv[1]), sys.argv[2]
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _check_parent(parent)
    from grpo.orchestrator.rollouts.registry import find_class
    from grpo.orchestrator.workers.worker import serve

    with contextlib.suppress(BaseException):  # a worker raises it again when it is loaded
        find_class(env_id)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for guards: they report how it ended
    requests, own_pid = socket.socket(fileno=0), os.getpid()
    while True:
        request, fds, _, _ = socket.recv_fds(requests, 4096, 1)
        if not request:
            return
        if os.fork() == 0:
            break
        os.close(fds[0])
    os.dup2(os.open(os.devnull, os.O_RDONLY), requests.detach())
    address, only = request.decode().split("\n")
    _guard(own_pid, fds[0])
    serve(address, only)


def _guard(parent: int, report: int) -> None:
    """Returns in the worker alone. The guard writes its process id to `report`, and at the end the worker's exit code,
    or 128 + the number of the signal that ended the worker."""
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
    _write(report, guard)
    status: int | None = None
    while status is None:
        if signal.sigwait(awaited) == signal.SIGTERM:
            os.kill(worker, signal.SIGKILL)
        status = _reaped(worker)
    _end_descendants()
    code = os.waitstatus_to_exitcode(status)
    _write(report, code if code >= 0 else 128 - code)
    os._exit(0)


def _write(report: int, number: int) -> None:
    with contextlib.suppress(OSError):  # nobody reads it any more
        os.write(report, b"%d\n" % number)


def _reaped(worker: int) -> int | None:
    """Reaps all children that have ended. Returns the worker's status if it is among them."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            status = ended[1] if ended[0] == worker else status
    return status


def _end_descendants() -> None:
    """Kills children until there are none: orphans of those that end become children of this process."""
    signal.alarm(END_LIMIT_S)
    me = os.getpid()
    while children := Path(f"/proc/{me}/task/{me}/children").read_text().split():
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


def _check_parent(pid: int) -> None:
    """Ends this process if the parent has ended already: PR_SET_PDEATHSIG only notices later ends."""
    if os.getppid() != pid:
        raise SystemExit("the process that started this one is gone")


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


if __name__ == "__main__":
    main()

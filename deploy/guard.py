"""A small process between the launcher and one program, which leaves nothing of that program behind.

Run as `python -I -S guard.py FDS COMMAND...`. The first of the comma-separated descriptors is one end of a socket
pair whose other end only the launcher holds, so that its end of file means that the launcher is gone, however it
went. The others are merely kept open until everything has ended (the launcher's lock on the run folder). The program
inherits none of them.

- Signals that the guard receives go to the program.
- When the program ends, its status and time go to the launcher, and whatever it started is killed; the trackers of
  Python's multiprocessing last, because they remove the semaphores of those that were killed.
- When the launcher is gone, the program is told to end, and killed if it does not.
- When the guard itself is killed, the kernel kills the program, and what that had started falls to the launcher.

Uses the standard library only, because it must start in milliseconds; Linux only.
"""

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Collection
from pathlib import Path

GRACE_S = 8.0
"""How long a program may take to end once the launcher is gone."""
TIDY_S = 2.0
"""How long a process that tidies up after others may outlive them."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_FORWARDED = (signal.SIGTERM, signal.SIGINT)
_TIDIES_UP = b"from multiprocessing.resource_tracker import main"
"""In the command of a process that removes what others have left in /dev/shm, and ends, once they all have ended."""


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed; the launcher needs Linux")


def become_subreaper() -> None:
    """Makes every descendant whose parent ends a child of this process, so that none can get out of sight."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(root: int, *, skip: Collection[int] = ()) -> list[int]:
    """Process ids below `root`, without those in `skip` and what is below them."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, waiting = [], [root]
    while waiting:
        below = [pid for pid in children.get(waiting.pop(), []) if pid not in skip]
        found += below
        waiting += below
    return found


def end_descendants(*, skip: Collection[int] = (), timeout_s: float = 5.0) -> list[int]:
    """Kills and reaps everything below this process but `skip`; answers what would not die in time. What tidies up
    after others is killed only where it has not ended by itself after `TIDY_S`."""
    begin = time.monotonic()
    while remaining := descendants(os.getpid(), skip=skip):
        waited_s = time.monotonic() - begin
        if waited_s > timeout_s:
            break
        for pid in remaining if waited_s > TIDY_S else [pid for pid in remaining if not _tidies_up(pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in remaining:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)
    return remaining


def _tidies_up(pid: int) -> bool:
    try:
        return _TIDIES_UP in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def main() -> None:
    """Runs the command, and ends as it ended."""
    descriptors = [int(text) for text in sys.argv[1].split(",")]
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    signal.pthread_sigmask(signal.SIG_BLOCK, {*_FORWARDED, signal.SIGCHLD})
    become_subreaper()
    guard = os.getpid()
    program = os.fork()
    if program == 0:
        _become_program(guard, sys.argv[2:])
    link = socket.socket(fileno=descriptors[0])
    status = _watch(program, link)
    with contextlib.suppress(OSError):
        link.send(f"{status} {time.monotonic()}".encode())
    end_descendants()
    _end_like(status)


def _become_program(guard: int, command: list[str]) -> None:
    """Never returns. The parent is compared after the request, because it may have gone before that."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:
        os._exit(1)
    for number in (*_FORWARDED, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"error: cannot start {command[0]}: {error}", file=sys.stderr, flush=True)
        os._exit(127)


def _watch(program: int, link: socket.socket) -> int:
    """Passes signals on until the program ends; its exit code, or minus the number of the signal that ended it."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for watched in (*_FORWARDED, signal.SIGCHLD):
        signal.signal(watched, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    sources: list[int | socket.socket] = [reader, link]
    kill_at: float | None = None
    while True:
        timeout_s = None if kill_at is None else max(0.0, kill_at - time.monotonic())
        ready, _, _ = select.select(sources, [], [], timeout_s)
        if link in ready:
            sources.remove(link)
            os.kill(program, signal.SIGTERM)
            kill_at = time.monotonic() + GRACE_S
        if kill_at is not None and time.monotonic() >= kill_at:
            os.kill(program, signal.SIGKILL)
            kill_at = None
        numbers = os.read(reader, 256) if reader in ready else b""
        for number in numbers:
            if number in _FORWARDED:
                os.kill(program, number)
        if signal.SIGCHLD in numbers and (status := _reap(program)) is not None:
            return status


def _reap(program: int) -> int | None:
    """Reaps whatever has ended below the guard; the program's status if it was among them."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, raw = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == program:
                status = os.waitstatus_to_exitcode(raw)
    return status


def _end_like(status: int) -> None:
    if status < 0 and -status != signal.SIGKILL:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(-status, signal.SIG_DFL)
    if status < 0:
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()

"""The first process of a sandbox: waits for one program, runs it, watches it, and reports.

It is process 1 of its own process namespace: no signal of the program reaches it, orphans become its children, and
the kernel kills whatever is left when it ends. It imports nothing of ours, because only this file is visible inside.

Standard input is a socket to the outside. Both directions carry frames: the length of a JSON header in 4 bytes, the
header, and after it the bytes whose lengths the header gives. Started as `python inside.py UID`, where UID is the user
to become, or `-` to stay.
"""

# Programs wait for what this file imports: it does without pathlib.
# ruff: noqa: PTH103, PTH118, PTH120, PTH123, PTH208

import atexit
import contextlib
import ctypes
import errno
import gc
import json
import math
import os
import resource
import select
import signal
import site
import struct
import sys
import time
import types
from collections.abc import Callable
from typing import Any

# What programs usually import, so that they find it loaded.
import bisect  # noqa: F401  # isort: skip
import collections  # noqa: F401  # isort: skip
import copy  # noqa: F401  # isort: skip
import functools  # noqa: F401  # isort: skip
import heapq  # noqa: F401  # isort: skip
import itertools  # noqa: F401  # isort: skip
import operator  # noqa: F401  # isort: skip
import random  # noqa: F401  # isort: skip
import re  # noqa: F401  # isort: skip
import threading  # isort: skip
import typing  # noqa: F401  # isort: skip

CONTROL = 0
"""Standard input: the socket to the outside."""
WORK = "/tmp"
SHARED_MEMORY = "/dev/shm"
STATUS_FD = 3
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
SHORTEST_TICK_S, LONGEST_TICK_S = 0.004, 0.03
CHUNK = 65536
PAGE = os.sysconf("SC_PAGE_SIZE")
LONGEST_CPU_S = 1e9
LIMITS_SET, LIMITS_REFUSED, NO_MEMORY = b"+", b"-", b"memory"
"""What the child reports: first, before the program has a say, one of the first two; perhaps the third at its end."""
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")

Job = dict[str, Any]


def become(user: str) -> None:
    """Gives up what rights there are, and hides this process from the program that it will run."""
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    if user != "-":
        os.setgroups([])
        os.setresgid(int(user), int(user), int(user))
        os.setresuid(int(user), int(user), int(user))
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(PR_SET_DUMPABLE, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def receive(num_bytes: int) -> bytes:
    """Exactly so many bytes. Where the outside has gone, the sandbox ends."""
    parts = bytearray()
    while len(parts) < num_bytes:
        part = os.read(CONTROL, min(num_bytes - len(parts), 1 << 20))
        if not part:
            os._exit(0)
        parts += part
    return bytes(parts)


def send(header: dict[str, Any], *blobs: bytes) -> None:
    text = json.dumps(header).encode()
    unsent = memoryview(b"".join([struct.pack("!I", len(text)), text, *blobs]))
    while unsent:
        unsent = unsent[os.write(CONTROL, unsent) :]


def receive_job() -> Job:
    (length,) = struct.unpack("!I", receive(4))
    job: Job = json.loads(receive(length))
    job["stdin"] = receive(job["stdin_bytes"])
    for name, num_bytes in job["files"]:
        path = os.path.join(WORK, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(receive(num_bytes))
    return job


def contents(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def set_limits(limits: dict[str, Any]) -> None:
    """The kernel's limits for this process and those it starts. One process more than allowed can be started, so that
    the watcher sees that it was tried; the watcher itself counts too. Raises ValueError for one that the kernel
    refuses."""
    cpu_s = math.ceil(min(limits["cpu_s"], LONGEST_CPU_S))
    for name, kind, soft, hard in [
        ("cpu_s", resource.RLIMIT_CPU, cpu_s, cpu_s + 1),
        ("memory_bytes", resource.RLIMIT_AS, limits["memory_bytes"], limits["memory_bytes"]),
        ("memory_bytes", resource.RLIMIT_DATA, limits["memory_bytes"], limits["memory_bytes"]),
        ("processes", resource.RLIMIT_NPROC, limits["processes"] + 2, limits["processes"] + 2),
        ("file_bytes", resource.RLIMIT_FSIZE, limits["file_bytes"], limits["file_bytes"]),
        ("open_files", resource.RLIMIT_NOFILE, limits["open_files"], limits["open_files"]),
        ("no core files", resource.RLIMIT_CORE, 0, 0),
        ("no locked memory", resource.RLIMIT_MEMLOCK, 0, 0),
        ("no message queues", resource.RLIMIT_MSGQUEUE, 0, 0),
    ]:
        try:
            resource.setrlimit(kind, (soft, hard))
        except (OSError, ValueError, OverflowError, TypeError) as error:
            most = resource.getrlimit(kind)[1]
            raise ValueError(f"{name}: {hard} was asked for, at most {most} can be set here ({error})") from None


def run_python(source: bytes) -> int:
    """Runs the source as the interpreter would run a file, and returns the exit code."""
    path = f"{WORK}/main.py"
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=__builtins__)
    sys.modules["__main__"] = main
    sys.argv[:] = [path]
    sys.path.insert(0, WORK)
    site.setquit()
    exit_code = exit_code_of(lambda: exec(compile(source, path, "exec", dont_inherit=True), main.__dict__))
    exit_code = exit_code_of(finish) or exit_code
    return exit_code_of(flush) or exit_code


def exit_code_of(work: Callable[[], None]) -> int:
    try:
        work()
    except SystemExit as error:
        return exit_code_asked(error.code)
    except BaseException as error:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
            os.write(STATUS_FD, NO_MEMORY)
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1
    return 0


def exit_code_asked(code: object) -> int:
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


def finish() -> None:
    """What the interpreter does at its end, up to giving back its memory, which takes longer than most programs."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()


def run_command(command: list[str]) -> int:
    os.set_inheritable(STATUS_FD, False)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]} cannot be run: {error.strerror}\n".encode())
    return 127


def be_the_program(job: Job, stdin: int, stdout: int, stderr: int, status: int) -> int:
    """In the child: takes its place, its limits and its streams, and becomes the program."""
    os.setsid()
    for place, fd in enumerate((stdin, stdout, stderr, status)):
        os.dup2(fd, place)
    os.closerange(STATUS_FD + 1, os.sysconf("SC_OPEN_MAX"))
    os.chdir(WORK)
    prctl(PR_SET_DUMPABLE, 1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    sys.path += job["python_path"]
    try:
        set_limits(job["limits"])
    except ValueError as error:
        os.write(STATUS_FD, LIMITS_REFUSED + str(error).encode())
        return 1
    os.write(STATUS_FD, LIMITS_SET)
    if job["command"]:
        return run_command(job["command"])
    return run_python(contents(f"{WORK}/main.py"))


class Stream:
    """One output of the program: the beginning is kept, the rest is counted."""

    def __init__(self, fd: int, most: int) -> None:
        self.fd, self.most = fd, most
        self.kept, self.num_bytes, self.open = bytearray(), 0, True
        os.set_blocking(fd, False)

    def read(self) -> None:
        try:
            part = os.read(self.fd, CHUNK)
        except BlockingIOError:
            return
        self.open = bool(part)
        self.num_bytes += len(part)
        self.kept += part[: self.most - len(self.kept)]

    @property
    def overflows(self) -> bool:
        return self.num_bytes > self.most


class Watch:
    """One run, seen from outside the program."""

    def __init__(self, job: Job) -> None:
        self.limits: dict[str, Any] = job["limits"]
        self.unsent = memoryview(job["stdin"])
        self.limit: str | None = None
        self.refused: str | None = None
        """Why the kernel's limits could not be set; the program has not begun then."""
        self.ended: int | None = None
        """The program's wait status."""
        stdin_read, self.stdin = os.pipe()
        stdout_read, stdout_write = os.pipe()
        stderr_read, stderr_write = os.pipe()
        self.status, status_write = os.pipe()
        self.stdout = Stream(stdout_read, self.limits["output_bytes"])
        self.stderr = Stream(stderr_read, self.limits["output_bytes"])
        self.began = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            os._exit(be_the_program(job, stdin_read, stdout_write, stderr_write, status_write))
        for fd in (stdin_read, stdout_write, stderr_write, status_write):
            os.close(fd)
        os.set_blocking(self.stdin, False)
        os.set_blocking(self.status, False)
        self.pidfd = os.pidfd_open(self.pid)
        self.poll = select.poll()
        self.poll.register(CONTROL, select.POLLIN)
        self.poll.register(self.pidfd, select.POLLIN)
        self.poll.register(self.stdin, select.POLLOUT)
        for stream in (self.stdout, self.stderr):
            self.poll.register(stream.fd, select.POLLIN)

    def until_end(self) -> None:
        """Feeds, reads and measures the program until it ends or hits a limit, then kills whatever is left."""
        tick_s, due = SHORTEST_TICK_S, time.monotonic() + SHORTEST_TICK_S
        while self.ended is None and self.limit is None:
            self.serve(max(0.0, due - time.monotonic()))
            self.reap()
            if time.monotonic() < due and self.ended is None:
                continue
            measured = time.monotonic()
            self.limit = self.limit or self.exceeded()
            tick_s = max(min(tick_s * 1.5, LONGEST_TICK_S), 4 * (time.monotonic() - measured))
            due = time.monotonic() + tick_s
        self.kill_all()
        for stream in (self.stdout, self.stderr):
            while stream.open and stream.num_bytes <= stream.most + (1 << 20):
                before = stream.num_bytes
                stream.read()
                if stream.open and stream.num_bytes == before:
                    break
        reported = self.reported()
        if reported.startswith(LIMITS_REFUSED):
            self.refused = reported[1:].decode(errors="replace")
        elif self.limit is None:
            self.limit = self.explanation(reported)

    def serve(self, timeout_s: float) -> None:
        for fd, _ in self.poll.poll(timeout_s * 1000):
            if fd == CONTROL:
                os._exit(0)
            elif fd == self.stdin:
                self.feed()
            else:
                for stream in (self.stdout, self.stderr):
                    if fd == stream.fd:
                        stream.read()
                        if not stream.open:
                            self.poll.unregister(fd)
                        elif stream.overflows:
                            self.limit = "output"

    def feed(self) -> None:
        try:
            self.unsent = self.unsent[os.write(self.stdin, self.unsent[:CHUNK]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self.unsent = memoryview(b"")
        if not self.unsent:
            self.poll.unregister(self.stdin)
            os.close(self.stdin)

    def reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.pid:
                    self.ended = status

    def kill_all(self) -> None:
        """No process can be born while the kernel delivers this signal: it reaches all."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, 0)
                if pid == self.pid:
                    self.ended = status

    def cpu_s(self) -> float:
        """Processor time of those that have ended and were waited for."""
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    def exceeded(self) -> str | None:
        """The limit that is exceeded now."""
        limits = self.limits
        if time.monotonic() - self.began > limits["wall_s"]:
            return "wall"
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        cpu_s, memory, threads = self.cpu_s(), 0, 0 if self.ended is None else 1
        for pid in pids:
            used = measured(pid)
            cpu_s, memory, threads = cpu_s + used[0], memory + used[1], threads + used[2]
        if threads > limits["processes"]:
            return "processes"
        if cpu_s > limits["cpu_s"]:
            return "cpu"
        if memory > limits["memory_bytes"] and sum(map(own_memory, pids)) > limits["memory_bytes"]:
            return "memory"
        for folder in (WORK, SHARED_MEMORY):
            room = os.statvfs(folder)
            if room.f_files - room.f_ffree > limits["num_files"]:
                return "files"
        return None

    def reported(self) -> bytes:
        """What the child wrote to its status."""
        with contextlib.suppress(BlockingIOError):
            return os.read(self.status, CHUNK)
        return b""

    def explanation(self, reported: bytes) -> str | None:
        """The limit that made the program fail, where it ended by itself."""
        for stream in (self.stdout, self.stderr):
            if stream.overflows:
                return "output"
        assert self.ended is not None
        if self.ended == 0:
            return None
        if os.WIFSIGNALED(self.ended) and os.WTERMSIG(self.ended) == signal.SIGXCPU:
            return "cpu"
        if os.WIFSIGNALED(self.ended) and os.WTERMSIG(self.ended) == signal.SIGXFSZ:
            return "file_size"
        if reported == LIMITS_SET + NO_MEMORY:
            return "memory"
        if any(os.statvfs(folder).f_bavail == 0 for folder in (WORK, SHARED_MEMORY)):
            return "disk"
        return None

    def result(self) -> dict[str, Any]:
        status = self.ended if self.ended is not None else signal.SIGKILL
        return {
            "exit_code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
            "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
            "limit": self.limit,
            "refused": self.refused,
            "wall_s": time.monotonic() - self.began,
            "cpu_s": self.cpu_s(),
            "stdout_bytes": self.stdout.num_bytes,
            "stderr_bytes": self.stderr.num_bytes,
            "stdout_kept": len(self.stdout.kept),
            "stderr_kept": len(self.stderr.kept),
        }


def measured(pid: int) -> tuple[float, int, int]:
    """Processor seconds, resident bytes and threads of one process; zeros where it is gone."""
    try:
        fields = contents(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    except OSError:
        return 0.0, 0, 0
    cpu_s = (int(fields[11]) + int(fields[12])) / CLOCK_TICKS
    return cpu_s, int(fields[21]) * PAGE, max(1, int(fields[17]))


def own_memory(pid: int) -> int:
    """Bytes of one process, what it shares with others divided among them. One that hides this counts in full."""
    try:
        for line in contents(f"/proc/{pid}/smaps_rollup").splitlines():
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return measured(pid)[1]


def main() -> None:
    become(sys.argv[1])
    gc.freeze()
    send({"ready": True})
    watch = Watch(receive_job())
    watch.until_end()
    send(watch.result(), bytes(watch.stdout.kept), bytes(watch.stderr.kept))
    os._exit(0)


if __name__ == "__main__":
    main()

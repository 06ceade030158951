"""Sandboxes on this machine: a process of bubblewrap for each program, watched from outside."""

import asyncio
import contextlib
import fcntl
import json
import os
import resource
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from orchestrator.rollouts.clock import waiting
from orchestrator.sandbox.bubblewrap import PROGRAM, WHY_NOT, command_line, kernel_limits, system_call_filter
from orchestrator.sandbox.records import Input, LimitName, Limits, Result, SandboxError, SandboxMissing

START_DEADLINE_S, END_DEADLINE_S = 60.0, 30.0
TICK_S = 0.02
"""Between two looks at what a program uses."""
KILLED = 128 + signal.SIGKILL
_KEEPER = """
"$@" & bubblewrap=$!
exec >/dev/null 2>&1
read -r _
while :; do kill -9 $(cat /proc/$bubblewrap/task/$bubblewrap/children); sleep 0.01; done & killing=$!
wait $bubblewrap; code=$?
kill $killing
exit $code
"""
"""Ends a sandbox when its standard input closes, by us or because we are gone. It kills the first process inside, after
which all others end, and bubblewrap. Killed itself while it starts, bubblewrap would leave that process behind."""
_CLOCK_TICKS, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


class LocalSandbox:
    """Runs a bounded number of programs at once, each in a sandbox of its own that is gone after it.

    Example::

        sandbox = LocalSandbox(parallel=2)
        result = await sandbox.run("print(int(input()) + 1)", stdin=b"41")

    Use it from one event loop.
    """

    waiting: Callable[[], AbstractContextManager[object]] = staticmethod(waiting)
    """What runs enter while they wait for their turn, which is nobody's own time."""

    def __init__(self, *, limits: Limits | None = None, parallel: int | None = None) -> None:
        """`limits` hold where a run names none. `parallel` programs run at once: by default one for each core."""
        self.limits = limits or Limits()
        self.parallel = parallel if parallel is not None else len(os.sched_getaffinity(0))
        if self.parallel < 1:
            raise ValueError(f"parallel={self.parallel}: expected at least 1 program at a time")
        self._slots = asyncio.Semaphore(self.parallel)

    async def run(self, program: str, *, stdin: Input = b"", limits: Limits | None = None) -> Result:
        """Runs Python source in `/tmp` of a sandbox of its own, when its turn comes.

        Raises `ValueError` for an empty program or one with zero bytes, `SandboxMissing` where programs cannot be
        contained here (the message says what to install or allow), `SandboxError` where the sandbox failed or the
        kernel cannot set a limit. Cancelled, it kills the program.
        """
        if not program or "\0" in program:
            raise ValueError(f"expected Python source without zero bytes, got {program[:100]!r}")
        limits = limits or self.limits
        _check_kernel(limits)
        async with contextlib.AsyncExitStack() as slot:
            with self.waiting():
                await slot.enter_async_context(self._slots)
            given = stdin() if callable(stdin) else stdin
            return await _run(program.encode("utf-8", "surrogatepass"), given, limits)

    async def close(self) -> None:
        """Does nothing: programs end with the tasks that run them."""


async def _run(program: bytes, stdin: bytes, limits: Limits) -> Result:
    began = time.monotonic()
    with contextlib.ExitStack() as files:
        contents = {"filter_fd": system_call_filter(), "program_fd": program, "stdin_fd": stdin, "status_fd": b""}
        fds = {name: _in_memory(content) for name, content in contents.items()}
        for fd in fds.values():
            files.callback(os.close, fd)
        starting = asyncio.ensure_future(_start(fds, limits))
        try:
            _, outputs = await asyncio.shield(starting)
            limit = await _until_end(outputs, fds["status_fd"], limits)
        finally:
            code = await _end((await starting)[0])
        begun = b"exit-code" in os.pread(fds["status_fd"], 4096, 0)
    stdout, stderr = (output.kept for output in outputs)
    if limit is None and code == KILLED:
        limit = "killed"
    elif limit is None and not begun:
        said = stderr[:4000].decode(errors="replace").strip() or "nothing"
        raise SandboxMissing(f"bubblewrap could make no sandbox here; it said: {said}. {WHY_NOT}")
    wall_s = time.monotonic() - began
    return Result(exit_code=KILLED if limit else code, stdout=stdout, stderr=stderr, limit=limit, wall_s=wall_s)


async def _start(fds: dict[str, int], limits: Limits) -> "tuple[asyncio.subprocess.Process, list[_Output]]":
    keeper = await asyncio.create_subprocess_exec(
        *["sh", "-c", _KEEPER, "sh", *command_line(limits, **fds)],
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        pass_fds=list(fds.values()),
        env={"PATH": os.defpath},
        cwd="/",
        umask=0o022,
        start_new_session=True,
    )
    return keeper, [_Output(keeper.stdout, limits.output_bytes), _Output(keeper.stderr, limits.output_bytes)]


class _Output:
    """Reads one output to its end, and keeps so much of it."""

    def __init__(self, stream: asyncio.StreamReader | None, most: int) -> None:
        assert stream is not None
        self._stream, self._most = stream, most
        self.kept = b""
        self.overflows = False
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while part := await self._stream.read(1 << 16):
            room = self._most - len(self.kept)
            self.overflows |= len(part) > room
            self.kept += part[:room]


async def _until_end(outputs: Sequence[_Output], status: int, limits: Limits) -> LimitName | None:
    """Returns when nothing runs any more, or the limit by which it must not. Bubblewrap itself has the outputs open as
    long as anything runs, and writes to the file `status` which process is the first inside. A program's time begins
    when that one sees the program. Raises `SandboxError` where it never does."""
    reading, root = [output.reading for output in outputs], ""
    began, deadline = False, time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline:
        _, running = await asyncio.wait(reading, timeout=TICK_S)
        if any(output.overflows for output in outputs):
            return "output"
        if not running:
            return None
        line, newline, _ = os.pread(status, 4096, 0).partition(b"\n")
        root = root or (f"/proc/{json.loads(line)['child-pid']}/root" if newline else "")
        if root and not began and has_program(root):
            began, deadline = True, time.monotonic() + limits.wall_s
        if began and (limit := exceeded(root, limits)) is not None:
            return limit
    if not began:
        raise SandboxError(f"waited {START_DEADLINE_S:.0f} s for a new sandbox to start; is the machine overloaded?")
    return "wall"


async def _end(keeper: asyncio.subprocess.Process) -> int:
    """Returns bubblewrap's exit code when no process of the sandbox is left."""
    assert keeper.stdin is not None
    keeper.stdin.close()
    try:
        return await asyncio.wait_for(keeper.wait(), END_DEADLINE_S)
    except TimeoutError:
        raise SandboxError(f"waited {END_DEADLINE_S:.0f} s for the sandbox {keeper.pid} to end") from None


def has_program(root: str) -> bool:
    """Returns whether the sandbox below this root is made; until then it is the machine's root."""
    return Path(root + PROGRAM).exists()


def exceeded(root: str, limits: Limits) -> LimitName | None:
    """Returns the limit that a sandbox exceeds now, by the `/proc` and the disks below its root; None too while it
    ends."""
    try:
        used = [_used(f"{root}/proc/{name}") for name in os.listdir(f"{root}/proc") if name.isdigit()]  # noqa: PTH208
        disks = [os.statvfs(root + disk) for disk in ("/tmp", "/dev/shm")]
    except OSError:
        return None
    if sum(threads for _, _, threads in used) - 1 > limits.processes:
        return "processes"
    if sum(cpu_s for cpu_s, _, _ in used) > limits.cpu_s:
        return "cpu"
    if sum(memory for _, memory, _ in used) > limits.memory_bytes and _own_memory(root) > limits.memory_bytes:
        return "memory"
    if any(disk.f_files - disk.f_ffree > limits.num_files for disk in disks):
        return "files"
    return None


def _used(process: str) -> tuple[float, int, int]:
    """Returns processor seconds with those of children that it has waited for, resident bytes, and threads."""
    try:
        fields = Path(process, "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0.0, 0, 0
    return sum(map(int, fields[11:15])) / _CLOCK_TICKS, int(fields[21]) * _PAGE, int(fields[17])


def _own_memory(root: str) -> int:
    """Returns the bytes of all processes, what they share counted once."""
    total = 0
    for rollup in Path(root, "proc").glob("[0-9]*/smaps_rollup"):
        with contextlib.suppress(OSError):
            total += sum(int(line.split()[1]) for line in rollup.read_text().splitlines() if line.startswith("Pss:"))
    return total * 1024


def _in_memory(content: bytes) -> int:
    """Returns a file in memory; one with contents is read from its beginning, and nobody can write it any more."""
    fd = os.memfd_create("sandbox", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    if content:
        with os.fdopen(fd, "wb", closefd=False) as file:
            file.write(content)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _check_kernel(limits: Limits) -> None:
    """Raises `SandboxError` for a limit that would be refused inside."""
    for name, asked in kernel_limits(limits).items():
        most = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[1]
        if most != resource.RLIM_INFINITY and asked > most:
            raise SandboxError(
                f"the program was not run: its limit {name} would be {asked}, and at most {most} can be set here; ask "
                "for less in Limits, or start with a higher limit of the system's (ulimit -H)"
            )

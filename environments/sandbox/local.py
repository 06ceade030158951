"""Sandboxes on this machine: a process of bubblewrap for each program, watched from outside."""

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from grpo.environments.sandbox.bubblewrap import PROGRAM, WHY_NOT, command_line, system_call_filter
from grpo.environments.sandbox.records import LimitName, Limits, Result, SandboxError, SandboxMissing

from grpo import waiting

START_DEADLINE_S, END_DEADLINE_S = 60.0, 30.0
TICK_S = 0.02
"""Seconds between two looks at what a program uses."""
KILLED = 128 + signal.SIGKILL
_KEEPER = """
umask 022
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

    Example: ``result = await LocalSandbox(parallel=2).run("print(int(input()) + 1)", stdin=b"41")``
    """

    def __init__(self, *, limits: Limits | None = None, parallel: int | None = None) -> None:
        """`limits` hold where a run names none. `parallel` programs run at once: by default one for each core."""
        self.limits = limits or Limits()
        parallel = parallel if parallel is not None else len(os.sched_getaffinity(0))
        if parallel < 1:
            raise ValueError(f"parallel={parallel}: expected at least 1 program at a time")
        self._slots = asyncio.Semaphore(parallel)

    async def run(self, program: str, *, stdin: bytes = b"", limits: Limits | None = None) -> Result:
        """Runs Python source in `/tmp` of a sandbox of its own, when its turn comes; waiting for it is nobody's own
        time.

        Raises `ValueError` for an empty program or one with zero bytes, `SandboxMissing` where programs cannot be
        contained here (the message says what to install or allow), `SandboxError` where the sandbox failed. Cancelled,
        it kills the program.
        """
        if not program or "\0" in program:
            raise ValueError(f"expected Python source without zero bytes, got {program[:100]!r}")
        async with contextlib.AsyncExitStack() as slot:
            limits = limits or self.limits
            with waiting():
                await slot.enter_async_context(self._slots)
            stop = asyncio.Event()
            running = asyncio.create_task(_run(program.encode("utf-8", "surrogatepass"), stdin, limits, stop))
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                stop.set()
                await asyncio.gather(running, return_exceptions=True)
                raise


async def _run(program: bytes, stdin: bytes, limits: Limits, stop: asyncio.Event) -> Result:
    """Runs a program to its end, its limits, or the event. Not to be cancelled, which would leave processes behind."""
    with contextlib.ExitStack() as files:
        contents = {"filter_fd": system_call_filter(), "program_fd": program, "stdin_fd": stdin, "status_fd": b""}
        fds = {name: _in_memory(content) for name, content in contents.items()}
        for fd in fds.values():
            files.callback(os.close, fd)
        keeper = _keeper(limits, fds)
        streams = [stream for stream in (keeper.stdout, keeper.stderr) if stream is not None]
        outputs = [asyncio.create_task(_read(stream, limits.output_bytes, stop)) for stream in streams]
        try:
            limit = await _until_end(outputs, stop, fds["status_fd"], limits)
        finally:
            if keeper.stdin is not None:
                keeper.stdin.close()
            try:
                code = await asyncio.to_thread(keeper.wait, END_DEADLINE_S)
            except subprocess.TimeoutExpired:
                raise SandboxError(f"waited {END_DEADLINE_S:.0f} s for a sandbox to end") from None
        made = b"exit-code" in os.pread(fds["status_fd"], 4096, 0)
    stdout, stderr = [await output for output in outputs]
    if limit is None and code == KILLED:
        limit = "killed"
    elif limit is None and not made:
        said = stderr[:4000].decode(errors="replace").strip() or "nothing"
        raise SandboxMissing(f"bubblewrap could make no sandbox here; it said: {said}. {WHY_NOT}")
    return Result(exit_code=KILLED if limit else code, stdout=stdout, stderr=stderr, limit=limit)


def _keeper(limits: Limits, fds: Mapping[str, int]) -> subprocess.Popen[bytes]:
    """Starts a program in its sandbox. The event loop does not start it: uvloop leaves the other ends of the pipes open
    in there, and the outputs would never end."""
    return subprocess.Popen(
        ["sh", "-c", _KEEPER, "sh", *command_line(limits, **fds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[*fds.values()],
        env={"PATH": os.defpath},
        cwd="/",
        start_new_session=True,
    )


async def _read(pipe: IO[bytes], most: int, stop: asyncio.Event) -> bytes:
    """Reads an output to its end. Returns `most` of it, and sets the event where there is more."""
    kept, stream = b"", asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), pipe)
    with contextlib.closing(transport):
        while part := await stream.read(1 << 16):
            if len(kept) + len(part) > most:
                stop.set()
            kept = (kept + part)[:most]
    return kept


async def _until_end(
    outputs: Sequence[asyncio.Task[bytes]], stop: asyncio.Event, status: int, limits: Limits
) -> LimitName | None:
    """Returns when nothing runs any more, or the limit by which it must not. Bubblewrap itself has the outputs open as
    long as anything runs. A program's time begins when its sandbox is made. Raises `SandboxError` where it never is."""
    root, deadline = "", time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline:
        _, running = await asyncio.wait(outputs, timeout=TICK_S)
        if stop.is_set():
            return "output"  # or it is cancelled, and nobody will know
        if not running:
            return None
        if not root and (root := _root(status)):
            deadline = time.monotonic() + limits.wall_s
        if root and (limit := _exceeded(root, limits)) is not None:
            return limit
    if root:
        return "wall"
    raise SandboxError(f"waited {START_DEADLINE_S:.0f} s for a new sandbox to start; is the machine overloaded?")


def _root(status: int) -> str:
    """Returns where the sandbox's files are once it is made, by what bubblewrap tells of its first process, whose root
    is the machine's until then."""
    line, newline, _ = os.pread(status, 4096, 0).partition(b"\n")
    root = f"/proc/{json.loads(line)['child-pid']}/root" if newline else ""
    return root if root and Path(root + PROGRAM).exists() else ""


def _exceeded(root: str, limits: Limits) -> LimitName | None:
    """Returns the limit that a sandbox exceeds now, by the `/proc` and the disks below its root; None too while it
    ends."""
    try:
        used = [_used(process) for process in Path(root, "proc").glob("[0-9]*")]
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


def _used(process: Path) -> tuple[float, int, int]:
    """Returns processor seconds with those of children that it has waited for, resident bytes, and threads."""
    try:
        fields = (process / "stat").read_bytes().rpartition(b")")[2].split()
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

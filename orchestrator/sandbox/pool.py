"""A bounded number of sandboxes at once, started ahead of their programs."""

import asyncio
import contextlib
import itertools
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from orchestrator.sandbox.bubblewrap import Users, find_bubblewrap, users_here
from orchestrator.sandbox.cgroups import Cgroup, find_parent
from orchestrator.sandbox.process import SandboxProcess
from orchestrator.sandbox.records import Input, Limits, Program, Result, SandboxError, SandboxMissing, checked_files
from orchestrator.sandbox.seccomp import system_call_filter

_PROBE = """
import os, resource, time
resource.setrlimit(resource.RLIMIT_NPROC, (6, 6))
started = 0
try:
    while started < 16:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        started += 1
except OSError:
    pass
print(started)
"""
_PROBE_STARTS = b"4\n"
"""With the first process inside and the program itself, six."""


class LocalSandbox:
    """Sandboxes on this machine, one for each program, of which some wait with Python loaded.

    Example::

        async with LocalSandbox(parallel=2) as sandbox:
            result = await sandbox.run("print(int(input()) + 1)", stdin=b"41")

    Use it from one event loop.
    """

    def __init__(
        self,
        *,
        limits: Limits | None = None,
        parallel: int | None = None,
        warm: int | None = None,
        python_path: tuple[Path, ...] = (),
    ) -> None:
        """`limits` hold where a run names none. `parallel` programs run at once: by default one for each core.
        `warm` sandboxes wait, by default as many. `python_path` are folders with packages that programs may import;
        they become visible to every program."""
        self.limits = limits or Limits()
        self.parallel = parallel if parallel is not None else len(os.sched_getaffinity(0))
        if self.parallel < 1:
            raise ValueError(f"parallel={self.parallel}: expected at least 1 program at a time")
        self.warm = warm if warm is not None else self.parallel
        if self.warm < 0:
            raise ValueError(f"warm={self.warm}: expected 0 or more sandboxes that wait")
        self.python_path = tuple(path.resolve(strict=True) for path in python_path)
        self.users: Users = users_here()
        for path in self.python_path:
            if not self.users.namespaces and path.stat().st_mode & 0o005 != 0o005:
                raise ValueError(
                    f"python_path: programs cannot read {path}, because only its owner may: chmod -R o+rX it"
                )
        self._numbers = self.users.numbers()
        self._names = itertools.count()
        self.control_groups: Path | None = None
        """Where each sandbox gets a control group, once started; None where this process may not make any."""
        self._bubblewrap = ""
        self._system_calls = b""
        self._slots = asyncio.Semaphore(self.parallel)
        self._idle: deque[SandboxProcess] = deque()
        self._starting: set[asyncio.Task[None]] = set()
        self._proving = asyncio.Lock()
        self._proven = False
        self._closed = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Finds bubblewrap, and tries that a sandbox holds a program that forks without end.

        Raises `SandboxMissing` where programs cannot be contained; the message says what to install or allow.
        """
        async with self._proving:
            if self._proven:
                return
            try:
                self._system_calls = system_call_filter()
            except ValueError as error:
                raise SandboxMissing(str(error)) from None
            self._bubblewrap = find_bubblewrap()
            self.control_groups = find_parent()
            try:
                await self._prove()
            except OSError:
                if self.control_groups is None:
                    raise
                self.control_groups = None
                await self._prove()
            self._proven = True
            self._refill()

    async def _prove(self) -> None:
        """Tries whether the kernel itself keeps a program from starting more processes than it may."""
        sandbox = await self._new(self.limits.disk_bytes)
        result = await sandbox.run(_PROBE, stdin=b"", files={}, limits=Limits(wall_s=30.0))
        if result.stdout != _PROBE_STARTS:
            raise SandboxMissing(
                "a sandbox was made, but the kernel does not count the processes in it: a program that may start 4 "
                f"started more, or could not run. Linux 5.14 or later is needed. The trial ended with {result}"
            )

    async def run(
        self,
        program: Program,
        *,
        stdin: Input = b"",
        files: Mapping[str, bytes] | None = None,
        limits: Limits | None = None,
    ) -> Result:
        """Runs one program in a sandbox of its own, when its turn comes.

        Python source runs in an interpreter that waits for it, a command by its path or name; both in `/tmp`, where
        `files` are put. Raises `ValueError` for files that have no place, an empty program or one with zero
        bytes, `SandboxError` where no sandbox came up. Cancelled, it kills the program.
        """
        limits = limits or self.limits
        contents = checked_files(files)
        _check(program, contents, limits)
        if self._closed:
            raise SandboxError("this pool of sandboxes is closed: it runs no further programs")
        await self.start()
        async with self._slots:
            given = stdin() if callable(stdin) else stdin
            sandbox = await self._take(limits.disk_bytes)
            return await sandbox.run(program, stdin=given, files=contents, limits=limits)

    async def close(self) -> None:
        """Ends the sandboxes that wait. Those that run are ended with the tasks that wait for them."""
        self._closed = True
        starting = list(self._starting)
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        await asyncio.gather(*(sandbox.end() for sandbox in self._idle))
        self._idle.clear()

    async def _take(self, disk_bytes: int) -> SandboxProcess:
        """A sandbox that waits, where there is one with such a disk; else a new one."""
        if disk_bytes == self.limits.disk_bytes:
            if not self._idle and self._starting:
                await asyncio.wait(list(self._starting), return_when=asyncio.FIRST_COMPLETED)
            while self._idle:
                sandbox = self._idle.popleft()
                self._refill()
                if sandbox.alive:
                    return sandbox
                await sandbox.end()
        return await self._new(disk_bytes)

    async def _new(self, disk_bytes: int) -> SandboxProcess:
        cgroup = None
        if self.control_groups is not None:
            cgroup = Cgroup(self.control_groups / f"grpo-sandbox-{os.getpid()}-{id(self):x}-{next(self._names)}")
        sandbox = SandboxProcess(
            bubblewrap=self._bubblewrap,
            own_namespace=self.users.namespaces,
            user=next(self._numbers),
            system_calls=self._system_calls,
            python_path=self.python_path,
            disk_bytes=disk_bytes,
            cgroup=cgroup,
        )
        await sandbox.ready()
        return sandbox

    def _refill(self) -> None:
        while not self._closed and len(self._idle) + len(self._starting) < self.warm:
            task = asyncio.create_task(self._add())
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _add(self) -> None:
        """One more that waits. A failure is told to the run that then has to start its own."""
        with contextlib.suppress(SandboxError, OSError):
            self._idle.append(await self._new(self.limits.disk_bytes))


def _check(program: Program, files: Mapping[str, bytes], limits: Limits) -> None:
    if not program:
        raise ValueError("there is no program to run: expected Python source or a command, got nothing")
    if any("\0" in part for part in ([program] if isinstance(program, str) else program)):
        raise ValueError("a program or command with zero bytes in it cannot be run")
    if isinstance(program, str) and "main.py" in files:
        raise ValueError("a file cannot be called 'main.py' beside a Python program: that is the program's own name")
    num_bytes = sum(map(len, files.values()))
    if num_bytes > limits.disk_bytes:
        raise ValueError(f"the files have {num_bytes} bytes, the sandbox's disk {limits.disk_bytes}: raise disk_bytes")

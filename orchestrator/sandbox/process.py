"""One sandbox: started ahead of time, used for one program, then gone with every process in it."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from orchestrator.sandbox.bubblewrap import WHY_NOT, command_line, packages_inside
from orchestrator.sandbox.cgroups import Cgroup
from orchestrator.sandbox.records import LimitName, Limits, Program, Result, SandboxError, SandboxMissing

START_DEADLINE_S = 60.0
END_DEADLINE_S = 30.0
GRACE_S = 15.0
"""Beyond its wall time, what the first process inside gets to report, on a machine that is busy."""
_MOST_HEADER_BYTES = 1 << 16


class SandboxProcess:
    """Bubblewrap, and inside it `inside.py`, which waits for its program.

    Where this process ends, however it does, its end of the socket closes, and the first process inside ends too.
    """

    def __init__(
        self,
        *,
        bubblewrap: str,
        own_namespace: bool,
        user: int,
        system_calls: bytes,
        python_path: tuple[Path, ...],
        disk_bytes: int,
        cgroup: Cgroup | None,
    ) -> None:
        """Starts bubblewrap; `ready` says when it is up. `system_calls` is the filter for them, `user` the id that
        programs get where they have no namespace of their own."""
        self.python_path = python_path
        self._cgroup = cgroup
        self._first: int | None = None
        """A file descriptor of the first process inside, once it is known."""
        self._writer: asyncio.StreamWriter | None = None
        self._socket, theirs = socket.socketpair()
        self._info, info = os.pipe()
        filter_read, filter_write = os.pipe()
        os.write(filter_write, system_calls)
        os.close(filter_write)
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115
        command = command_line(
            bubblewrap,
            own_namespace=own_namespace,
            user=user,
            disk_bytes=disk_bytes,
            python_path=python_path,
            filter_fd=filter_read,
            info_fd=info,
        )
        try:
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self._complaints.fileno(),
                pass_fds=(info, filter_read),
                env={},
                cwd="/",
                umask=0o022,
            )
        except OSError:
            self._close_files()
            os.close(self._info)
            if cgroup is not None:
                cgroup.remove()
            raise
        finally:
            theirs.close()
            os.close(info)
            os.close(filter_read)

    def _close_files(self) -> None:
        if self._writer is None:
            self._socket.close()
        else:
            self._writer.transport.abort()
        self._complaints.close()

    async def ready(self) -> None:
        """Returns when Python inside waits for a program. Raises `SandboxMissing` where no sandbox can be made."""
        try:
            self._reader, self._writer = await asyncio.open_unix_connection(sock=self._socket)
            await self._first_report()
        except BaseException:
            await self.end()
            raise

    async def _first_report(self) -> None:
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                await self._receive()
        except asyncio.IncompleteReadError:
            self._complaints.seek(0)
            said = self._complaints.read(4000).decode(errors="replace").strip() or "nothing"
            raise SandboxMissing(f"bubblewrap could make no sandbox here; it said: {said}. {WHY_NOT}") from None
        except TimeoutError:
            raise SandboxError(
                f"waited {START_DEADLINE_S:.0f} s for a new sandbox to start Python; is the machine overloaded?"
            ) from None
        first = int(json.loads(os.read(self._info, _MOST_HEADER_BYTES))["child-pid"])
        self._first = os.pidfd_open(first)
        if self._cgroup is not None:
            self._cgroup.admit(first)

    @property
    def alive(self) -> bool:
        """Whether it still waits for its program: the kernel may have ended it for want of memory."""
        return self._process.poll() is None and not self._reader.at_eof()

    async def run(self, program: Program, *, stdin: bytes, files: Mapping[str, bytes], limits: Limits) -> Result:
        """Runs the program and ends the sandbox. Raises SandboxError where the kernel does not set its limits."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(limits.wall_s + GRACE_S):
                if self._cgroup is not None:
                    self._cgroup.set_limits(limits)
                await self._send_job(program, stdin, files, limits)
                header, stdout, stderr = await self._receive(2 * limits.output_bytes)
            return _checked_result(header, stdout, stderr)
        except TimeoutError:
            return _killed("wall", loop.time() - began)
        except (asyncio.IncompleteReadError, ConnectionError, ValueError, KeyError, TypeError):
            return _killed("killed", loop.time() - began)
        finally:
            await self.end()

    async def _send_job(self, program: Program, stdin: bytes, files: Mapping[str, bytes], limits: Limits) -> None:
        command = [] if isinstance(program, str) else list(program)
        contents = dict(files)
        if isinstance(program, str):
            contents["main.py"] = program.encode("utf-8", "surrogatepass")
        header = {
            "command": command,
            "limits": asdict(limits),
            "python_path": [str(place) for place in packages_inside(len(self.python_path))],
            "stdin_bytes": len(stdin),
            "files": [(name, len(content)) for name, content in contents.items()],
        }
        text = json.dumps(header).encode()
        assert self._writer is not None
        self._writer.write(b"".join([struct.pack("!I", len(text)), text, stdin, *contents.values()]))
        await self._writer.drain()

    async def _receive(self, most_bytes: int = 0) -> tuple[dict[str, Any], bytes, bytes]:
        """One report. Whoever holds the other end is not trusted with the sizes."""
        (length,) = struct.unpack("!I", await self._reader.readexactly(4))
        if length > _MOST_HEADER_BYTES:
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(await self._reader.readexactly(length))
        kept = [int(header.get(f"{name}_kept", 0)) for name in ("stdout", "stderr")]
        if min(kept) < 0 or sum(kept) > most_bytes:
            raise ValueError(f"outputs of {kept} bytes")
        return header, await self._reader.readexactly(kept[0]), await self._reader.readexactly(kept[1])

    async def end(self) -> None:
        """Kills what still lives, and returns when no process of the sandbox is left.

        One that is still starting ends by itself, a moment after it is up, because nobody is at the other end. Killed
        earlier, bubblewrap would leave behind the process that it has just made, which waits for it for ever.
        """
        if self._first is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first, signal.SIGKILL)
            os.close(self._first)
            self._first = None
        self._close_files()
        ending = asyncio.ensure_future(self._ended())
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await ending
            raise

    async def _ended(self) -> None:
        """Bubblewrap ends when the first process inside has, and that ends when all others have."""
        if self._process.poll() is None:
            loop, gone = asyncio.get_running_loop(), asyncio.Event()
            fd = os.pidfd_open(self._process.pid)
            loop.add_reader(fd, gone.set)
            try:
                async with asyncio.timeout(END_DEADLINE_S):
                    await gone.wait()
            except TimeoutError:
                self._process.kill()
                raise SandboxError(
                    f"waited {END_DEADLINE_S:.0f} s for the killed sandbox (process {self._process.pid}) to end; "
                    "a process of it may hang in the kernel"
                ) from None
            finally:
                loop.remove_reader(fd)
                os.close(fd)
        self._process.wait()
        os.close(self._info)
        if self._cgroup is not None:
            self._cgroup.remove()
            self._cgroup = None


def _checked_result(header: Mapping[str, Any], stdout: bytes, stderr: bytes) -> Result:
    limit, refused = header["limit"], header["refused"]
    if refused is not None:
        raise SandboxError(
            f"the program was not run, because a limit cannot be set: {refused}; ask for less in Limits, or start with "
            "a higher limit of the system's (ulimit -H)"
        )
    if limit is not None and limit not in get_args(LimitName):
        raise ValueError(f"no such limit: {limit!r}")
    exit_code, signal_number = header["exit_code"], header["signal"]
    return Result(
        exit_code=None if exit_code is None else int(exit_code),
        signal=None if signal_number is None else int(signal_number),
        stdout=stdout,
        stderr=stderr,
        stdout_bytes=int(header["stdout_bytes"]),
        stderr_bytes=int(header["stderr_bytes"]),
        limit=limit,
        wall_s=float(header["wall_s"]),
        cpu_s=float(header["cpu_s"]),
    )


def _killed(limit: LimitName, wall_s: float) -> Result:
    return Result(
        exit_code=None,
        signal=int(signal.SIGKILL),
        stdout=b"",
        stderr=b"",
        stdout_bytes=0,
        stderr_bytes=0,
        limit=limit,
        wall_s=wall_s,
        cpu_s=0.0,
    )

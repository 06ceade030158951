"""A process of `orchestrator.workers.child`: the socket to it, how it ends, and whose code ran when it did."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

from orchestrator.workers.wire import HEADER, NOBODY, RUNNING, RUNNING_VAR

log = logging.getLogger(__name__)

STDERR = 2
BUFFER_BYTES = 1 << 20
"""Read ahead from a process, and written to it before `drain` waits."""
KEY_VAR = "GRPO_ENV_KEY"
"""The environment variable with the key that an environment server and its orchestrators share; no process has it."""
KILL_TIMEOUT_S = 10.0
"""For the kernel to end a process that was killed."""


class SpawnedProcess:
    """One process in a group of its own: it does not get the terminal's Ctrl-C, and dies with all it started."""

    def __init__(self, process: subprocess.Popen[bytes], running: int) -> None:
        """`running`: descriptor of what the process has at RUNNING_VAR."""
        self._process, self._running = process, running

    async def exited(self) -> None:
        """Waits until the process has ended. It is not reaped by that, so that nothing else gets its number."""
        if self._process.returncode is not None:
            return
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        descriptor = os.pidfd_open(self._process.pid)
        try:
            loop.add_reader(descriptor, _set, done)
            try:
                await done
            finally:
                loop.remove_reader(descriptor)
        finally:
            os.close(descriptor)

    async def end(self) -> int | None:
        """Kills the process with its group, if it has not been ended so yet. Returns its exit code; None where it
        stays."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            try:
                await asyncio.wait_for(self.exited(), KILL_TIMEOUT_S)
            except TimeoutError:
                log.error("process %d was killed and has not ended within %g s", self._process.pid, KILL_TIMEOUT_S)
                return None
        return self._process.wait()

    def running(self) -> int | None:
        """The number of the rollout whose code runs, or ran when the process ended; None where none did."""
        data = os.pread(self._running, RUNNING.size, 0)
        number = RUNNING.unpack(data)[0] if len(data) == RUNNING.size else NOBODY
        return None if number == NOBODY else number

    def forget(self) -> None:
        """Closes what is kept for `running`."""
        running, self._running = self._running, -1
        if running >= 0:
            os.close(running)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class FrameStream:
    """Frames of `wire` over a pair of streams."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._size: int | None = None

    async def receive(self) -> bytes:
        """The next frame's body; a call that was cancelled loses nothing. Raises EOFError at the end."""
        try:
            if self._size is None:
                self._size = HEADER.unpack(await self.reader.readexactly(HEADER.size))[0]
            body = await self.reader.readexactly(self._size)
        except ConnectionError as error:
            raise EOFError(str(error)) from None
        self._size = None
        return body

    async def drain(self) -> None:
        """Waits while too much is buffered. That the other end is gone is for `receive` to say."""
        with contextlib.suppress(ConnectionError):
            await self.writer.drain()

    async def close(self, timeout_s: float) -> None:
        """Closes the stream, whatever is not sent yet."""
        self.writer.transport.abort()
        with contextlib.suppress(OSError):  # the deadline's TimeoutError is one, too
            async with asyncio.timeout(timeout_s):
                await self.writer.wait_closed()


async def spawn(env_id: str | None = None) -> tuple[SpawnedProcess, FrameStream]:
    """A process and the stream to it; `env_id` is the one environment that may be asked for. Raises OSError."""
    ours, theirs = socket.socketpair()
    with contextlib.ExitStack() as stack, theirs:
        stack.callback(ours.close)
        running = os.memfd_create("running")
        stack.callback(os.close, running)
        os.pwrite(running, RUNNING.pack(NOBODY), 0)
        reader, writer = await asyncio.open_connection(sock=ours, limit=BUFFER_BYTES)
        stack.callback(writer.transport.abort)
        writer.transport.set_write_buffer_limits(BUFFER_BYTES)
        process = _start(child_command(theirs.fileno(), env_id), theirs.fileno(), running)
        stack.pop_all()
    return SpawnedProcess(process, running), FrameStream(reader, writer)


def _start(command: Sequence[str], connection: int, running: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        pass_fds=(connection, running),
        stdin=subprocess.DEVNULL,
        stdout=STDERR,  # what user code prints goes to our log
        process_group=0,
        env={name: value for name, value in os.environ.items() if name != KEY_VAR} | {RUNNING_VAR: str(running)},
    )


def child_command(descriptor: int, env_id: str | None = None) -> Sequence[str]:
    """Starts `orchestrator.workers.child` on a socket."""
    # -P: files in the working directory are for the environment only, which adds it when it is found
    command = (sys.executable, "-P", "-m", "orchestrator.workers.child", str(descriptor), str(os.getpid()))
    return command if env_id is None else (*command, env_id)

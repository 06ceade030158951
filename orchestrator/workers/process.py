"""Starts environment workers on this machine, and ends them with all that they started."""

import asyncio
import contextlib
import ctypes
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

import zmq
import zmq.asyncio

from orchestrator.workers.protocol import MAX_FRAME_BYTES

log = logging.getLogger(__name__)

KEY_VAR = "GRPO_ENV_KEY"
"""The environment variable with the key that `grpo-env` and its orchestrators share."""
STDERR = 2
END_LIMIT_S = 12.0
"""For a worker's guard to end all that the worker started."""
ENVIRON_START = 49
"""Place in /proc/self/stat, from 0, of the address at which the environment begins that the process was given."""


class WorkerProcess:
    """One worker, its guard, and the socket to it."""

    def __init__(self, *, only: str | None = None, hidden: Collection[str] = ()) -> None:
        """`only`: the one environment that it may be asked for. `hidden`: environment variables that user code does not
        get. Raises OSError where it cannot be started."""
        self._folder = Path(tempfile.mkdtemp(prefix="grpo-worker-"))
        self.socket: zmq.asyncio.Socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self.socket.set_hwm(0)
        self.socket.linger = 0
        self.socket.maxmsgsize = MAX_FRAME_BYTES
        address = f"ipc://{self._folder}/socket"
        try:
            self.socket.bind(address)
            # -P: files in the working directory are for the environment only, which adds it when it is found
            command = [sys.executable, "-P", "-m", "orchestrator.workers.main", address, str(os.getpid())]
            self._process = subprocess.Popen(
                command if only is None else [*command, only],
                stdin=subprocess.DEVNULL,
                stdout=STDERR,  # what user code prints goes to our log
                process_group=0,  # it does not get the terminal's Ctrl-C
                env={name: value for name, value in os.environ.items() if name not in {KEY_VAR, *hidden}},
            )
        except BaseException:
            self._close_socket()
            raise

    def connected(self) -> None:
        """The worker has said something: nothing else is to connect, and nothing is left behind of the address."""
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def exit_code(self) -> int | None:
        """None while it runs; 128 + the number of the signal that ended it."""
        return self._process.poll()

    @property
    def how(self) -> str:
        """How it ended, for people."""
        code = self.exit_code
        if code is not None and code > 128:
            with contextlib.suppress(ValueError):
                return f"ended its process by {signal.Signals(code - 128).name}"
        return f"ended its process with exit code {code}"

    async def end(self) -> None:
        """Ends the worker and all that it started; returns when that is done."""
        self._close_socket()
        if self._process.poll() is None:
            self._process.terminate()
        try:
            async with asyncio.timeout(END_LIMIT_S):
                while self._process.poll() is None:  # noqa: ASYNC110 (a child has no event without a watcher)
                    await asyncio.sleep(0.01)
        except TimeoutError:
            log.error("worker %d was told to end and has not within %g s", self._process.pid, END_LIMIT_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _close_socket(self) -> None:
        self.socket.close(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)


def hide_environment(names: Collection[str]) -> None:
    """Blanks these variables in what /proc shows of this process, which any process of the same user can read.
    `os.environ` keeps them."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    address = int(fields[ENVIRON_START - 2])
    given = Path("/proc/self/environ").read_bytes()
    kept = {name: os.environ[name] for name in names if name in os.environ}
    for name in kept:
        del os.environ[name]
    at = 0
    for entry in given.split(b"\0"):
        key, _, value = entry.partition(b"=")
        if value and key.decode(errors="replace") in names:
            ctypes.memset(address + at + len(key) + 1, ord("*"), len(value))
        at += len(entry) + 1
    os.environ.update(kept)

"""Starts environment workers on this machine, and ends them with all that they started."""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

import psutil
import zmq

from orchestrator.workers.protocol import open_socket
from transport.hidden import ENV_KEY_VAR

log = logging.getLogger(__name__)

STDERR = 2
END_LIMIT_S = 12.0
"""For a worker's guard to end all that the worker started."""
_PREFIX, _OLD_S = "grpo-worker-", 60.0
"""Of the folders of sockets until their workers have connected, before the number of our process; and how old one of a
process that is gone must be to be removed."""


class WorkerProcess:
    """One worker, its guard, and the socket to it."""

    def __init__(self, *, only: str = "", hidden: Collection[str] = ()) -> None:
        """`only`: the one environment that it may be asked for. `hidden`: environment variables that user code does not
        get. Raises OSError where it cannot be started."""
        _remove_leftovers()
        self._folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")
        self.socket = open_socket(zmq.DEALER)
        address = f"ipc://{self._folder}/socket"
        try:
            self.socket.bind(address)
            # -P: files in the working directory are for the environment only, which adds it when it is found
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "orchestrator.workers.main", address, str(os.getpid()), only],
                stdin=subprocess.DEVNULL,
                stdout=STDERR,  # what user code prints goes to our log
                process_group=0,  # it does not get the terminal's Ctrl-C
                env={name: value for name, value in os.environ.items() if name not in {ENV_KEY_VAR, *hidden}},
            )
        except BaseException:
            self._close_socket()
            raise

    def connected(self) -> None:
        """The worker has said something: nothing else is to connect, and nothing is left behind of the address."""
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def has_ended(self) -> bool:
        """Whether it runs no more."""
        return self._process.poll() is not None

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended it."""
        code = self._process.poll()
        return code is not None and (code < 0 or code > 128)

    @property
    def how(self) -> str:
        """How it ended, for people. Its guard exits with 128 + the number of the signal that ended it."""
        code = self._process.poll()
        if code is not None and code > 128:
            with contextlib.suppress(ValueError):
                return f"ended its process by {signal.Signals(code - 128).name}"
        return f"ended its process with exit code {code}"

    async def end(self) -> None:
        """Ends the worker and all that it started; returns when that is done."""
        self._close_socket()
        self._process.terminate()
        try:
            async with asyncio.timeout(END_LIMIT_S):
                while not self.has_ended:  # noqa: ASYNC110 (a child has no event without a watcher)
                    await asyncio.sleep(0.01)
        except TimeoutError:
            log.error("worker %d was told to end and has not within %g s", self._process.pid, END_LIMIT_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _close_socket(self) -> None:
        self.socket.close(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)


def _remove_leftovers() -> None:
    """Removes the folders of programs that were killed before their workers had connected."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):
            old = time.time() - folder.stat().st_mtime > _OLD_S
            if old and not (pid.isdecimal() and psutil.pid_exists(int(pid))):
                shutil.rmtree(folder, ignore_errors=True)

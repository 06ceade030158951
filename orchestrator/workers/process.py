"""Environment workers on this machine: starts them, and ends them with all processes that they started."""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection

import zmq
from grpo.orchestrator.workers.protocol import open_socket
from grpo.transport.hidden import ENV_KEY_VAR

log = logging.getLogger(__name__)

STDERR = 2
END_LIMIT_S = 12.0
"""A worker's guard has so long to end all that the worker started."""
KILLED = 128 + signal.SIGKILL
PRINT_BURST_BYTES, PRINT_BYTES_PER_S = 8 << 20, 4 << 10
"""The code of one environment may print so much into our log at once, and so much a second after that."""
PRINT_LIMIT_S = 2.0
"""So long the last output is waited for when the program is closed."""


class ForkServer:
    """A program that has imported what workers need, and forks them; started when it is first needed."""

    def __init__(self, env_id: str, *, hidden: Collection[str] = ()) -> None:
        """`env_id`: the environment whose module is imported beforehand. `hidden`: environment variables that user code
        does not get."""
        self._env_id, self._hidden = env_id, {ENV_KEY_VAR, *hidden}
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        self._output: _Output | None = None

    def fork(self, address: str, only: str, report: int) -> None:
        """Asks for a worker that connects to `address`; its guard writes to `report`. Raises OSError."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._requests is not None
        try:
            socket.send_fds(self._requests, [f"{address}\n{only}".encode()], [report])
        except OSError:
            raise OSError(f"the program that starts workers ended with exit code {self.exit_code()}") from None

    def exit_code(self) -> int | None:
        """Returns the exit code, or 128 + the number of the signal that ended it; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._process is not None:
                code = self._process.wait(0.2)
                return code if code >= 0 else 128 - code
        return None

    def close(self) -> None:
        """Ends the program and all workers that are left."""
        if self._process is not None and self._requests is not None:
            self._requests.close()
            self._process.kill()
            self._process.wait()
            self._process = None
            if self._output is not None:
                self._output.close()

    def _start(self) -> None:
        self.close()
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._output = _Output(self._env_id)
        with theirs, contextlib.closing(os.fdopen(self._output.fd, "wb")):
            # -P: files in the working directory are for the environment only, which adds it when it is found
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "grpo.orchestrator.workers.main", str(os.getpid()), self._env_id],
                stdin=theirs.fileno(),
                stdout=self._output.fd,  # what user code prints goes to our log
                stderr=self._output.fd,
                process_group=0,  # it does not get the terminal's Ctrl-C
                env={name: value for name, value in os.environ.items() if name not in self._hidden},
            )


class _Output:
    """Copies what user code prints to our log, up to a bound: a print in each reward can fill a disk."""

    def __init__(self, env_id: str) -> None:
        self._env_id = env_id
        self._source, self.fd = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Returns when all is copied, or when a process that prints does not end."""
        self._thread.join(PRINT_LIMIT_S)

    def _copy(self) -> None:
        """Reads what is printed. Ends when no process can print any more."""
        allowed, since_s, num_left_out = float(PRINT_BURST_BYTES), time.monotonic(), 0
        while data := os.read(self._source, 1 << 16):
            now_s = time.monotonic()
            allowed = min(PRINT_BURST_BYTES, allowed + PRINT_BYTES_PER_S * (now_s - since_s))
            since_s = now_s
            if num_left_out == 0 or allowed >= PRINT_BURST_BYTES / 8:  # else each line would be reported
                self._report(num_left_out)
                kept, num_left_out = data[: int(allowed)], 0
                allowed -= len(kept)
                with contextlib.suppress(OSError):  # nobody reads our log any more
                    os.write(STDERR, kept)
                if num_left_out := len(data) - len(kept):
                    log.warning("environment %s prints more than the log takes; what follows is left out", self._env_id)
            else:
                num_left_out += len(data)
        self._report(num_left_out)
        os.close(self._source)

    def _report(self, num_bytes: int) -> None:
        if num_bytes:
            log.warning("%d bytes that environment %s printed are left out", num_bytes, self._env_id)


class WorkerProcess:
    """One worker, its guard, and the socket to it."""

    def __init__(self, server: ForkServer, *, only: str = "") -> None:
        """`only`: the one environment that may be loaded in it. Raises OSError where it cannot be started."""
        self._server, self._reported = server, b""
        self._code: int | None = None
        self._folder = tempfile.mkdtemp(prefix="grpo-worker-")
        self._report, report = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.socket = open_socket(zmq.DEALER)
        try:
            self.socket.bind(f"ipc://{self._folder}/socket")
            server.fork(f"ipc://{self._folder}/socket", only, report)
        except BaseException:
            self._close()
            raise
        finally:
            os.close(report)

    def connected(self) -> None:
        """Removes the address of the socket: the worker has connected, and no other process is to."""
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def exit_code(self) -> int | None:
        """Returns the exit code, or 128 + the number of the signal that ended it; None while it runs."""
        while self._code is None:
            try:
                data = os.read(self._report, 64)
            except BlockingIOError:
                break
            self._reported += data
            if not data:
                _, code = (*self._reported.split(), None, None)[:2]
                self._code = int(code) if code else self._server.exit_code() or KILLED
        return self._code

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended it."""
        return (self.exit_code or 0) > 128

    @property
    def how(self) -> str | None:
        """Says for people how the worker ended; None while it runs."""
        if (code := self.exit_code) is None:
            return None
        if code > 128:
            with contextlib.suppress(ValueError):
                return f"ended its process by {signal.Signals(code - 128).name}"
        return f"ended its process with exit code {code}"

    async def end(self) -> None:
        """Ends the worker and all that it started; returns when that is done."""
        guard = 0
        try:
            async with asyncio.timeout(END_LIMIT_S):
                while self.exit_code is None:
                    if self._reported and not guard:
                        guard = int(self._reported.split()[0])
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(guard, signal.SIGTERM)
                    await asyncio.sleep(0.01)
        except TimeoutError:
            log.error("the guard %d of a worker has not ended it within %g s", guard, END_LIMIT_S)
            if guard:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(guard, signal.SIGKILL)
        finally:
            self._close()

    def _close(self) -> None:
        self.socket.close(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._report)
        self._code = KILLED if self._code is None else self._code

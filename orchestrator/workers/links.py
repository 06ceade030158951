"""Ways to an environment: a process that we start, or one that an environment server starts for us.

Both ends of a link say what `wire` defines. Whoever closes a link ends the process at its other end.
"""

import asyncio
import contextlib
import hmac
import logging
import os
import secrets
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from typing import Protocol

log = logging.getLogger(__name__)

STDERR = 2
NONCE_BYTES = 32
START_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 10.0
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 5.0
KILL_TIMEOUT_S = 10.0
"""For the kernel to end a process that was killed."""
RESET_AT_CLOSE = struct.pack("ii", 1, 0)
"""As SO_LINGER: a close reaches the other end at once, however much of what was sent it has not read."""
KEY_VAR = "GRPO_ENV_KEY"
"""The environment variable with the key that an environment server and its orchestrators share."""
_WHO = {"server": b"grpo environment server", "orchestrator": b"grpo orchestrator"}


class Link(Protocol):
    """A way to one process with an environment."""

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A new process's streams. Raises OSError."""
        ...

    async def ended(self) -> str:
        """How the process ended whose stream has ended."""
        ...

    async def close(self) -> None:
        """Ends the process and what it started."""
        ...


class OwnProcess:
    """A process of this orchestrator."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as stack, theirs:
            stack.callback(ours.close)
            # A process group of its own: it does not get the terminal's Ctrl-C, and dies with all it started.
            # What user code prints goes to our log.
            self._process = await asyncio.create_subprocess_exec(
                *child_command(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=STDERR,
                process_group=0,
            )
            streams = await asyncio.open_connection(sock=ours)
            stack.pop_all()
        return streams

    async def ended(self) -> str:
        code = None
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                code = await asyncio.wait_for(self._process.wait(), 1.0)
        return f"ended its process with exit code {code}"

    async def close(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            try:
                await asyncio.wait_for(self._process.wait(), KILL_TIMEOUT_S)
            except TimeoutError:
                log.error("process %d was killed and has not ended within %g s", self._process.pid, KILL_TIMEOUT_S)
        self._process = None


class NotOurServer(OSError):
    """What listens at an address is something else, or has another key; waiting does not help."""


class RemoteProcess:
    """A process that the environment server at `address` starts for each connection."""

    def __init__(self, address: str, start_timeout_s: float = START_TIMEOUT_S) -> None:
        """`address` is `host:port`. For `start_timeout_s` a server that is away is waited for."""
        self._address, self._start_timeout_s = address, start_timeout_s

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Tries again with growing pauses while nobody answers. Raises NotOurServer at once."""
        clock = asyncio.get_running_loop().time
        deadline_s, pause_s = clock() + self._start_timeout_s, FIRST_PAUSE_S
        while True:
            try:
                return await self._connect(min(CONNECT_TIMEOUT_S, max(FIRST_PAUSE_S, deadline_s - clock())))
            except NotOurServer:
                raise
            except OSError as error:
                if deadline_s - clock() <= pause_s:
                    raise
                if pause_s == FIRST_PAUSE_S:
                    log.warning("waiting for the environment server, %g s at most: %s", self._start_timeout_s, error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _connect(self, limit_s: float) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = split_address(self._address)
        try:
            async with asyncio.timeout(limit_s):
                reader, writer = await asyncio.open_connection(host, port)
                try:
                    await self._greet(reader, writer)
                except BaseException:
                    writer.transport.abort()
                    raise
        except TimeoutError:
            raise OSError(
                f"no answer from env.address = {self._address} within {limit_s:.2g} s; look whether its environment "
                "server can be reached and is not stopped"
            ) from None
        except NotOurServer as error:
            raise NotOurServer(f"env.address = {self._address}: {error}") from None
        except OSError as error:
            raise OSError(f"env.address = {self._address}: {error}; start its environment server") from error
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
        return reader, writer

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Proves the key to the server and has it prove its own. Raises NotOurServer, and ConnectionError where the
        connection is reset, as that of a server which is just being ended."""
        ours = secrets.token_bytes(NONCE_BYTES)
        writer.write(ours)
        try:
            theirs, proof = await reader.readexactly(NONCE_BYTES), await reader.readexactly(NONCE_BYTES)
        except asyncio.IncompleteReadError:
            raise NotOurServer("what listens there is no environment server; start one there") from None
        if not hmac.compare_digest(proof, prove("server", ours, theirs)):
            raise NotOurServer(f"its key is another one; set {KEY_VAR} to the same text on both sides")
        writer.write(prove("orchestrator", ours, theirs))

    async def ended(self) -> str:
        return f"of the server at {self._address} ended its process or the connection; see that server's log"

    async def close(self) -> None:
        """The server ends the process when the connection is closed."""


def child_command(descriptor: int) -> Sequence[str]:
    """Starts `orchestrator.workers.child` on a socket."""
    # -P: files in the working directory are for the environment only, which adds it when it is found
    return (sys.executable, "-P", "-m", "orchestrator.workers.child", str(descriptor), str(os.getpid()))


def prove(who: str, orchestrators: bytes, servers: bytes) -> bytes:
    """That one knows the key, by both sides' nonces. Without a key, only that one speaks this protocol."""
    key = os.environ.get(KEY_VAR, "").encode()
    return hmac.digest(key, _WHO[who] + orchestrators + servers, "sha256")


def split_address(address: str) -> tuple[str, int]:
    """Host and port. Raises ValueError."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdigit() and int(port) < 1 << 16):
        raise ValueError(f"{address!r} is not an address, expected host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)

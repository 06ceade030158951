"""Ways to an environment: a process that we start, or one that an environment server starts for us.

Both ends of a link say what `wire` defines. Whoever closes a link ends the process at its other end.
"""

import asyncio
import contextlib
import hmac
import os
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Protocol

STDERR = 2
NONCE_BYTES = 32
CONNECT_TIMEOUT_S = 10.0
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
            await self._process.wait()
        self._process = None


class RemoteProcess:
    """A process that the environment server at `address` starts for each connection."""

    def __init__(self, address: str) -> None:
        """`address` is `host:port`."""
        self._address = address

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = split_address(self._address)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(host, port)
                await self._greet(reader, writer)
        except TimeoutError:
            raise OSError(f"no answer from env.address = {self._address} within {CONNECT_TIMEOUT_S:g} s") from None
        except OSError as error:
            raise OSError(f"env.address = {self._address}: {error}; start its environment server") from error
        return reader, writer

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Proves the key to the server and has it prove its own."""
        ours = secrets.token_bytes(NONCE_BYTES)
        writer.write(ours)
        try:
            theirs, proof = await reader.readexactly(NONCE_BYTES), await reader.readexactly(NONCE_BYTES)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()
            raise OSError("what listens there is no environment server") from None
        if not hmac.compare_digest(proof, prove("server", ours, theirs)):
            writer.close()
            raise OSError(f"its key is another one; set {KEY_VAR} to the same text on both sides")
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

"""Ways to an environment: a process that we start, or one that an environment server starts for us.

Both ends of a link say what `wire` defines. Whoever closes a link ends the process at its other end.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import struct
from http import HTTPStatus
from typing import Protocol
from urllib.parse import urlsplit

import aiohttp
import msgspec

from orchestrator.workers.spawned import KEY_VAR, KILL_TIMEOUT_S, FrameStream, SpawnedProcess, spawn
from orchestrator.workers.tunnel import ENDED, GOING_AWAY, HEARTBEAT_S, MAX_MESSAGE_BYTES, PROTOCOL, Tunnel
from orchestrator.workers.wire import HEADER

log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 10.0
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 5.0
CLOSE_TIMEOUT_S = 10.0
EXIT_TIMEOUT_S = 1.0
"""For a process to end that has closed its connection."""
RESET_AT_CLOSE = struct.pack("ii", 1, 0)
"""As SO_LINGER: a close reaches the other end at once, however much of what was sent it has not read."""
SESSION, HEALTH = "/v1/session", "/health"
KILL = "kill"
"""The word upon which a server ends the process."""
AWAY = {
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
}
"""Answers of a server, or of a proxy before it, that may be others in a moment."""


class Obituary(msgspec.Struct):
    """How a server's process has ended: the reason with which a WebSocket is closed, as JSON."""

    exit_code: int | None
    """None: it was killed and stays."""
    running: int | None
    """As `Link.running`."""


class Link(Protocol):
    """A way to one process with an environment."""

    async def open(self) -> None:
        """Has a new process, and forgets an earlier one. Raises OSError, and NotOurServer."""
        ...

    def send(self, data: bytes) -> None:
        """Whole frames, as `wire.frame` makes them; they are buffered. What an ended process is sent is dropped."""
        ...

    async def drain(self) -> None:
        """Waits while too much of what was sent is buffered."""
        ...

    async def receive(self) -> bytes:
        """The next frame's body; a call that was cancelled loses nothing. Raises EOFError at the end of the stream."""
        ...

    async def ended(self) -> str:
        """How the process ended whose stream has ended."""
        ...

    async def running(self) -> int | None:
        """The number of the rollout whose code ran last in the process, which has ended; None where that is not
        known. Until `close`."""
        ...

    def lost(self) -> bool:
        """Whether the stream has ended because of the connection, or of whoever holds its other end, and nobody's code
        is to blame. Until `close`."""
        ...

    async def kill(self) -> None:
        """Ends the process and what it started."""
        ...

    async def close(self) -> None:
        """Ends the process and what it started, and forgets it."""
        ...


class OwnProcess:
    """A process of this orchestrator."""

    def __init__(self) -> None:
        self._process: SpawnedProcess | None = None
        self._stream: FrameStream | None = None

    async def open(self) -> None:
        await self.close()
        self._process, self._stream = await spawn()

    def send(self, data: bytes) -> None:
        if self._stream is not None:
            self._stream.writer.write(data)

    async def drain(self) -> None:
        if self._stream is not None:
            await self._stream.drain()

    async def receive(self) -> bytes:
        if self._stream is None:
            raise EOFError("the process has been ended")
        return await self._stream.receive()

    async def ended(self) -> str:
        if self._process is None:
            return "has been ended"
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.exited(), EXIT_TIMEOUT_S)
            return how_it_ended(await self._process.end())
        return "closed its connection, and did not end by itself"

    async def running(self) -> int | None:
        return None if self._process is None else self._process.running()

    def lost(self) -> bool:
        return False

    async def kill(self) -> None:
        if self._process is not None:
            await self._process.end()
        if self._stream is not None:
            self._stream.writer.transport.abort()  # what the process started may hold its end open

    async def close(self) -> None:
        process, stream, self._process, self._stream = self._process, self._stream, None, None
        if process is not None:
            await process.end()
            process.forget()
        if stream is not None:
            await stream.close(CLOSE_TIMEOUT_S)


def how_it_ended(code: int | None) -> str:
    """An exit code as `subprocess` gives it, in words."""
    if code is None or code >= 0:
        return f"ended its process with exit code {code}"
    return f"had its process ended by {signal.Signals(-code).name}"


class NotOurServer(OSError):
    """What listens at an address is something else, or has another key; waiting does not help."""


class RemoteProcess:
    """A process that the environment server at `address` starts for each session."""

    def __init__(self, address: str, start_timeout_s: float = START_TIMEOUT_S) -> None:
        """`address`: `http://host:port`, or https. For `start_timeout_s` a server that is away is waited for. Raises
        ValueError for another address."""
        self._url = session_url(address)
        self._address, self._start_timeout_s = address, start_timeout_s
        self._session: _Session | None = None

    async def open(self) -> None:
        """Tries again with growing pauses while nobody answers. Raises NotOurServer at once."""
        await self.close()
        clock = asyncio.get_running_loop().time
        deadline_s, pause_s = clock() + self._start_timeout_s, FIRST_PAUSE_S
        while True:
            try:
                self._session = await self._connect(min(CONNECT_TIMEOUT_S, max(FIRST_PAUSE_S, deadline_s - clock())))
                return
            except NotOurServer:
                raise
            except OSError as error:
                if deadline_s - clock() <= pause_s:
                    raise
                if pause_s == FIRST_PAUSE_S:
                    log.warning("waiting for the environment server, %g s at most: %s", self._start_timeout_s, error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def send(self, data: bytes) -> None:
        if self._session is not None:
            self._session.tunnel.send(data)

    async def drain(self) -> None:
        if self._session is not None:
            await self._session.tunnel.drain()

    async def receive(self) -> bytes:
        if self._session is None:
            raise EOFError("the process has been ended")
        return await self._session.receive()

    async def ended(self) -> str:
        if self._session is None:
            return "has been ended"
        code, obituary = self._session.tunnel.close_code, self._session.obituary()
        if obituary is not None:
            how = how_it_ended(obituary.exit_code)
        elif code == GOING_AWAY:
            how = "has ended with its server"
        else:
            how = "has lost its connection"
        return f"of the server at {self._address} {how}; see that server's log"

    async def running(self) -> int | None:
        obituary = None if self._session is None else self._session.obituary()
        return None if obituary is None else obituary.running

    def lost(self) -> bool:
        return self._session is not None and self._session.obituary() is None

    async def kill(self) -> None:
        """Waits until the server says that the process has ended; where it does not, hangs up."""
        if self._session is not None:
            self._session.tunnel.say(KILL)
            try:
                await asyncio.wait_for(self._session.tunnel.over.wait(), KILL_TIMEOUT_S)
            except TimeoutError:
                self._session.abort()

    async def close(self) -> None:
        """The server ends the process when the connection is closed."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _connect(self, limit_s: float) -> "_Session":
        session = _Session(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)))
        try:
            async with asyncio.timeout(limit_s):
                await session.open(self._url)
        except BaseException as error:
            await session.close()
            if not isinstance(error, OSError | aiohttp.ClientError):
                raise
            raise self._explained(error, limit_s) from None
        return session

    def _explained(self, error: OSError | aiohttp.ClientError, limit_s: float) -> OSError:
        """What is said about a connection that has failed, as NotOurServer where waiting does not help."""
        where = f"env.address = {self._address}"
        if isinstance(error, TimeoutError):
            return OSError(
                f"no answer from {where} within {limit_s:.2g} s; look whether its environment server can be reached "
                "and is not stopped"
            )
        if isinstance(error, aiohttp.WSServerHandshakeError):
            if error.status == HTTPStatus.UNAUTHORIZED:
                return NotOurServer(f"{where}: its key is another one; set {KEY_VAR} to the same text on both sides")
            if error.status in AWAY:
                return OSError(f"{where}: it answers with status {error.status}; see that server's log")
            return NotOurServer(f"{where}: {NO_SERVER} (it answers with status {error.status})")
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            return NotOurServer(f"{where}: {error}; for an authority of your own set SSL_CERT_FILE")
        if isinstance(error, aiohttp.ClientSSLError):
            return OSError(f"{where}: {error}; is there no TLS, say http://")
        if isinstance(error, OSError) and not isinstance(error, NotOurServer):
            return OSError(f"{where}: {error}; start its environment server")
        return NotOurServer(f"{where}: {NO_SERVER} ({error})")


NO_SERVER = "what listens there is no environment server of this version; start one there: grpo-env ENV_ID"


class _Session:
    """A connection to an environment server."""

    tunnel: Tunnel

    def __init__(self, client: aiohttp.ClientSession) -> None:
        self._client = client
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._stack = contextlib.AsyncExitStack()
        self._frames = _Frames()

    async def open(self, url: str) -> None:
        """Raises OSError, NotOurServer and ClientError."""
        key = os.environ.get(KEY_VAR)
        self._socket = await self._client.ws_connect(
            url,
            protocols=(PROTOCOL,),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            heartbeat=HEARTBEAT_S,
            max_msg_size=MAX_MESSAGE_BYTES,
            ssl=ssl.create_default_context() if url.startswith("https:") else True,
        )
        if self._socket.protocol != PROTOCOL:
            raise NotOurServer(f"it does not speak {PROTOCOL}")
        self.tunnel = await self._stack.enter_async_context(Tunnel(self._socket))

    async def receive(self) -> bytes:
        """As Link.receive."""
        while (body := self._frames.next()) is None:
            data = await self.tunnel.read()
            if not data:
                raise EOFError("the connection has ended")
            self._frames.feed(data)
        return body

    def obituary(self) -> Obituary | None:
        """What the server has said of the process's end."""
        if self.tunnel.close_code != ENDED:
            return None
        with contextlib.suppress(msgspec.MsgspecError):
            return msgspec.json.decode(self.tunnel.close_reason, type=Obituary)
        return None

    async def close(self) -> None:
        """Whatever is not sent yet, and whether or not the server still reads."""
        await self._stack.aclose()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                if self._socket is not None:
                    self.abort()
                    await self._socket.close()
                await self._client.close()

    def abort(self) -> None:
        """Ends the connection, if there still is one, at once."""
        connection = None if self._socket is None else self._socket.get_extra_info("socket")
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
                connection.shutdown(socket.SHUT_RDWR)


class _Frames:
    """Cuts a stream into the bodies of its frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        """What comes next in the stream."""
        self._data += data

    def next(self) -> bytes | None:
        """A frame's body; None where it is not there yet."""
        if len(self._data) < HEADER.size:
            return None
        end = HEADER.size + HEADER.unpack_from(self._data)[0]
        if len(self._data) < end:
            return None
        with memoryview(self._data) as view:
            body = bytes(view[HEADER.size : end])
        del self._data[:end]
        return body


def session_url(address: str) -> str:
    """Where a server at `http://host:port` has sessions. Raises ValueError for another kind of address."""
    parts = urlsplit(address)
    plain = f"{parts.scheme}://{parts.netloc}"
    if address.rstrip("/") != plain or parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
        raise ValueError(f"{address!r} is not the address of an environment server, expected http://host:port")
    _ = parts.port  # raises for what is no port
    return plain + SESSION

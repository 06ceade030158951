"""`grpo-env ENV_ID [--host HOST] [--port PORT]`: an environment for orchestrators elsewhere, over HTTP.

Each session, a WebSocket at /v1/session, gets a process of its own with the environment, made with the arguments that
the orchestrator's `env.args` give; it ends with the session. /health says how many there are. Where other machines
reach the address, both sides need the same GRPO_ENV_KEY, which orchestrators send as a bearer token. What is said is
not encrypted; a proxy before the server can do that.
"""

import argparse
import asyncio
import contextlib
import hmac
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine
from http import HTTPStatus
from typing import Any, NoReturn

import msgspec
from aiohttp import web

from orchestrator.workers.links import EXIT_TIMEOUT_S, HEALTH, KILL, RESET_AT_CLOSE, SESSION, Obituary
from orchestrator.workers.spawned import KEY_VAR, FrameStream, SpawnedProcess, spawn
from orchestrator.workers.tunnel import ENDED, GOING_AWAY, HEARTBEAT_S, MAX_MESSAGE_BYTES, PIECE_BYTES, PROTOCOL, Tunnel
from transport.keys import is_loopback

log = logging.getLogger(__name__)

GREETING_S = 10.0
"""For a connection to become a session; any other is closed by then."""
MAX_GREETING = 64
"""So many connections may be no sessions yet; further ones are not accepted until one is, or is closed."""
ACCEPT_PAUSE_S = 1.0
CLOSE_TIMEOUT_S = 20.0
REST_S = 5.0
"""For what a process said before it ended to be sent, and for the other end to take its leave."""
SHUTDOWN_S = 1.0
"""For what is still answered when all else has ended."""
MIN_KEY_CHARACTERS = 16


class EnvironmentServer:
    """Listens, and starts a process for each session."""

    def __init__(self, env_id: str, host: str, port: int) -> None:
        """Raises ValueError for an address that others reach without a key, OSError where it cannot be listened on."""
        key = os.environ.get(KEY_VAR, "")
        if not is_loopback(host) and len(key) < MIN_KEY_CHARACTERS:
            raise ValueError(
                f"{host} can be reached from other machines, and {KEY_VAR} has {len(key)} characters, expected at "
                f"least {MIN_KEY_CHARACTERS}; make one with: openssl rand -hex 32, and set it on both sides"
            )
        self._env_id = env_id
        self._authorization = f"Bearer {key}".encode() if key else b""
        self._socket = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.setblocking(False)
        self._connections = _Connections(self._answer)
        self._sessions: set[asyncio.Task[Any]] = set()
        self._closed = asyncio.Event()
        host, port = self._socket.getsockname()[:2]
        self.address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        """Where it listens."""

    async def serve(self) -> NoReturn:
        """Consumes: connections. Waits for: them, and where too many are no sessions yet, for one of those. Unblocked
        by: orchestrators, and GREETING_S. Ends when: it is cancelled. What it lacks for a moment, such as file
        descriptors, it waits for."""
        while True:
            await self._connections.places.acquire()
            try:
                await self._accept()
            except OSError as error:
                self._connections.places.release()
                log.warning("cannot take a connection: %s; trying again in %g s", error, ACCEPT_PAUSE_S)
                await asyncio.sleep(ACCEPT_PAUSE_S)

    async def close(self) -> None:
        """Listens no more, and ends all processes and what they started. Call it when `serve` has ended."""
        self._socket.close()
        self._closed.set()
        self._connections.reset_those_that_are_no_sessions()
        if self._sessions:
            await asyncio.wait(self._sessions, timeout=CLOSE_TIMEOUT_S)
        if self._sessions:
            log.error("%d processes have not ended within %g s", len(self._sessions), CLOSE_TIMEOUT_S)
        await self._connections.shutdown(SHUTDOWN_S)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        connection, _ = await loop.sock_accept(self._socket)
        await loop.connect_accepted_socket(self._connections, connection)

    # --- requests ---

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """One request is all that a connection is for."""
        if request.path == SESSION:
            response = self._refusal(request) or await self._session(request)
        elif request.path == HEALTH:
            response = web.json_response({"env_id": self._env_id, "sessions": len(self._sessions)})
        else:
            response = web.Response(status=HTTPStatus.NOT_FOUND, text=f"there are {HEALTH} and {SESSION}\n")
        response.force_close()
        return response

    def _refusal(self, request: web.BaseRequest) -> web.StreamResponse | None:
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if not hmac.compare_digest(given, self._authorization):
            status, why = HTTPStatus.UNAUTHORIZED, f"its key is another one; set {KEY_VAR} to the same on both sides"
        elif "Origin" in request.headers:  # a page of any site may have a browser on this machine connect
            status, why = HTTPStatus.FORBIDDEN, "browsers are not served"
        elif web.WebSocketResponse(protocols=(PROTOCOL,)).can_prepare(request).protocol != PROTOCOL:
            status, why = HTTPStatus.UPGRADE_REQUIRED, f"expected a WebSocket with the subprotocol {PROTOCOL}"
        else:
            return None
        log.warning("refused a session to %s: %s", request.remote, why)
        return web.Response(status=status, text=f"{why}\n")

    async def _session(self, request: web.BaseRequest) -> web.StreamResponse:
        """With a process of its own, until either ends."""
        task = asyncio.current_task()
        assert task is not None
        self._sessions.add(task)
        try:
            process, stream = await spawn(self._env_id)
        except OSError as error:
            self._sessions.discard(task)
            log.error("%s could not be served: %s", request.remote, error)
            return web.Response(status=HTTPStatus.SERVICE_UNAVAILABLE, text="the process could not be started\n")
        try:
            response = web.WebSocketResponse(
                protocols=(PROTOCOL,), heartbeat=HEARTBEAT_S, compress=False, max_msg_size=MAX_MESSAGE_BYTES
            )
            await response.prepare(request)
            self._connections.greeted(request.protocol)
            log.info("%s is served by a new process", request.remote)
            await self._run(process, stream, response)
        finally:
            code = await process.end()
            log.info("the process of %s has ended with exit code %s", request.remote, code)
            process.forget()
            await stream.close(REST_S)
            self._sessions.discard(task)
            if request.transport is not None:
                request.transport.abort()  # what is not sent by now waits for nobody
        return response

    async def _run(self, process: SpawnedProcess, stream: FrameStream, response: web.WebSocketResponse) -> None:
        """Until the process ends, is to be ended, or the orchestrator hangs up. That is not left to the process to
        see: code of the environment may keep all its threads from running."""
        killed = asyncio.Event()
        async with Tunnel(response, on_word=lambda word: killed.set() if word == KILL else None) as tunnel:
            both = [asyncio.create_task(_pass_on(tunnel, stream)), asyncio.create_task(_bring_back(stream, tunnel))]
            try:
                events = (killed, tunnel.over, self._closed)
                await _first_of(process.exited(), asyncio.wait(both[1:]), *(event.wait() for event in events))
                if both[1].done():
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(process.exited(), EXIT_TIMEOUT_S)
                obituary = Obituary(exit_code=await process.end(), running=process.running())
                if not killed.is_set():  # else the orchestrator waits for nothing
                    await _first_of(_rest(both[1], tunnel), tunnel.over.wait(), self._closed.wait())
                is_there = not tunnel.over.is_set()
            finally:
                for task in both:
                    task.cancel()
                await asyncio.gather(*both, return_exceptions=True)
        if is_there:
            code = GOING_AWAY if self._closed.is_set() else ENDED
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(response.close(code=code, message=msgspec.json.encode(obituary)), REST_S)


class _Connections(web.Server):
    """Gives each connection GREETING_S to become a session, and MAX_GREETING of them at once."""

    def __init__(self, answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> None:
        super().__init__(answer, access_log=None, lingering_time=0)
        self.places = asyncio.Semaphore(MAX_GREETING)
        """Taken by whoever accepts a connection."""
        self._timers: dict[web.RequestHandler, asyncio.TimerHandle] = {}

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self._timers[handler] = asyncio.get_running_loop().call_later(GREETING_S, self._is_late, transport)

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self.greeted(handler)

    def greeted(self, handler: web.RequestHandler) -> None:
        """It is a session, or has ended."""
        timer = self._timers.pop(handler, None)
        if timer is not None:
            timer.cancel()
            self.places.release()

    def reset_those_that_are_no_sessions(self) -> None:
        """So that they are tried again: one that is hung up is taken for that of another program."""
        for handler in list(self._timers):
            if handler.transport is not None:
                connection = handler.transport.get_extra_info("socket")
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
                handler.transport.abort()

    def _is_late(self, transport: asyncio.Transport) -> None:
        log.warning("closed a connection of %s: it took too long to greet", transport.get_extra_info("peername"))
        transport.abort()


async def _pass_on(tunnel: Tunnel, stream: FrameStream) -> None:
    """What the orchestrator says, to the process."""
    with contextlib.suppress(ConnectionError):
        while data := await tunnel.read():
            stream.writer.write(data)
            await stream.writer.drain()


async def _bring_back(stream: FrameStream, tunnel: Tunnel) -> None:
    """What the process says, to the orchestrator."""
    with contextlib.suppress(ConnectionError):
        while data := await stream.reader.read(PIECE_BYTES):
            tunnel.send(data)
            await tunnel.drain()


async def _rest(back: asyncio.Task[None], tunnel: Tunnel) -> None:
    """Waits for what the process said before it ended to be sent, for a while."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(REST_S):
            await asyncio.wait([back])
            await tunnel.drain(0)


async def _first_of(*waits: Coroutine[Any, Any, Any]) -> None:
    """Until one has ended; the others are cancelled."""
    tasks = [asyncio.create_task(one) for one in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _serve(env_id: str, host: str, port: int) -> int:
    """Until a signal ends it. Returns the exit code."""
    try:
        server = EnvironmentServer(env_id, host, port)
    except (ValueError, OSError, OverflowError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    log.info("serving %s at %s", env_id, server.address)
    serving = asyncio.create_task(server.serve())
    signals: list[int] = []

    def end(number: int) -> None:
        signals.append(number)
        serving.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, end, number)
    try:
        await asyncio.wait([serving])
    finally:
        await server.close()
    return 128 + signals[0] if signals else await serving


def main() -> None:
    """Serves one environment until it is ended by a signal. Exit codes: 2 bad arguments, 130 SIGINT, 143 SIGTERM."""
    parser = argparse.ArgumentParser(
        prog="grpo-env", description="Serves one environment to orchestrators whose env.address leads here."
    )
    parser.add_argument("env_id", metavar="ENV_ID", help="as env.id: a built-in name, module:Class or file.py:Class")
    parser.add_argument("--host", default="127.0.0.1", help="where it listens (default: %(default)s)")
    parser.add_argument("--port", type=int, default=7000, help="0: any that is free (default: %(default)s)")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    raise SystemExit(asyncio.run(_serve(options.env_id, options.host, options.port)))


if __name__ == "__main__":
    main()

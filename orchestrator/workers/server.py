"""`grpo-env ENV_ID [--host HOST] [--port PORT]`: serves an environment to orchestrators elsewhere, over ZeroMQ.

Each worker that an orchestrator requests is a process of its own here, which ends with its session. If other machines
reach the address, both sides need the same GRPO_ENV_KEY: it encrypts all messages, and keeps others out.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from dataclasses import dataclass

import zmq
import zmq.asyncio
from grpo.orchestrator.rollouts.registry import check_id
from grpo.orchestrator.workers.process import ForkServer, WorkerProcess
from grpo.orchestrator.workers.protocol import (
    ALIVE,
    ALIVE_INTERVAL_S,
    LEFT,
    SERVER_ALIVE,
    SILENCE_LIMIT_S,
    Left,
    encode,
    frame_of,
    open_socket,
    other_protocol,
    protocol_of,
)
from grpo.transport.errors import TransportError, UserError
from grpo.transport.hidden import ENV_KEY_VAR, RUN_KEYS, hide_environment
from grpo.transport.keys import SharedKey, is_loopback
from grpo.transport.limits import raise_file_limit
from grpo.transport.logs import start_log
from grpo.transport.ports import port_number

log = logging.getLogger(__name__)

MIN_KEY_CHARACTERS = 16
MAX_SESSIONS = 64
"""Workers at a time. An orchestrator has up to 16 beside its `num_workers` after one of them has ended."""


@dataclass(slots=True, eq=False)
class _Session:
    """One orchestrator's worker."""

    process: WorkerProcess
    heard_s: float
    relaying: asyncio.Task[None] | None = None


class EnvironmentServer:
    """Passes messages between orchestrators and their workers, unread."""

    def __init__(self, env_id: str, host: str, port: int) -> None:
        """Raises ValueError for an address that other machines reach without a key, zmq.ZMQError for one that cannot be
        listened on."""
        secret = os.environ.get(ENV_KEY_VAR, "")
        if not is_loopback(host) and len(secret) < MIN_KEY_CHARACTERS:
            raise ValueError(
                f"{host} can be reached from other machines, and {ENV_KEY_VAR} has {len(secret)} characters, expected "
                f"at least {MIN_KEY_CHARACTERS}; make one with: openssl rand -hex 32, and set it on both sides"
            )
        self._env_id, self._forks = env_id, ForkServer(env_id, hidden=RUN_KEYS)
        self._socket = open_socket(zmq.ROUTER)
        if secret:
            SharedKey(secret).encrypt(self._socket, serves=True)
        at = f"[{host}]" if ":" in host else host
        self._socket.bind(f"tcp://{at}:{port or '*'}")
        bound = str(self._socket.get_string(zmq.LAST_ENDPOINT)).rpartition(":")[2]
        self.address = f"tcp://{at}:{bound}"
        """The address at which it listens."""
        self._sessions: dict[bytes, _Session] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Reads what orchestrators send. Ends when it is cancelled."""
        watching = asyncio.create_task(self._watch())
        try:
            while True:
                who, frame = (await self._socket.recv_multipart())[:2]
                if who not in self._sessions:  # other messages belong to a session that is over
                    if frame == ALIVE:
                        await self._begin(who)
                    elif (protocol := protocol_of(frame)) is not None:
                        await self._send(who, frame_of(encode(Left(how=other_protocol(protocol)))))
                if (session := self._sessions.get(who)) is None:
                    continue
                session.heard_s = time.monotonic()
                if frame == LEFT:
                    self._end(who, None)
                elif frame == ALIVE:
                    await self._send(who, SERVER_ALIVE)
                else:
                    session.process.socket.send(frame)  # a worker that is still coming up gets it later
        finally:
            watching.cancel()

    async def close(self) -> None:
        """Stops listening, and ends all workers and what they started."""
        for who in list(self._sessions):
            self._end(who, Left(how="has ended with its server", killed=True))
        await asyncio.gather(*self._ending)
        self._forks.close()
        self._socket.close()

    async def _begin(self, who: bytes) -> None:
        if len(self._sessions) >= MAX_SESSIONS:
            log.error("a session was refused: there are %d already", len(self._sessions))
            how = f"was not started: the server at {self.address} has {MAX_SESSIONS} workers already, its most"
            await self._send(who, frame_of(encode(Left(how=f"{how}; start one more grpo-env, or lower num_workers"))))
            return
        try:
            session = self._sessions[who] = _Session(WorkerProcess(self._forks, only=self._env_id), time.monotonic())
        except (OSError, zmq.ZMQError) as error:
            log.error("a session could not be served: %s", error)
            await self._send(who, frame_of(encode(Left(how=f"could not be started: {error}"))))
            return
        session.relaying = asyncio.create_task(self._relay(who, session))
        await self._send(who, ALIVE)
        log.info("a session has begun; there are %d", len(self._sessions))

    async def _relay(self, who: bytes, session: _Session) -> None:
        """Sends what a worker says to its orchestrator."""
        while True:
            frame = await session.process.socket.recv()
            session.process.connected()
            await self._socket.send_multipart([who, frame])

    async def _watch(self) -> None:
        """Ends the sessions of workers that have ended, and of orchestrators that are silent."""
        while True:
            await asyncio.sleep(ALIVE_INTERVAL_S / 4)
            for who, session in list(self._sessions.items()):
                if session.process.exit_code is not None:
                    await asyncio.sleep(ALIVE_INTERVAL_S / 10)  # its last messages are sent first
                    how = f"of the server at {self.address} {session.process.how}"
                    self._end(who, Left(how=how, killed=session.process.was_killed))
                elif time.monotonic() - session.heard_s > SILENCE_LIMIT_S:
                    how = f"was ended by {self.address}, which heard nothing from here for {SILENCE_LIMIT_S:g} s"
                    self._end(who, Left(how=how, killed=True))

    def _end(self, who: bytes, left: Left | None) -> None:
        """`left` is what the orchestrator is sent; None where it has left itself."""
        if (session := self._sessions.pop(who, None)) is None:
            return
        if session.relaying is not None:
            session.relaying.cancel()
        ending = asyncio.create_task(self._end_worker(who, session, left))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def _end_worker(self, who: bytes, session: _Session, left: Left | None) -> None:
        if left is not None:
            await self._send(who, frame_of(encode(left)))
        await session.process.end()
        log.info("a session has ended: the worker %s", session.process.how)

    async def _send(self, who: bytes, frame: bytes) -> None:
        with contextlib.suppress(zmq.ZMQError):
            await self._socket.send_multipart([who, frame])


async def _serve(env_id: str, host: str, port: int) -> int:
    """Serves until a signal ends it. Returns the exit code."""
    try:
        server = EnvironmentServer(env_id, host, port)
    except (ValueError, TransportError, zmq.ZMQError) as error:
        print(f"error: {host}:{port}: {error}", file=sys.stderr)
        return 2
    log.info("serving %s at %s", env_id, server.address)
    serving = asyncio.create_task(server.serve())
    signals: list[int] = []

    def end(number: int) -> None:
        signals.append(number)
        serving.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, end, number)
    await asyncio.wait([serving])
    await server.close()
    if signals:
        return 128 + signals[0]
    serving.result()
    return 0


def main() -> None:
    """Serves one environment until it is ended by a signal. Exit codes: 2 bad arguments, 130 SIGINT, 143 SIGTERM."""
    parser = argparse.ArgumentParser(
        prog="grpo-env", description="Serves one environment to orchestrators whose env.address leads here."
    )
    parser.add_argument("env_id", metavar="ENV_ID", help="as in env.id: a built-in name, module:Class or file.py:Class")
    parser.add_argument("--host", default="127.0.0.1", help="where it listens (default: %(default)s)")
    parser.add_argument("--port", type=port_number, default=7000, help="0: any that is free (default: %(default)s)")
    options = parser.parse_args()
    try:
        check_id(options.env_id)
    except UserError as error:
        parser.error(str(error))
    raise_file_limit()
    hide_environment(RUN_KEYS)
    start_log()
    raise SystemExit(asyncio.run(_serve(options.env_id, options.host, options.port)))


if __name__ == "__main__":
    main()

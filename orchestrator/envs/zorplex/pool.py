"""A pool of tool workers: processes that take calls in turn, are asked whether they live, and are replaced if not."""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.episodes.context import CallFailed

log = logging.getLogger(__name__)

KILL_TIMEOUT_S = 5.0
"""For the kernel to end a worker that was killed."""
RESTART_PAUSE_S = 0.2
"""Between attempts to start a worker that does not come up."""
MAX_CALLS_IN_FLIGHT = 32
"""Of one worker."""
MAX_LINE_BYTES = 1 << 20
"""Of an answer; a worker that says more has gone astray."""


class PoolFailed(CallFailed):
    """No worker has answered a call, which is not the fault of who made it: it costs the rollout."""


class _Gone(Exception):
    """A worker has ended, or does not answer."""


class Worker:
    """One process. Any number of calls may be on their way to it; they are told apart by their numbers."""

    def __init__(self, command: Sequence[str]) -> None:
        """`command` is followed by two numbers: the worker's end of a socket, and our process id."""
        self._command = tuple(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Mapping[str, Any] | None]] = {}
        """None is what comes of those whose worker ends."""
        self._free = asyncio.Semaphore(MAX_CALLS_IN_FLIGHT)
        self._numbers = itertools.count()
        self.num_answered = 0
        self.taken_out = asyncio.Event()
        """Nobody calls it any more."""

    @property
    def pid(self) -> int | None:
        """Of its process, where it has one."""
        return self._process.pid if self._process is not None else None

    async def start(self, timeout_s: float) -> None:
        """Comes up and answers a ping. Raises _Gone and OSError."""
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as stack, theirs:
            stack.callback(ours.close)
            # A process group of its own: it does not get the terminal's Ctrl-C.
            self._process = subprocess.Popen(  # noqa: ASYNC220 (returns at once, and needs no child watcher)
                [*self._command, str(theirs.fileno()), str(os.getpid())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
            reader, self._writer = await asyncio.open_connection(sock=ours, limit=MAX_LINE_BYTES)
            stack.pop_all()
        self._listening = asyncio.create_task(self._listen(reader))
        await self.call({}, timeout_s)

    async def call(self, request: Mapping[str, Any], timeout_s: float) -> Mapping[str, Any]:
        """The answer to a request; to an empty one, a ping, an empty one. Raises _Gone."""
        async with self._free:  # what waits here says nothing about the worker, so its deadline has not begun
            return await self._call(request, timeout_s)

    async def _call(self, request: Mapping[str, Any], timeout_s: float) -> Mapping[str, Any]:
        if self._writer is None or self._listening is None or self._listening.done():
            raise _Gone("is not running")
        number = next(self._numbers)
        waiting: asyncio.Future[Mapping[str, Any] | None] = asyncio.get_running_loop().create_future()
        self._waiting[number] = waiting
        try:
            async with asyncio.timeout(timeout_s):
                self._writer.write(json.dumps({"id": number, **request}).encode() + b"\n")
                await self._writer.drain()
                answer = await waiting
        except TimeoutError:
            raise _Gone(f"did not answer within {timeout_s:g} s") from None
        except ConnectionError:
            raise _Gone("ended") from None
        finally:
            del self._waiting[number]
        if answer is None:
            raise _Gone("ended")
        return answer

    def close(self) -> None:
        """Ends the process; calls on their way raise _Gone."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            try:
                self._process.wait(KILL_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                log.error("tool worker %d was killed and has not ended within %g s", self.pid, KILL_TIMEOUT_S)
        if self._writer is not None:
            self._writer.close()
        if self._listening is not None:
            self._listening.cancel()
        self._process = self._writer = self._listening = None

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Hands answers to those who wait. Consumes lines; ends with the stream, and then nobody waits any longer."""
        try:
            while line := await reader.readline():
                self._take(line)
        except (ConnectionError, ValueError):  # a ValueError is a line without end
            pass
        finally:
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_result(None)

    def _take(self, line: bytes) -> None:
        """An answer that nobody waits for, since it is late, is let go, and so is what is no answer."""
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            return
        number = answer.pop("id", None) if isinstance(answer, dict) else None
        waiting = self._waiting.get(number) if isinstance(number, int) else None
        if waiting is not None and not waiting.done():
            self.num_answered += 1
            waiting.set_result(answer)


class ToolPool:
    """Workers that answer calls in turn. Starts with the first call, and ends with the event loop or `close`.

    A worker that dies, or answers a call or a ping too late, is taken out and started anew; what it was asked goes to
    another.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        num_workers: int = 2,
        call_timeout_s: float = 5.0,
        ping_interval_s: float = 5.0,
        start_timeout_s: float = 15.0,
        limit_s: float = 20.0,
    ) -> None:
        """`command` starts a worker; it is followed by the worker's end of a socket and our process id.
        `start_timeout_s` is also how long a call waits for a worker when there is none. `limit_s`: for a call with all
        its attempts; to stay below the run's `reward_timeout_s`."""
        if num_workers < 1:
            raise ValueError(f"num_workers is {num_workers}, expected at least 1")
        for name, value in (("call_timeout_s", call_timeout_s), ("ping_interval_s", ping_interval_s)):
            if not value > 0:
                raise ValueError(f"{name} is {value}, expected more than 0")
        self._command, self._num_workers = tuple(command), num_workers
        self._call_timeout_s, self._ping_interval_s = call_timeout_s, ping_interval_s
        self._start_timeout_s, self._limit_s = start_timeout_s, limit_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._keepers: list[asyncio.Task[None]] = []
        self._healthy: list[Worker] = []
        self._changed = asyncio.Event()
        self._turn = 0
        self.num_restarts = 0

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Those that are up."""
        return tuple(self._healthy)

    async def call(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """The answer of the worker whose turn it is, or of another where that one fails. Raises PoolFailed where each
        of `num_workers` + 1 attempts fails, or all of them take too long."""
        self._begin()
        try:
            async with asyncio.timeout(self._limit_s):
                return await self._attempt(request)
        except TimeoutError:
            raise PoolFailed(f"no tool worker has answered within {self._limit_s:g} s") from None

    async def _attempt(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        why = ""
        for _ in range(self._num_workers + 1):
            worker = await self._next()
            try:
                return await worker.call(request, self._call_timeout_s)
            except _Gone as error:
                why = f"tool worker {worker.pid} {error}"
                self._take_out(worker, why)
        raise PoolFailed(f"{self._num_workers + 1} tool workers in a row have failed; the last: {why}")

    async def close(self) -> None:
        """Ends all workers."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self._keepers, self._loop = [], None

    def _begin(self) -> None:
        """One keeper for each worker, in the event loop that calls."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        self._loop, self._healthy, self._changed = loop, [], asyncio.Event()
        self._keepers = [loop.create_task(self._keep()) for _ in range(self._num_workers)]

    async def _next(self) -> Worker:
        """The healthy worker whose turn it is. Waits for one to come up, `start_timeout_s` at most."""
        try:
            async with asyncio.timeout(self._start_timeout_s):
                while not self._healthy:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise PoolFailed(f"no tool worker has come up within {self._start_timeout_s:g} s") from None
        self._turn += 1
        return self._healthy[self._turn % len(self._healthy)]

    async def _keep(self) -> None:
        """Keeps one worker up: starts it, pings it, and starts it anew when it is out. Ends when it is cancelled."""
        while True:
            worker = Worker(self._command)
            try:
                await worker.start(self._start_timeout_s)
                self._healthy.append(worker)
                self._changed.set()
                await self._watch(worker)
            except (_Gone, OSError) as error:
                self._take_out(worker, f"tool worker {worker.pid} {error}")
            finally:
                if worker in self._healthy:
                    self._healthy.remove(worker)
                worker.close()
            self.num_restarts += 1
            await asyncio.sleep(RESTART_PAUSE_S)

    async def _watch(self, worker: Worker) -> None:
        """Waits for the worker to be taken out; pings it in between. Raises _Gone."""
        while worker in self._healthy:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._ping_interval_s):
                    await worker.taken_out.wait()
                    return
            await worker.call({}, self._call_timeout_s)

    def _take_out(self, worker: Worker, why: str) -> None:
        if worker in self._healthy:
            self._healthy.remove(worker)
            log.warning("%s; it is started anew", why)
        worker.taken_out.set()

"""One environment worker as the orchestrator sees it: how it comes up, what is said, how it ends."""

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field

import msgspec
import zmq
import zmq.asyncio

from orchestrator.rollouts.records import Failure
from orchestrator.workers.failures import LATE, EnvironmentFailed, EnvironmentKilled
from orchestrator.workers.process import WorkerProcess
from orchestrator.workers.protocol import (
    ALIVE,
    ALIVE_INTERVAL_S,
    GONE,
    Alive,
    Ask,
    Call,
    Cancel,
    Dataset,
    Ended,
    Failed,
    FromWorker,
    Gone,
    Load,
    Loaded,
    Outcome,
    Prompts,
    Raised,
    Reply,
    Run,
    Sample,
    Store,
    ToWorker,
    decode_from_worker,
    encode,
    open_socket,
)
from transport.hidden import ENV_KEY_VAR
from transport.keys import SharedKey

START_TIMEOUT_S = 60.0
"""For Python to come up in a worker, or for an environment server to answer."""
CONNECT_TIMEOUT_S = 5.0
"""For one attempt to reach an environment server."""
STILL_GRACE_S = 5.0
"""Beyond the deadline of its rollouts, what a worker may be silent before it is ended."""
WATCH_INTERVAL_S = 0.05
MAX_SUSPECTS = 4
"""Rollouts that are run alone where a worker has ended: those whose code it was told to go on with when it said its
last."""
CRASHED = "env_crashed"

Answerer = Callable[[Call], Awaitable[Reply]]
"""Answers a rollout's calls. What it raises ends the run, but GivenUp."""


class GivenUp(Exception):
    """Raised by what answers calls: the rollout comes to nothing."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(failure.message)


class WorkerGone(Exception):
    """The worker ended, or was ended. `suspect`: this rollout's own code may have done it. `killed`: by a signal."""

    def __init__(self, failure: Failure, *, suspect: bool, killed: bool = False) -> None:
        self.failure, self.suspect, self.killed = failure, suspect, killed
        super().__init__(failure.message)


class _Unreachable(Exception):
    """No worker came up; another attempt may help."""


class _Killed(_Unreachable):
    """A signal has ended it."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Rollout:
    """One that runs in the worker."""

    answer: Answerer
    over: asyncio.Future[Outcome | Failure]
    answering: set[asyncio.Task[None]] = field(default_factory=set)
    """Its calls that wait for us."""
    began_s: float = field(default_factory=time.monotonic)
    told_s: float = field(default_factory=time.monotonic)
    """When its code was last told something: to begin, or an answer."""


class Session:
    """One worker with its environment: a process of ours, or one that an environment server has for us."""

    def __init__(self, label: str, load: Load, *, address: str | None, hidden: Collection[str], start_s: float) -> None:
        self._label, self._load, self._address, self._hidden = label, load, address, hidden
        self._start_s = start_s
        self._process: WorkerProcess | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._opening: asyncio.Task[Loaded] | None = None
        self._requested: asyncio.Future[FromWorker] | None = None
        self._request_lock = asyncio.Lock()
        self._rollouts: dict[int, _Rollout] = {}
        self._numbers = itertools.count()
        self._outgoing: list[bytes] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._heard_s = 0.0
        """When the worker last said something."""
        self.num_running = 0
        """Rollouts that it has now, or has yet to begin."""
        self.spent = self.over = False
        """It should be replaced; it has ended and is never used again."""

    @property
    def num_at_code(self) -> int:
        """Rollouts that wait for no answer of ours, but for the environment."""
        return self.num_running - sum(bool(rollout.answering) for rollout in self._rollouts.values())

    async def open(self) -> Loaded:
        """The worker comes up and constructs the environment. Raises EnvironmentFailed."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
        return await asyncio.shield(self._opening)

    async def request(self, message: Load | Dataset, what: str) -> FromWorker:
        """The answer to a request without which the environment is of no use. Raises EnvironmentFailed."""
        try:
            async with self._request_lock, asyncio.timeout(self._load.timeout_s):
                self._requested = asyncio.get_running_loop().create_future()
                self._send(message)
                answer = await self._requested
        except TimeoutError:
            why = f"it took longer than reward_timeout_s = {self._load.timeout_s:g} s"
            raise EnvironmentFailed(f"environment {self._label}: {what}: {why}") from None
        except WorkerGone as gone:
            kind = EnvironmentKilled if gone.killed else EnvironmentFailed
            raise kind(f"environment {self._label}: {what}: {gone}") from None
        if isinstance(answer, Raised):
            raise EnvironmentFailed(f"environment {self._label}: {what} raised\n{answer.message}")
        return answer

    async def run(self, run: Run, answer: Answerer) -> Outcome | Failure:
        """Rolls out one episode. Raises WorkerGone, EnvironmentFailed, and what `answer` raises."""
        self.num_running += 1
        try:
            await self.open()
            if self.over:
                raise WorkerGone(Failure(reason=CRASHED, message="the worker has ended"), suspect=False)
            run.rollout = number = next(self._numbers)
            if run.answer is not None:
                run.answer.rollout = number
            rollout = _Rollout(answer=answer, over=asyncio.get_running_loop().create_future())
            self._rollouts[number] = rollout
            self._send(run)
            try:
                return await rollout.over
            except asyncio.CancelledError:
                self._send(Cancel(rollout=number))
                raise
            finally:
                for task in rollout.answering:
                    task.cancel()
                del self._rollouts[number]
        finally:
            self.num_running -= 1

    async def close(self) -> None:
        """Ends the worker and what it started."""
        if self._opening is not None and not self._opening.done():
            self._opening.cancel()
            await asyncio.wait([self._opening])
        await self._gone("was closed", CRASHED)

    # --- how it comes up ---

    async def _open(self) -> Loaded:
        deadline_s = time.monotonic() + self._start_s
        while self._socket is None:
            try:
                await self._reach()
            except (_Unreachable, OSError) as error:
                await self._release()
                if self._address is None or time.monotonic() >= deadline_s:
                    kind = EnvironmentKilled if isinstance(error, _Killed) else EnvironmentFailed
                    raise kind(f"environment {self._label} did not start: {error}") from None
                await asyncio.sleep(WATCH_INTERVAL_S)
        self._heard_s = time.monotonic()
        self._tasks = [asyncio.create_task(one) for one in (self._read(), self._watch())]
        try:
            loaded = await self.request(self._load, f"constructing {self._load.env_id}")
            assert isinstance(loaded, Loaded)
        except BaseException:
            await self._gone("could not be constructed", CRASHED)
            raise
        return loaded

    async def _reach(self) -> None:
        """A worker that has said that it lives. Raises _Unreachable and OSError."""
        if self._address is None:
            self._process = WorkerProcess(hidden=self._hidden)
            self._socket, limit_s = self._process.socket, self._start_s
        else:
            self._socket, limit_s = _connected(self._address), min(self._start_s, CONNECT_TIMEOUT_S)
            await self._socket.send(ALIVE)
        deadline_s = time.monotonic() + limit_s
        while not await self._socket.poll(50):
            if self._process is not None and self._process.has_ended:
                raise (_Killed if self._process.was_killed else _Unreachable)(f"it {self._process.how}")
            if time.monotonic() > deadline_s:
                raise _Unreachable(
                    f"it took longer than {limit_s:g} s, before any code of its own"
                    if self._address is None
                    else f"no answer from env.address = {self._address} within {self._start_s:g} s; start grpo-env "
                    f"there, and set {ENV_KEY_VAR} to the same on both sides"
                )
        if self._process is not None:
            self._process.connected()

    async def _release(self) -> None:
        socket, process, self._socket, self._process = self._socket, self._process, None, None
        if process is not None:
            await process.end()
        elif socket is not None:
            with contextlib.suppress(zmq.ZMQError):
                await socket.send(GONE, zmq.NOBLOCK)
            socket.close()

    # --- messages ---

    def _send(self, message: ToWorker) -> None:
        """What is sent at one time goes out together. Who watches notices a worker that has ended."""
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(encode(message))

    def _flush(self) -> None:
        parts, self._outgoing = self._outgoing, []
        if self._socket is not None:
            with contextlib.suppress(zmq.ZMQError):
                self._socket.send_multipart(parts)

    async def _read(self) -> None:
        """Consumes what the worker says. Ends with the session."""
        try:
            while self._socket is not None:
                for part in await self._socket.recv_multipart():
                    self._heard_s = time.monotonic()
                    message = decode_from_worker(part)
                    if isinstance(message, Gone):
                        await self._gone(message.how, CRASHED)
                        return
                    self._take(message)
        except zmq.ZMQError:
            return
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            await self._gone(f"said what cannot be understood: {error}", "env_error")

    def _take(self, message: FromWorker) -> None:
        match message:
            case Ended() | Failed() | Sample() | Ask() | Store():
                rollout = self._rollouts.get(message.rollout)
                if rollout is not None and not rollout.over.done():
                    self._take_of(rollout, message)
            case Loaded() | Prompts() | Raised():
                if self._requested is not None and not self._requested.done():
                    self._requested.set_result(message)
            case Alive():
                self.spent = self.spent or message.spent

    def _take_of(self, rollout: _Rollout, message: Ended | Failed | Call) -> None:
        if isinstance(message, Ended):
            rollout.over.set_result(message.outcome)
        elif isinstance(message, Failed):
            told = f"environment {self._label}: {message.message}"
            rollout.over.set_result(Failure(reason=message.reason, message=told, began_s=rollout.began_s))
        else:
            answering = asyncio.create_task(self._answer(rollout, message))
            rollout.answering.add(answering)

    async def _answer(self, rollout: _Rollout, call: Call) -> None:
        try:
            reply = await rollout.answer(call)
            rollout.told_s = time.monotonic()
            self._send(reply)
        except GivenUp as error:
            self._send(Cancel(rollout=call.rollout))
            if not rollout.over.done():
                rollout.over.set_result(error.failure)
        except Exception as error:
            if not rollout.over.done():
                rollout.over.set_exception(error)
        finally:
            if (task := asyncio.current_task()) is not None:
                rollout.answering.discard(task)

    # --- how it ends ---

    async def _watch(self) -> None:
        """Notices a worker that has ended, and one that is silent past the deadline of its rollouts; tells an
        environment server that we are there. Ends with the session."""
        said_s, limit_s = 0.0, self._load.timeout_s + STILL_GRACE_S
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            now_s = time.monotonic()
            if self._process is not None and self._process.has_ended:
                await asyncio.sleep(WATCH_INTERVAL_S)  # for what it said before to be read
                await self._gone(self._process.how, CRASHED, killed=self._process.was_killed)
            elif now_s - self._heard_s > limit_s:
                limit = f"reward_timeout_s = {self._load.timeout_s:g} s"
                await self._gone(f"took longer than {limit}, and held up its worker, or is no longer reached", LATE)
            elif self._address is not None and now_s - said_s > ALIVE_INTERVAL_S:
                said_s = now_s
                self._send(Alive())

    async def _gone(self, how: str, reason: str, *, killed: bool = False) -> None:
        """Nothing runs in the worker any more: rollouts learn of it, and all that it started is ended."""
        if self.over:
            return
        self.over = True
        message = f"environment {self._label} {how}"
        running = [rollout for rollout in self._rollouts.values() if not rollout.over.done()]
        ran = [rollout for rollout in running if not rollout.answering]
        suspects = sorted(ran, key=lambda rollout: abs(rollout.told_s - self._heard_s))[:MAX_SUSPECTS]
        for rollout in running:
            failure = Failure(reason=reason, message=message, began_s=rollout.began_s)
            rollout.over.set_exception(WorkerGone(failure, suspect=rollout in suspects))
        if self._requested is not None and not self._requested.done():
            self._requested.set_exception(
                WorkerGone(Failure(reason=reason, message=message), suspect=True, killed=killed)
            )
        await self._release()
        for task in self._tasks:
            task.cancel()


def _connected(address: str) -> zmq.asyncio.Socket:
    """A socket to an environment server, which is not connected again once the connection is lost."""
    socket = open_socket(zmq.DEALER)
    socket.reconnect_ivl = -1
    if key := os.environ.get(ENV_KEY_VAR):
        SharedKey(key).encrypt(socket, serves=False)
    socket.connect(address.rstrip("/"))
    return socket

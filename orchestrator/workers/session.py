"""The orchestrator's session with one environment worker: its start, its messages, its end."""

import asyncio
import contextlib
import itertools
import os
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from grpo.orchestrator.rollouts.records import Failure
from grpo.orchestrator.workers.failures import LATE, EnvironmentFailed, EnvironmentKilled
from grpo.orchestrator.workers.process import ForkServer, WorkerProcess
from grpo.orchestrator.workers.protocol import (
    ALIVE,
    ALIVE_INTERVAL_S,
    LEFT,
    PROTOCOL,
    SILENCE_LIMIT_S,
    Alive,
    AnyCall,
    CallRefused,
    Cancel,
    EnvironmentInfo,
    Failed,
    FromWorker,
    Left,
    Load,
    LoadDataset,
    Outcome,
    Prompts,
    Reply,
    RunEpisode,
    Score,
    ServerAlive,
    ToWorker,
    Withdraw,
    decode_from_worker,
    encode,
    frame_of,
    open_socket,
    other_protocol,
)
from grpo.transport.hidden import ENV_KEY_VAR
from grpo.transport.keys import SharedKey

START_TIMEOUT_S = 120.0
"""Deadline for Python to start in a worker, or for an environment server to answer."""
CONNECT_TIMEOUT_S = 5.0
"""Deadline for one attempt to reach an environment server."""
STILL_GRACE_S = 5.0
"""A worker may be silent so long beyond the deadline of its rollouts before it is ended."""
WATCH_INTERVAL_S = 0.02
CRASHED, BROKEN = "env_crashed", "env_error"

Answerer = Callable[[AnyCall], Awaitable[Reply]]
"""Answers a rollout's calls. GivenUp ends the rollout; anything else that it raises ends the run."""


class GivenUp(Exception):
    """The rollout has failed. Raised by what answers its calls."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(failure.message)


class WorkerLost(Exception):
    """The worker ended, or was ended. `killed`: by a signal, or with its server. `waited`: this rollout waited for an
    answer of ours, so that none of its code ran."""

    def __init__(self, failure: Failure, *, killed: bool = False, waited: bool = False) -> None:
        self.failure, self.killed, self.waited = failure, killed, waited
        super().__init__(failure.message)


class RemoteWorker:
    """A worker of an environment server."""

    exit_code, was_killed, how = None, False, None

    def __init__(self, address: str) -> None:
        """The socket is not connected again once the connection is lost."""
        self.socket = open_socket(zmq.DEALER)
        self.socket.reconnect_ivl = -1
        if key := os.environ.get(ENV_KEY_VAR):
            SharedKey(key).encrypt(self.socket, serves=False)
        self.socket.connect(address.rstrip("/"))
        self.socket.send(ALIVE)

    def connected(self) -> None:
        """Does nothing; see WorkerProcess.connected."""

    async def end(self) -> None:
        """Leaves the server, which ends the worker."""
        with contextlib.suppress(zmq.ZMQError):
            await self.socket.send(LEFT, zmq.NOBLOCK)
        self.socket.close()


Settle = Callable[[Any], None]
"""Called once, with a job's outcome: the worker's answer, or an error."""


class Session:
    """One worker with its environment: a process of ours, or one of an environment server."""

    def __init__(
        self,
        label: str,
        load: Load,
        *,
        forks: ForkServer,
        address: str | None,
        start_s: float = START_TIMEOUT_S,
        loaded_before: bool = False,
    ) -> None:
        """`address`: of the environment server; None for a process of `forks`. `loaded_before`: this run has loaded the
        environment; if that fails now, it may work when the run is started again."""
        self._label, self._load, self._forks, self._address = label, load, forks, address
        self._start_s, self._loaded_before = start_s, loaded_before
        self._limit_s = max(start_s, load.timeout_s)
        """The environment's code may take so long. Until it is constructed, the start of a worker counts too."""
        self._worker: WorkerProcess | RemoteWorker | None = None
        self._opening: asyncio.Task[EnvironmentInfo] | None = None
        self._jobs: dict[int, tuple[Answerer | None, Settle]] = {}
        """What answers the calls of each job that is not over, and who is told its outcome."""
        self._answering = defaultdict[int, dict[asyncio.Task[None], int]](dict)
        """Calls of rollouts that wait for an answer of ours, by job, with their numbers."""
        self._numbers = itertools.count(1)
        self._outgoing: list[bytes] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._heard_s = self._reached_s = 0.0
        """Times of the newest message: from the worker; from it or its environment server."""
        self.num_running = 0
        """Rollouts that run in it or are about to."""
        self.over = False
        """The worker has ended, and the session is never used again."""

    @property
    def num_in_environment(self) -> int:
        """Rollouts that wait for the environment, and not for an answer of ours."""
        return self.num_running - sum(map(bool, self._answering.values()))

    async def open(self) -> EnvironmentInfo:
        """Starts the worker and constructs the environment. Raises EnvironmentFailed."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
        return self._opening.result() if self._opening.done() else await asyncio.shield(self._opening)

    async def request(self, message: Load | LoadDataset, what: str) -> Any:
        """Returns the answer to a request that must succeed. Raises EnvironmentFailed."""
        try:
            async with asyncio.timeout(self._limit_s):
                answer = await self._do(message)
        except TimeoutError:
            why = f"it took longer than {self._limit}"
            raise EnvironmentFailed(f"environment {self._label}: {what}: {why}") from None
        except WorkerLost as lost:
            kind = EnvironmentKilled if lost.killed else EnvironmentFailed
            raise kind(f"environment {self._label}: {what}: {lost}") from None
        if isinstance(answer, Failure):
            error = answer.message.strip()
            between = "\n" if "\n" in error else ": "  # a traceback begins on a line of its own
            raise EnvironmentFailed(f"environment {self._label}: {what} raised{between}{error}")
        return answer

    async def run(
        self, request: RunEpisode | Score, answers: Sequence[Answerer], over: Callable[[int], None] = lambda index: None
    ) -> "list[Outcome | Failure | WorkerLost]":
        """Rolls out an episode, or scores answers to one prompt; each of `answers` answers the calls of one rollout.
        Returns an outcome for each, which is WorkerLost if the worker ended first. `over` is called with the index of
        each other one as soon as that is known. Raises EnvironmentFailed, and what `answers` raise."""
        self.num_running += len(answers)
        numbers: list[int] = []
        try:
            await self.open()
            if self.over:
                lost = WorkerLost(Failure(reason=CRASHED, message="the worker has ended"), waited=True)
                return [lost] * len(answers)
            known: dict[int, Outcome | Failure | WorkerLost] = {}
            all_known = asyncio.get_running_loop().create_future()

            def settle(index: int, outcome: Any) -> None:
                if isinstance(outcome, Exception) and not isinstance(outcome, WorkerLost):
                    _set(all_known, outcome)
                    return
                known[index] = outcome
                if not isinstance(outcome, WorkerLost):
                    over(index)
                if len(known) == len(answers):
                    _set(all_known, None)

            jobs = [(answer, partial(settle, index)) for index, answer in enumerate(answers)]
            numbers = self._begin(request, jobs)
            await all_known
            return [known[index] for index in range(len(answers))]
        finally:
            for number in numbers:
                self._forget(number)
            self.num_running -= len(answers)

    async def close(self) -> None:
        """Ends the worker and what it started."""
        if self._opening is not None and not self._opening.done():
            self._opening.cancel()
            await asyncio.wait([self._opening])
        await self._end("was closed", CRASHED)

    # --- start ---

    async def _open(self) -> EnvironmentInfo:
        deadline_s = time.monotonic() + self._start_s
        while (failed := await self._reach()) is not None:
            await self._release()
            if self._address is None or time.monotonic() >= deadline_s:
                raise failed
            await asyncio.sleep(WATCH_INTERVAL_S)
        self._heard_s = self._reached_s = time.monotonic()
        self._tasks = [asyncio.create_task(one) for one in (self._read(), self._watch())]
        try:
            loaded: EnvironmentInfo = await self.request(self._load, f"constructing {self._load.env_id}")
        except BaseException:
            await self._end("could not be constructed", CRASHED)
            raise
        self._limit_s = self._load.timeout_s
        return loaded

    @property
    def _limit(self) -> str:
        name = "reward_timeout_s = " if self._limit_s == self._load.timeout_s else ""
        return f"{name}{self._limit_s:g} s"

    async def _reach(self) -> EnvironmentFailed | None:
        """Starts a worker and waits for its first message. Returns why there is none."""
        kind = EnvironmentKilled if self._loaded_before else EnvironmentFailed
        why = f"it took longer than {self._start_s:g} s to be imported"
        limit_s = self._start_s
        if self._address is not None:
            limit_s = min(limit_s, CONNECT_TIMEOUT_S)
            why = (
                f"no answer from env.address = {self._address} within {self._start_s:g} s; start grpo-env there, and "
                f"set {ENV_KEY_VAR} to the same on both sides"
            )
        try:
            worker = WorkerProcess(self._forks) if self._address is None else RemoteWorker(self._address)
            self._worker, deadline_s = worker, time.monotonic() + limit_s
            while worker.exit_code is None and time.monotonic() < deadline_s:
                if await worker.socket.poll(50):
                    worker.connected()
                    return None
            if worker.exit_code is not None:
                kind, why = EnvironmentKilled if worker.was_killed else kind, f"it {worker.how}"
        except OSError as error:
            why = str(error)
        return kind(f"environment {self._label} did not start: {why}")

    async def _release(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.end()

    # --- messages ---

    async def _do(self, message: Load | LoadDataset) -> Any:
        """Returns the answer to a request. Raises WorkerLost."""
        outcome = asyncio.get_running_loop().create_future()
        [number] = self._begin(message, [(None, partial(_set, outcome))])
        try:
            return await outcome
        finally:
            self._forget(number)

    def _begin(
        self, message: Load | LoadDataset | RunEpisode | Score, jobs: Sequence[tuple[Answerer | None, Settle]]
    ) -> list[int]:
        """Sends the message that begins these jobs. Returns their numbers."""
        numbers = [next(self._numbers) for _ in jobs]
        message.job = numbers[0]
        self._send(message)
        self._jobs.update(zip(numbers, jobs, strict=True))
        return numbers

    def _forget(self, number: int) -> None:
        """Cancels a job that is not over, and its calls."""
        if self._jobs.pop(number, None) is not None:
            self._send(Cancel(job=number))
        for task in self._answering.pop(number, ()):
            task.cancel()

    def _settle(self, number: int, outcome: Any) -> None:
        """Passes the outcome of a job on, the first time that there is one."""
        if (job := self._jobs.pop(number, None)) is not None:
            _, settle = job
            settle(outcome)

    def _send(self, message: ToWorker) -> None:
        """Sends a message, in one frame with the others of this turn of the event loop. `_watch` notices a worker that
        has ended."""
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(encode(message))

    def _flush(self) -> None:
        messages, self._outgoing = self._outgoing, []
        if self._worker is not None:
            with contextlib.suppress(zmq.ZMQError):
                self._worker.socket.send(frame_of(*messages))

    async def _read(self) -> None:
        """Reads the worker's messages. Ends with the session."""
        try:
            while (worker := self._worker) is not None:
                messages = decode_from_worker(await worker.socket.recv())
                self._reached_s = time.monotonic()
                for message in messages:
                    if isinstance(message, Alive) and message.protocol != PROTOCOL:
                        await self._end(other_protocol(message.protocol), CRASHED)
                        return
                    if isinstance(message, Left):
                        await self._end(message.how, CRASHED, killed=message.killed)
                        return
                    if not isinstance(message, ServerAlive):
                        self._heard_s = self._reached_s
                        self._take(message)
        except zmq.ZMQError:
            return
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            await self._end(f"said what cannot be understood: {error}", BROKEN)

    def _take(self, message: FromWorker) -> None:
        if isinstance(message, Alive | ServerAlive | Left):
            return
        if (job := self._jobs.get(message.job)) is None:
            return  # nobody waits for it any more
        if isinstance(message, Failed):
            self._settle(message.job, Failure(reason=message.reason, message=message.message))
        elif isinstance(message, EnvironmentInfo | Prompts | Outcome):
            self._settle(message.job, message)
        elif (answer := job[0]) is not None:
            answering = self._answering[message.job]
            if isinstance(message, Withdraw):
                for task, number in answering.items():
                    if number == message.call:
                        task.cancel()
            answering[asyncio.create_task(self._answer(message, answer))] = message.call

    async def _answer(self, call: AnyCall, answer: Answerer) -> None:
        try:
            reply = await answer(call)
            reply.job, reply.call = call.job, call.call
            try:
                self._send(reply)
            except ValueError as error:  # too large
                self._send(CallRefused(job=call.job, call=call.call, reason="failed", message=str(error)))
        except Exception as error:
            self._send(Cancel(job=call.job))
            self._settle(call.job, error.failure if isinstance(error, GivenUp) else error)
        finally:
            if (task := asyncio.current_task()) is not None:
                self._answering.get(call.job, {}).pop(task, None)

    # --- end ---

    async def _watch(self) -> None:
        """Ends the session of a worker that has ended, is not reached, or is silent past the deadline of its rollouts.
        Sends heartbeats to an environment server. Ends with the session."""
        sent_s = 0.0
        while (worker := self._worker) is not None:
            await asyncio.sleep(WATCH_INTERVAL_S)
            now_s = time.monotonic()
            if worker.how is not None:
                await asyncio.sleep(WATCH_INTERVAL_S)  # its last messages are read first
                await self._end(worker.how, CRASHED)
            elif now_s - self._heard_s > self._limit_s + STILL_GRACE_S:
                await self._end(f"took longer than {self._limit}, and held up its worker", LATE)
            elif isinstance(worker, RemoteWorker) and now_s - self._reached_s > SILENCE_LIMIT_S:
                # as far as can be told it has ended with its server: started again, it may work
                await self._end(f"is no longer reached at {self._address}", CRASHED, killed=True)
            elif self._address is not None and now_s - sent_s > ALIVE_INTERVAL_S:
                sent_s = now_s
                self._send(Alive(protocol=PROTOCOL))

    async def _end(self, how: str, reason: str, *, killed: bool = False) -> None:
        """Ends the worker and all that it started. Its rollouts get WorkerLost."""
        if self.over:
            return
        self.over = True
        killed = killed or (self._worker is not None and self._worker.was_killed)
        failure = Failure(reason=reason, message=f"environment {self._label} {how}")
        for number in list(self._jobs):
            self._settle(number, WorkerLost(failure, killed=killed, waited=bool(self._answering.get(number))))
        await self._release()
        for task in self._tasks:
            task.cancel()


def _set(future: "asyncio.Future[Any]", outcome: Any) -> None:
    """Sets the result of a future that has none, or the error that it raises."""
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)

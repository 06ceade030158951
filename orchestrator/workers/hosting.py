"""The orchestrator's end of processes that roll out episodes, many at a time: deadlines, and who is to blame."""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from orchestrator.episodes.types import Failure, Task
from orchestrator.workers.failures import LATE, EnvironmentFailed
from orchestrator.workers.links import START_TIMEOUT_S, Link, NotOurServer, OwnProcess, RemoteProcess
from orchestrator.workers.wire import (
    Answer,
    Asked,
    Begin,
    Called,
    Cancel,
    Ended,
    Failed,
    Load,
    Loaded,
    Played,
    Raised,
    Refused,
    Request,
    Sampled,
    StoreAnswer,
    Stored,
)
from orchestrator.workers.wire import frame as frame_of

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""A rollout is begun so often where the process ends and it is not to blame."""
CANCEL_GRACE_S = 2.0
"""What a process that still runs other code may take to end one rollout."""
WATCH_INTERVAL_S = 0.25
RESTART_PAUSE_S = 1.0
CRASHED, CANCELLED = "env_crashed", "cancelled"

Call = Called | Asked | Stored
Reply = Sampled | Refused | StoreAnswer
Answerer = Callable[[Call], Awaitable[Reply]]
"""Answers a rollout's calls. What it raises ends the run."""


class _Restarted(Exception):
    """The process ended, and not by this rollout."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Rollout:
    """One that runs in the process."""

    answer: Answerer
    over: asyncio.Future[Played | Failure]
    ours_since_s: float | None
    """Since when it has no call open, on the monotonic clock: the environment's code, or what it waits for, is to go
    on. None while it waits for us."""
    num_open: int = 0
    answering: set[asyncio.Task[None]] = field(default_factory=set)
    cancelled_s: float | None = None
    """When it was told to end, because it was late."""

    def end(self) -> None:
        """Nothing that it asked for is of use any more."""
        for task in self.answering:
            task.cancel()


class EpisodeProcess:
    """One process with an environment, which is started again after it ended or was ended for being stuck."""

    def __init__(
        self,
        *,
        label: str,
        env_id: str,
        args: dict[str, Any],
        timeout_s: float,
        address: str | None = None,
        memory_bytes: int | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """`timeout_s`: for constructing the environment, and for all that its code does between two calls of a model.
        `memory_bytes`: what its code may allocate. `start_timeout_s`: for Python itself to come up."""
        self.label, self._timeout_s, self._start_timeout_s = label, timeout_s, start_timeout_s
        self._load = Load(env_id=env_id, args=args, episodes=True, memory_bytes=memory_bytes)
        self._is_remote = address is not None
        self._link: Link = OwnProcess() if address is None else RemoteProcess(address, start_timeout_s)
        self._decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
        self._numbers = itertools.count()
        self._rollouts: dict[int, _Rollout] = {}
        self._num_running = 0
        self._lock = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def num_running(self) -> int:
        """Rollouts that it has now, or has yet to begin."""
        return self._num_running

    async def play(self, task: Task, *, seed: int | None, score: bool, answer: Answerer) -> Played | Failure:
        """Rolls out one episode. Raises _Restarted, EnvironmentFailed, and what `answer` raises."""
        self._num_running += 1
        try:
            await self._ready()
            return await self._play(task, seed=seed, score=score, answer=answer)
        finally:
            self._num_running -= 1

    async def _play(self, task: Task, *, seed: int | None, score: bool, answer: Answerer) -> Played | Failure:
        number = next(self._numbers)
        over: asyncio.Future[Played | Failure] = asyncio.get_running_loop().create_future()
        rollout = self._rollouts[number] = _Rollout(answer=answer, over=over, ours_since_s=time.monotonic())
        prompt = [dict(message) for message in task.messages]
        self._send(Begin(rollout=number, split=task.split, index=task.index, prompt=prompt, seed=seed, score=score))
        try:
            return await over
        except asyncio.CancelledError:
            self._send(Cancel(rollout=number))
            raise
        finally:
            rollout.end()
            self._rollouts.pop(number, None)

    async def close(self) -> None:
        """Ends the process and what it started."""
        for task in (self._reading, self._watching):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task
        self._reading = self._watching = None
        await self._link.close()

    # --- the process ---

    async def _ready(self) -> None:
        """A running process with the environment. Raises EnvironmentFailed."""
        async with self._lock:
            if self._reading is not None:
                return
            await self._start()
            self._reading = asyncio.create_task(self._read())
            self._watching = asyncio.create_task(self._watch())

    async def _start(self) -> None:
        deadline_s = time.monotonic() + self._start_timeout_s
        while True:
            try:
                await self._link.open()
                await self._receive(self._start_timeout_s)  # Python has come up
                break
            except NotOurServer as error:
                raise EnvironmentFailed(f"environment {self.label} did not start: {error}") from None
            except (OSError, EOFError) as error:
                how = f"{error}" or await self._link.ended()
                await self._link.close()
                if not self._is_remote or time.monotonic() > deadline_s:
                    raise EnvironmentFailed(f"environment {self.label} did not start: {how}") from None
            await asyncio.sleep(RESTART_PAUSE_S)
        await self._construct()

    async def _construct(self) -> None:
        what = f"environment {self.label}: constructing {self._load.env_id}"
        self._link.send(frame_of(self._load))
        try:
            loaded = await self._receive(self._timeout_s)
        except TimeoutError:
            await self._link.close()
            raise EnvironmentFailed(f"{what} took longer than reward_timeout = {self._timeout_s:g} s") from None
        except (EOFError, OSError):
            how = await self._link.ended()
            await self._link.close()
            raise EnvironmentFailed(f"{what}: it {how}") from None
        if isinstance(loaded, Raised):
            await self._link.close()
            raise EnvironmentFailed(f"{what} raised\n{loaded.message}")
        assert isinstance(loaded, Loaded)

    async def _receive(self, limit_s: float) -> Answer:
        async with asyncio.timeout(limit_s):
            return self._decoder.decode(await self._link.receive())

    def _send(self, message: Request) -> None:
        """Where the process has ended, that is noticed by who reads."""
        with contextlib.suppress(OSError):
            self._link.send(frame_of(message))

    # --- what it says ---

    async def _read(self) -> None:
        try:
            while True:
                self._take(self._decoder.decode(await self._link.receive()))
        except (EOFError, OSError):
            how, running = await self._link.ended(), await self._link.running()
        except Exception as error:  # whatever it is, nobody may wait for this process any longer
            log.exception("environment %s said what cannot be understood", self.label)
            how, running = f"said what cannot be understood: {error}", None
        if self._watching is not None:
            self._watching.cancel()
        await self._link.close()
        self._reading = self._watching = None  # from here on a rollout has a new process start
        self._gone(how, running)

    def _take(self, message: Answer) -> None:
        if not isinstance(message, Called | Asked | Stored | Ended | Failed):
            raise ValueError(f"a {type(message).__name__} in the midst of episodes: {message}")
        rollout = self._rollouts.get(message.rollout)
        if rollout is None or rollout.over.done():  # it was cancelled, and had sent this before it knew
            return
        if isinstance(message, Ended):
            rollout.over.set_result(message.played)
        elif isinstance(message, Failed):
            rollout.over.set_result(self._failure(message, rollout))
        else:
            rollout.num_open += 1
            rollout.ours_since_s = None
            answering = asyncio.create_task(self._answer(rollout, message))
            rollout.answering.add(answering)
            answering.add_done_callback(rollout.answering.discard)

    async def _answer(self, rollout: _Rollout, call: Call) -> None:
        try:
            reply = await rollout.answer(call)
        except Exception as error:
            if not rollout.over.done():
                rollout.over.set_exception(error)
            return
        rollout.num_open -= 1
        if not rollout.num_open:
            rollout.ours_since_s = time.monotonic()
        self._send(reply)
        await self._link.drain()

    def _failure(self, failed: Failed, rollout: _Rollout) -> Failure:
        if failed.reason == CANCELLED and rollout.cancelled_s is not None:
            return self._late()
        return Failure(reason=failed.reason, message=failed.message)

    def _late(self) -> Failure:
        return Failure(
            reason=LATE, message=f"environment {self.label} took longer than reward_timeout = {self._timeout_s:g} s"
        )

    def _gone(self, how: str, running: int | None) -> None:
        """The process has ended. What ran in it is to blame; the others are begun again."""
        for number, rollout in self._rollouts.items():
            if rollout.over.done():
                continue
            blamed = number == running if running is not None else rollout.cancelled_s is not None
            if not blamed:
                rollout.over.set_exception(_Restarted(f"environment {self.label} {how}"))
            elif rollout.cancelled_s is not None:
                rollout.over.set_result(self._late())
            else:
                rollout.over.set_result(Failure(reason=CRASHED, message=f"environment {self.label} {how}"))

    async def _watch(self) -> None:
        """Ends rollouts that are late, and the process where it does not even do that: code keeps its loop from
        running."""
        while True:
            await asyncio.sleep(min(WATCH_INTERVAL_S, self._timeout_s / 4))
            now_s, stuck = time.monotonic(), False
            for number, rollout in self._rollouts.items():
                if rollout.over.done():
                    continue
                if rollout.cancelled_s is not None:
                    stuck = stuck or now_s - rollout.cancelled_s > CANCEL_GRACE_S
                elif rollout.ours_since_s is not None and now_s - rollout.ours_since_s > self._timeout_s:
                    rollout.cancelled_s = now_s
                    self._send(Cancel(rollout=number))
            if stuck:
                with contextlib.suppress(OSError):
                    await self._link.kill()
                return


class EpisodeHost:
    """The processes of one environment whose rollouts are episodes."""

    def __init__(
        self,
        processes: list[EpisodeProcess],
        loaded: Loaded,
        *,
        record: Callable[[str, Failure | None], None] = lambda label, failure: None,
    ) -> None:
        """`loaded`: what the environment says of itself. `record` is told of each outcome as it comes, and may raise
        EnvironmentFailed."""
        self._processes, self._record = processes, record
        self.label = processes[0].label
        self.loaded = loaded
        self.num_restarted = 0
        """Rollouts that were begun again because the process they ran in ended, and they were not to blame."""

    async def play(
        self, task: Task, *, seed: int | None, begin: Callable[[], Answerer], score: bool = True
    ) -> Played | Failure:
        """Rolls out one episode in the process that has the least to do, and scores it, unless `score` is false, and
        rewards are 0. `begin` makes what answers its calls, anew
        each time that it is begun. Raises EnvironmentFailed, and what the answers raise."""
        why = ""
        for _ in range(MAX_ATTEMPTS):
            process = min(self._processes, key=lambda one: one.num_running)
            try:
                outcome = await process.play(task, seed=seed, score=score, answer=begin())
            except _Restarted as error:
                why = str(error)
                self.num_restarted += 1
                continue
            self._record(self.label, outcome if isinstance(outcome, Failure) else None)
            return outcome
        failure = Failure(reason=CRASHED, message=f"{why}, {MAX_ATTEMPTS} times while this rollout ran in it")
        self._record(self.label, failure)
        return failure

    async def close(self) -> None:
        """Ends all processes."""
        await asyncio.gather(*(process.close() for process in self._processes))

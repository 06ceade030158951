"""The orchestrator's end of processes that roll out episodes, many at a time: deadlines, and who is to blame."""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from orchestrator.episodes.types import Failure, Task
from orchestrator.workers.failures import LATE, EnvironmentFailed
from orchestrator.workers.links import START_TIMEOUT_S, Link, NotOurServer, OwnProcess, RemoteProcess
from orchestrator.workers.wire import (
    NOBODY,
    Answer,
    Asked,
    Beat,
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

MAX_TOGETHER, MAX_UNEXPLAINED = 4, 2
"""A rollout is begun so often among others where the process that it runs in ends by the fault of one of them, and so
often where nobody knows by whose fault; after that alone, where it is known."""
MAX_AMONG_FEW, NUM_FEW = 4, 8
"""Before that so often among `NUM_FEW` at most, where the fault of others was known each time: where some of very many
always end the process, only a few of them come to their end."""
MAX_ALONE = 2
"""A rollout is begun so often where it is alone: somebody may have ended the process from outside."""
CANCEL_GRACE_S = 2.0
"""What a rollout may take to end when it is told to."""
FROZEN_GRACE_S = 5.0
"""Beyond the limit of a rollout, what a process may be silent."""
WATCH_INTERVAL_S = 0.25
MAX_COUNTED_S = 1.0
"""What is put down to a rollout at one beat: the orchestrator itself may have been busy for longer."""
RESTART_PAUSE_S = 1.0
CRASHED, CANCELLED = "env_crashed", "cancelled"

Call = Called | Asked | Stored
Reply = Sampled | Refused | StoreAnswer
Answerer = Callable[[Call], Awaitable[Reply]]
"""Answers a rollout's calls. What it raises ends the run."""


class GivenUp(Exception):
    """Raised by what answers calls: the rollout comes to nothing, and is told to end."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(failure.message)


class _Restarted(Exception):
    """The process ended, and not by this rollout; `explained`: by another one, or its connection was lost."""

    def __init__(self, message: str, *, explained: bool) -> None:
        self.explained = explained
        super().__init__(message)


@dataclass(slots=True, kw_only=True, eq=False)
class _Rollout:
    """One that runs in the process."""

    answer: Answerer
    over: asyncio.Future[Played | Failure]
    began_s: float = field(default_factory=time.monotonic)
    num_open: int = 0
    """Calls that wait for us."""
    answering: set[asyncio.Task[None]] = field(default_factory=set)
    own_s: float = 0.0
    """How long its code, or what it waits for by itself, has taken since its last call was answered. What other
    rollouts' code took meanwhile is not its own."""
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
        self._beat: Beat | None = None
        self._beat_s = self._entered_s = 0.0
        """When the last beat came, and since when the code that runs has not let go."""
        self._killed = self._haunted = False
        """Ended by us for being late; for nothing but what a rollout that is over does in it."""

    @property
    def num_running(self) -> int:
        """Rollouts that it has now, or has yet to begin."""
        return self._num_running

    @property
    def num_at_code(self) -> int:
        """Those of them that wait for no answer of ours, but for the environment."""
        return self._num_running - sum(rollout.num_open > 0 for rollout in self._rollouts.values())

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
        rollout = self._rollouts[number] = _Rollout(answer=answer, over=over)
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
            if self._beat is not None and self._beat.running == number:
                self._entered_s = time.monotonic()  # what it did until now was its own

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
            self._beat, self._killed, self._haunted = None, False, False
            self._beat_s = self._entered_s = time.monotonic()
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
            except TimeoutError:
                how = f"it took longer than {self._start_timeout_s:g} s, before any code of its own"
            except EOFError:
                how = f"environment {self.label} {await self._link.ended()}"
            except OSError as error:
                how = f"{error}"
            await self._link.close()
            if not self._is_remote or time.monotonic() > deadline_s:
                raise EnvironmentFailed(f"environment {self.label} did not start: {how}")
            await asyncio.sleep(RESTART_PAUSE_S)
        await self._construct()

    async def _construct(self) -> None:
        what = f"environment {self.label}: constructing {self._load.env_id}"
        self._link.send(frame_of(self._load))
        try:
            loaded = await self._receive(self._timeout_s)
        except TimeoutError:
            await self._link.close()
            raise EnvironmentFailed(f"{what} took longer than reward_timeout_s = {self._timeout_s:g} s") from None
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
            explained = running is not None or self._haunted or (self._link.lost() and not self._killed)
            running = None if self._haunted else running  # whoever has its turn by now
        except Exception as error:  # whatever it is, nobody may wait for this process any longer
            log.exception("environment %s said what cannot be understood", self.label)
            how, running, explained = f"said what cannot be understood: {error}", None, False
        if self._watching is not None:
            self._watching.cancel()
        await self._link.close()
        self._reading = self._watching = None  # from here on a rollout has a new process start
        self._gone(how, running, explained=explained)

    def _take(self, message: Answer) -> None:
        if isinstance(message, Beat):
            self._take_beat(message)
            return
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
            answering = asyncio.create_task(self._answer(rollout, message))
            rollout.answering.add(answering)
            answering.add_done_callback(rollout.answering.discard)

    async def _answer(self, rollout: _Rollout, call: Call) -> None:
        try:
            reply = await rollout.answer(call)
        except GivenUp as error:
            if not rollout.over.done():
                self._send(Cancel(rollout=call.rollout))
                rollout.over.set_result(error.failure)
            return
        except Exception as error:
            if not rollout.over.done():
                rollout.over.set_exception(error)
            return
        rollout.num_open -= 1
        rollout.own_s = 0.0
        self._send(reply)
        await self._link.drain()

    def _failure(self, failed: Failed, rollout: _Rollout) -> Failure:
        if failed.reason == CANCELLED and rollout.cancelled_s is not None:
            return self._late(rollout)
        return Failure(reason=failed.reason, message=failed.message)

    def _late(self, rollout: _Rollout) -> Failure:
        message = f"environment {self.label} took longer than reward_timeout_s = {self._timeout_s:g} s"
        return Failure(reason=LATE, message=message, began_s=rollout.began_s)

    def _gone(self, how: str, running: int | None, *, explained: bool) -> None:
        """The process has ended. Whose code ran in it is to blame, if it has not failed already; the others are begun
        again."""
        for number, rollout in self._rollouts.items():
            if rollout.over.done():
                continue
            if number != running:
                rollout.over.set_exception(_Restarted(f"environment {self.label} {how}", explained=explained))
            elif self._killed:
                rollout.over.set_result(self._late(rollout))
            else:
                rollout.over.set_result(Failure(reason=CRASHED, message=f"environment {self.label} {how}"))

    # --- who is late ---

    def _take_beat(self, beat: Beat) -> None:
        """Puts the time since the last beat down to the rollout whose code runs, or where none does, to all that wait
        for something by themselves."""
        now_s = time.monotonic()
        if beat != self._beat or beat.running == NOBODY:
            self._entered_s = now_s
        passed_s = min(now_s - self._beat_s, MAX_COUNTED_S)
        self._beat, self._beat_s = beat, now_s
        for number, rollout in self._rollouts.items():
            if rollout.num_open or rollout.over.done() or beat.running not in (NOBODY, number):
                continue
            rollout.own_s += passed_s
            if rollout.cancelled_s is None and rollout.own_s > self._timeout_s:
                rollout.cancelled_s = now_s
                self._send(Cancel(rollout=number))

    async def _watch(self) -> None:
        """Sees to those that do not end when they are told to: they are left to themselves where others go on, and the
        process is ended where their code does not let go, or it says nothing at all. So it is where code of a rollout
        that is over does not let go: what was left to itself, or was left behind."""
        while True:
            await asyncio.sleep(min(WATCH_INTERVAL_S, self._timeout_s / 4))
            now_s, stuck = time.monotonic(), False
            for number, rollout in self._rollouts.items():
                if rollout.over.done() or rollout.cancelled_s is None or now_s - rollout.cancelled_s <= CANCEL_GRACE_S:
                    continue
                holds = self._beat is not None and self._beat.running == number
                if holds and now_s - self._entered_s > CANCEL_GRACE_S:
                    stuck = True
                elif not holds:
                    rollout.over.set_result(self._late(rollout))
            frozen = bool(self._rollouts) and now_s - self._beat_s > self._timeout_s + FROZEN_GRACE_S
            haunted = self._is_haunted()
            if haunted and not self._killed:
                self._haunted = not (stuck or frozen)
                log.warning(
                    "environment %s: code of a rollout that is over has held up its process for %g s, and the process "
                    "is ended; let a rollout await or cancel all that it starts",
                    self.label,
                    CANCEL_GRACE_S,
                )
            if stuck or frozen or haunted:
                self._killed = True
                with contextlib.suppress(OSError):  # it is tried again until the process's end is read
                    await self._link.kill()

    def _is_haunted(self) -> bool:
        """Whether beats have told for a while that code of a rollout that is over does not let go."""
        beat = self._beat
        if beat is None or beat.running == NOBODY or beat.running in self._rollouts:
            return False
        return self._beat_s - self._entered_s > CANCEL_GRACE_S


class EpisodeHost:
    """The processes of one environment whose rollouts are episodes."""

    def __init__(
        self,
        make: Callable[[], EpisodeProcess],
        loaded: Loaded,
        *,
        num_workers: int = 1,
        record: Callable[[str, Failure | None], None] = lambda label, failure: None,
    ) -> None:
        """`make` makes a process. `loaded`: what the environment says of itself. `record` is told of each outcome as it
        comes, and may raise EnvironmentFailed."""
        self._processes, self._record = [make() for _ in range(num_workers)], record
        self._apart, self._apart_lock = make(), asyncio.Lock()
        """For one rollout at a time."""
        self._few, self._places_among_few = make(), asyncio.Semaphore(NUM_FEW)
        """For a few that run as they do among all others."""
        self.label = self._apart.label
        self.loaded = loaded
        self.num_restarted = 0
        """Rollouts that were begun again because the process they ran in ended, and they were not to blame."""

    @property
    def num_running(self) -> int:
        """Rollouts that run now, or have yet to begin."""
        return sum(process.num_running for process in self._all)

    @property
    def num_at_code(self) -> int:
        """Those of them that wait for no answer of ours, but for the environment."""
        return sum(process.num_at_code for process in self._all)

    @property
    def _all(self) -> list[EpisodeProcess]:
        return [*self._processes, self._few, self._apart]

    async def play(
        self, task: Task, *, seed: int | None, begin: Callable[[], Answerer], score: bool = True
    ) -> Played | Failure:
        """Rolls out one episode in the process that has the least to do, and scores it, unless `score` is false, and
        rewards are 0. `begin` makes what answers its calls, anew each time that it is begun. The outcome is to be
        recorded. Raises EnvironmentFailed, and what the answers raise."""
        return await self._play(partial(self._begin, task, seed, begin, score))

    def record(self, failure: Failure | None) -> None:
        """What a rollout has come to. Raises EnvironmentFailed where too many fail."""
        self._record(self.label, failure)

    async def _begin(
        self, task: Task, seed: int | None, begin: Callable[[], Answerer], score: bool, process: EpisodeProcess
    ) -> Played | Failure:
        return await process.play(task, seed=seed, score=score, answer=begin())

    async def _play(self, begin: Callable[[EpisodeProcess], Awaitable[Played | Failure]]) -> Played | Failure:
        num_unexplained = 0
        for number in range(MAX_TOGETHER + MAX_AMONG_FEW):
            try:
                if number < MAX_TOGETHER:
                    return await begin(min(self._processes, key=lambda one: one.num_running))
                async with self._places_among_few:
                    return await begin(self._few)
            except _Restarted as error:
                self.num_restarted += 1
                num_unexplained += not error.explained
                if num_unexplained == MAX_UNEXPLAINED:
                    break
        async with self._apart_lock:
            for _ in range(MAX_ALONE):
                try:
                    return await begin(self._apart)
                except _Restarted as error:
                    why = str(error)
        return Failure(reason=CRASHED, message=f"{why}, with this rollout alone in it")

    async def close(self) -> None:
        """Ends all processes."""
        await asyncio.gather(*(process.close() for process in self._all))

"""The orchestrator's end of an environment's process: deadlines, restarts, and rollouts that fail alone."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from orchestrator.episodes.types import Failure, Messages, Score, Task
from orchestrator.workers.failures import LATE, NOT_TRIED, EnvironmentFailed
from orchestrator.workers.hosting import EpisodeHost
from orchestrator.workers.links import START_TIMEOUT_S, Link, OwnProcess, RemoteProcess
from orchestrator.workers.wire import Answer, Dataset, Load, Loaded, Prompts, Raised, Request, Scored, ScoreOne
from orchestrator.workers.wire import frame as frame_of

RESTART_PAUSE_S = 1.0
MAX_LATE_IN_A_GROUP = 2
"""After so many deadlines in a row, the rest of a group is not tried."""

A = TypeVar("A")


class _Gone(Exception):
    """The process ended or had to be ended. `reason` as in Failure."""

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        super().__init__(message)


class EnvironmentProcess:
    """One environment in one process, which is started again after it crashed or was killed for being late."""

    def __init__(
        self,
        *,
        label: str,
        env_id: str,
        args: dict[str, Any],
        timeout_s: float,
        record: Callable[[str, Failure | None], None] = lambda label, failure: None,
        hash_keys: tuple[str, ...] = (),
        address: str | None = None,
        memory_bytes: int | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """`timeout_s` is what constructing the environment, a split, or one score may take. `record` is told of each
        outcome as it comes, and may raise EnvironmentFailed. `hash_keys`: fields by which training examples are
        known. `address`: of the environment server that has the process; None for one of our own. `memory_bytes`: what
        its code may allocate. `start_timeout_s` is what that server may be away, and what Python itself may take to
        come up, before any user code."""
        self.label, self._env_id, self._args, self._timeout_s = label, env_id, args, timeout_s
        self._start_timeout_s = start_timeout_s
        self._record, self._hash_keys, self._memory_bytes = record, hash_keys, memory_bytes
        self.loaded: Loaded | None = None
        """What the environment says of itself, once it has been there."""
        self._prompts: dict[str, list[Messages]] = {}
        self.identities: list[str] = []
        """Of each training example, by `hash_keys`, once its prompts are there."""
        self._decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
        self._lock = asyncio.Lock()
        self._link: Link = OwnProcess() if address is None else RemoteProcess(address, start_timeout_s)
        self._up = False

    async def load(self) -> Loaded:
        """Constructs the environment, and nothing of its data. Raises EnvironmentFailed."""
        async with self._lock:
            await self._ready()
        assert self.loaded is not None
        return self.loaded

    async def prompts(self, split: str) -> list[Messages]:
        """The prompts of a split. Raises EnvironmentFailed."""
        async with self._lock:
            await self._ready()
            return await self._split(split)

    async def score(self, task: Task, completions: Sequence[str]) -> list[Score | Failure]:
        """One result for each completion; a completion that breaks the environment fails alone, but once two in a row
        were late, the rest is not tried.

        Raises EnvironmentFailed where the environment cannot be started again, and what `record` raises.
        """
        results: list[Score | Failure] = []
        async with self._lock:
            try:
                while len(results) < len(completions) and not _hangs(results):
                    await self._ready()
                    if task.split not in self._prompts:
                        await self._split(task.split)
                    await self._score_until_it_breaks(task, completions[len(results) :], results)
                for _ in completions[len(results) :]:
                    message = f"environment {self.label} was late {MAX_LATE_IN_A_GROUP} times in a row in this group"
                    self._take(Failure(reason=NOT_TRIED, message=message), results)
            except (EnvironmentFailed, asyncio.CancelledError):
                await self.close()  # it may owe answers, which nobody may take for those to other requests
                raise
        return results

    async def close(self) -> None:
        """Ends the process and what it started."""
        self._up = False
        await self._link.close()

    # --- requests ---

    async def _score_until_it_breaks(
        self, task: Task, completions: Sequence[str], results: list[Score | Failure]
    ) -> None:
        """Appends a result for each completion up to and with the first that breaks the process."""
        self._link.send(
            b"".join(frame_of(ScoreOne(split=task.split, index=task.index, completion=text)) for text in completions)
        )
        for _ in completions:
            try:
                answer = await self._answer()
            except _Gone as error:
                self._take(Failure(reason=error.reason, message=str(error)), results)
                return
            if isinstance(answer, Raised):
                self._take(Failure(reason=answer.reason, message=answer.message), results)
            else:
                assert isinstance(answer, Scored)
                score = Score(reward=answer.reward, accuracy=answer.accuracy, metrics=answer.metrics)
                self._take(score, results)

    def _take(self, result: Score | Failure, results: list[Score | Failure]) -> None:
        results.append(result)
        self._record(self.label, result if isinstance(result, Failure) else None)

    async def _split(self, split: str) -> list[Messages]:
        hash_keys = self._hash_keys if split == "train" else ()
        request = Dataset(split=split, hash_keys=hash_keys, task=self.label)
        answer = await self._demand(request, Prompts, f"dataset({split!r})")
        prompts: list[Messages] = [tuple(messages) for messages in answer.prompts]
        if not prompts:
            raise EnvironmentFailed(f"environment {self.label}: dataset({split!r}) is empty, expected examples")
        if self._prompts.setdefault(split, prompts) != prompts:
            raise EnvironmentFailed(
                f"environment {self.label}: after a restart, dataset({split!r}) gave other prompts than before; "
                "seed what it draws at random"
            )
        if hash_keys:
            self.identities = answer.identities
        return prompts

    async def _demand(self, request: Request, expected: type[A], what: str) -> A:
        """The answer to a request without which the environment is of no use. Raises EnvironmentFailed."""
        self._link.send(frame_of(request))
        try:
            answer = await self._answer()
        except _Gone as error:
            await self.close()
            raise EnvironmentFailed(f"environment {self.label}: {what}: {error}") from None
        if isinstance(answer, Raised):
            raise EnvironmentFailed(f"environment {self.label}: {what} raised\n{answer.message}")
        assert isinstance(answer, expected)
        return answer

    async def _answer(self, *, start: bool = False) -> Answer:
        """The next answer. Where it is late or the process ends, the process is gone and so is all it was asked."""
        limit_s = self._start_timeout_s if start else self._timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return self._decoder.decode(await self._link.receive())
        except TimeoutError:
            await self.close()
            limit = f"{limit_s:g} s, before any code of its own" if start else f"reward_timeout_s = {limit_s:g} s"
            raise _Gone(LATE, f"environment {self.label} took longer than {limit}") from None
        except EOFError:
            how = await self._link.ended()
            await self.close()
            raise _Gone("env_crashed", f"environment {self.label} {how}") from None

    # --- the process ---

    async def _ready(self) -> None:
        """A running process with the environment and all splits that were asked for. Raises EnvironmentFailed."""
        if self._up:
            return
        try:
            await self._start()
        except (_Gone, OSError) as error:
            raise EnvironmentFailed(f"environment {self.label} did not start: {error}") from None
        self.loaded = await self._demand(
            Load(env_id=self._env_id, args=self._args, memory_bytes=self._memory_bytes),
            Loaded,
            f"constructing {self._env_id}",
        )
        for split in list(self._prompts):
            await self._split(split)

    async def _start(self) -> None:
        """A process that has come up. Where an environment server, which may just be ended itself or lack something,
        had one that did not, another is asked for until `start_timeout_s` are over. Raises OSError and _Gone."""
        clock = asyncio.get_running_loop().time
        deadline_s = clock() + self._start_timeout_s
        while True:
            await self._link.open()
            self._up = True
            try:
                await self._answer(start=True)
                return
            except _Gone as error:
                if isinstance(self._link, OwnProcess) or error.reason == LATE or clock() > deadline_s:
                    raise
            await asyncio.sleep(RESTART_PAUSE_S)


def _hangs(results: Sequence[Score | Failure]) -> bool:
    """Whether a group's newest results are all deadlines."""
    newest = [isinstance(one, Failure) and one.reason == LATE for one in results[-MAX_LATE_IN_A_GROUP:]]
    return len(newest) == MAX_LATE_IN_A_GROUP and all(newest)


class EnvironmentPool:
    """The processes of all environments of a run, by key; their common face for episodes."""

    def __init__(
        self,
        processes: Sequence[EnvironmentProcess],
        *,
        record: Callable[[str, Failure | None], None] = lambda label, failure: None,
    ) -> None:
        """`record`: as for EnvironmentProcess, for those who play episodes."""
        self.record = record
        self._processes = {process.label: process for process in processes}
        self._num_scoring: Counter[str] = Counter()
        self.hosts: dict[str, EpisodeHost] = {}
        """Of the environments whose rollouts are episodes."""

    @property
    def scoring(self) -> list[str]:
        """Environments whose code somebody waits for: for a score, or in an episode."""
        playing = {key for key, host in self.hosts.items() if host.num_at_code}
        return sorted(playing | set(+self._num_scoring))

    async def score(self, task: Task, completions: Sequence[str]) -> list[Score | Failure]:
        """As EnvironmentProcess.score, by the task's environment."""
        self._num_scoring[task.env] += 1
        try:
            return await self._processes[task.env].score(task, completions)
        finally:
            self._num_scoring[task.env] -= 1

    async def prompts(self, key: str, split: str) -> list[Messages]:
        """As EnvironmentProcess.prompts, by the environment with this key."""
        return await self._processes[key].prompts(split)

    async def host(self, key: str, make: Callable[[Loaded], EpisodeHost]) -> None:
        """Where the rollouts of the environment with this key, whose prompts are there, are episodes, has `make` start
        what plays them; the process that gave the prompts has done its work."""
        process = self._processes[key]
        if key not in self.hosts and process.loaded is not None and process.loaded.episodic:
            self.hosts[key] = make(process.loaded)
            await process.close()

    def identities(self, key: str) -> list[str]:
        """As EnvironmentProcess.identities, by the environment with this key."""
        return self._processes[key].identities

    async def close(self) -> None:
        """Ends all processes."""
        everything: list[EnvironmentProcess | EpisodeHost] = [*self._processes.values(), *self.hosts.values()]
        await asyncio.gather(*(one.close() for one in everything))

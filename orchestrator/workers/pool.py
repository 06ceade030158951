"""The workers of an environment: who runs what, and rollouts that begin once more."""

import asyncio
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from orchestrator.rollouts.records import Failure, Messages, Task
from orchestrator.workers.failures import EnvironmentFailed
from orchestrator.workers.protocol import Dataset, Load, Loaded, Outcome, Prompts, Run, Sampled
from orchestrator.workers.session import START_TIMEOUT_S, Answerer, Session, WorkerGone

MAX_BYSTANDER = 3
"""A rollout that is not suspected when its worker ends begins so often among others."""


class WorkerPool:
    """The workers of one environment.

    A rollout whose worker ends begins once more: alone in a fresh worker where its own code may have ended it, else
    among others of that kind, in a worker that all of them share. One that ends its worker alone as well has failed.
    Once a worker has ended, a spare one is kept ready to take the place of the next.
    """

    def __init__(
        self,
        *,
        label: str,
        env_id: str,
        args: dict[str, Any],
        timeout_s: float,
        num_workers: int = 1,
        hash_keys: tuple[str, ...] = (),
        address: str | None = None,
        memory_bytes: int | None = None,
        hidden: Collection[str] = (),
        start_timeout_s: float = START_TIMEOUT_S,
        record: Callable[[str, Failure | None], None] = lambda label, failure: None,
    ) -> None:
        """`timeout_s`: for constructing the environment or a split, and for all that a rollout's code does between two
        calls of a model. `hash_keys`: fields by which training examples are known. `address`: of the environment server
        that has the workers; None for our own. `memory_bytes`: what the code of one worker may allocate. `hidden`:
        environment variables that it does not get. `record` is told of each outcome as it comes, and may raise
        EnvironmentFailed."""
        self.label, self._hash_keys, self._record = label, hash_keys, record
        self._load = Load(env_id=env_id, args=args, timeout_s=timeout_s, memory_bytes=memory_bytes)
        self._address, self._hidden, self._start_s = address, hidden, start_timeout_s
        self._sessions = [self._session() for _ in range(num_workers)]
        self._retired: list[Session] = []
        """They have been replaced, and end with their last rollout."""
        self._spare: Session | None = None
        self._again: Session | None = None
        self._alone: Session | None = None
        self._alone_lock, self._num_alone = asyncio.Lock(), 0
        self._loaded: Loaded | None = None
        self._background: set[asyncio.Task[Any]] = set()
        self.identities: list[str] = []
        """Of each training example, by `hash_keys`, once its prompts are there."""
        self.solutions: list[str] = []
        """Each training example's own `solution`; none where no example has one."""
        self.num_restarted = 0
        """Rollouts that were begun again because their worker ended."""

    @property
    def loaded(self) -> Loaded:
        """What the environment says of itself, once it has been there."""
        assert self._loaded is not None, f"environment {self.label} is not loaded yet"
        return self._loaded

    @property
    def num_at_code(self) -> int:
        """Rollouts that wait for no answer of ours, but for the environment."""
        return sum(session.num_at_code for session in self._all())

    async def load(self) -> Loaded:
        """Constructs the environment, and nothing of its data. Raises EnvironmentFailed."""
        self._loaded = await self._sessions[0].open()
        return self._loaded

    async def prompts(self, split: str) -> list[Messages]:
        """The prompts of a split. Raises EnvironmentFailed."""
        await self.load()
        hash_keys, what = self._hash_keys if split == "train" else (), f"dataset({split!r})"
        answer = await self._sessions[0].request(Dataset(split=split, hash_keys=hash_keys, task=self.label), what)
        assert isinstance(answer, Prompts)
        if not answer.prompts:
            raise EnvironmentFailed(f"environment {self.label}: {what} is empty, expected examples")
        if split == "train":
            self.identities, self.solutions = answer.identities, answer.solutions
        return [tuple(messages) for messages in answer.prompts]

    async def run(
        self,
        task: Task,
        *,
        seed: int | None,
        begin: Callable[[], Answerer],
        score: bool = True,
        answer: Sampled | None = None,
    ) -> Outcome | Failure:
        """Rolls out one episode, and scores it, unless `score` is false, and rewards are 0. `begin` makes what answers
        its calls, anew each time that it is begun; `answer` is that to its first call, where there is one already.
        Raises EnvironmentFailed, and what the answers raise."""
        prompt = [dict(message) for message in task.messages]
        run = Run(rollout=-1, split=task.split, index=task.index, prompt=prompt, seed=seed, score=score, answer=answer)
        for attempt in range(MAX_BYSTANDER):
            session = self._for_those_again() if attempt else self._least_loaded()
            try:
                return await session.run(run, begin())
            except WorkerGone as gone:
                self.num_restarted += 1
                if gone.suspect:
                    break
        return await self._run_alone(run, begin)

    def record(self, failure: Failure | None) -> None:
        """Counts what a rollout has come to. Raises EnvironmentFailed where too many fail."""
        self._record(self.label, failure)

    async def close(self) -> None:
        """Ends all workers."""
        await asyncio.gather(*(session.close() for session in self._all()), *self._background, return_exceptions=True)

    # --- workers ---

    def _session(self) -> Session:
        return Session(self.label, self._load, address=self._address, hidden=self._hidden, start_s=self._start_s)

    def _all(self) -> list[Session]:
        others = [one for one in (self._alone, self._again, self._spare) if one is not None]
        return [*self._sessions, *self._retired, *others]

    def _least_loaded(self) -> Session:
        """Replaces workers that have ended, or are spent."""
        for place, session in enumerate(self._sessions):
            if session.spent or session.over:
                self._retired.append(session)
                self._sessions[place], self._spare = self._spare or self._session(), self._session()
                self._in_background(self._spare.open())
        for session in [one for one in self._retired if not one.num_running]:
            self._retired.remove(session)
            self._in_background(session.close())
        return min(self._sessions, key=lambda session: session.num_running)

    def _for_those_again(self) -> Session:
        """The worker of rollouts that begin once more, so that the one among them that ends it costs no others."""
        if self._again is None or self._again.over or self._again.spent:
            self._retired += [] if self._again is None else [self._again]
            self._again = self._session()
        return self._again

    def _in_background(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # who uses it is told

    async def _run_alone(self, run: Run, begin: Callable[[], Answerer]) -> Outcome | Failure:
        """One at a time in a worker of its own, which is kept only as long as others wait for it."""
        self._num_alone += 1
        try:
            async with self._alone_lock:
                if self._alone is None or self._alone.over or self._alone.spent:
                    await self._close_alone()
                    self._alone = self._session()
                try:
                    return await self._alone.run(run, begin())
                except WorkerGone as gone:
                    return gone.failure
                finally:
                    if self._num_alone == 1:
                        await self._close_alone()
        finally:
            self._num_alone -= 1

    async def _close_alone(self) -> None:
        alone, self._alone = self._alone, None
        if alone is not None:
            await alone.close()

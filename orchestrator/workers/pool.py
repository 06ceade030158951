"""The workers of an environment: they share its rollouts, and a rollout whose worker ends begins once more."""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np
from grpo.orchestrator.background import start_in_thread
from grpo.orchestrator.rollouts.clock import together
from grpo.orchestrator.rollouts.records import Failure, Messages, Task
from grpo.orchestrator.workers.failures import EnvironmentFailed
from grpo.orchestrator.workers.process import ForkServer
from grpo.orchestrator.workers.protocol import (
    AnyCall,
    EnvironmentInfo,
    Load,
    LoadDataset,
    Outcome,
    Prompts,
    Reply,
    RunEpisode,
    Score,
)
from grpo.orchestrator.workers.session import START_TIMEOUT_S, Answerer, GivenUp, Session, WorkerLost
from grpo.orchestrator.workers.stored import StoredValues
from grpo.orchestrator.workers.trial import AWAY, BROKEN
from msgspec.structs import replace
from numpy.typing import NDArray

log = logging.getLogger(__name__)

MAX_SHARED = 10
"""How often a rollout may begin in a worker that it shares with others."""
MAX_ALONE = 16
"""Rollouts that run alone at a time."""


class WorkerPool:
    """The workers of one environment.

    A rollout whose worker ends begins once more, alone in a worker of its own. If that worker ends too, the rollout has
    failed. A rollout that waited for a model when its worker ended cannot have ended it: it begins again in a shared
    worker, up to `MAX_SHARED` times in all.
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
        record: Callable[[Failure | None], None] = lambda failure: None,
    ) -> None:
        """`timeout_s` limits the construction of the environment and of a split, and all that a rollout's code does
        between two calls of a model. `hash_keys`: fields that identify training examples. `address`: of the environment
        server that has the workers; None for our own. `memory_bytes`: what the code of one worker may allocate.
        `hidden`: environment variables that it does not get. `record` is called with each outcome, and may raise
        EnvironmentFailed."""
        self.label, self._hash_keys, self.record = label, hash_keys, record
        self._load = Load(env_id=env_id, args=args, timeout_s=timeout_s, memory_bytes=memory_bytes)
        self._address, self._start_s, self._forks = address, start_timeout_s, ForkServer(env_id, hidden=hidden)
        self._loaded: EnvironmentInfo | None = None
        self._sessions = [self._session() for _ in range(num_workers)]
        self._alone = asyncio.Semaphore(MAX_ALONE)
        self._alone_sessions: set[Session] = set()
        self.identities: NDArray[np.bytes_] = np.empty(0, "S24")
        """One for each training example, by `hash_keys`, once its prompts are there."""
        self.solutions: Sequence[str] = []
        """Each training example's own `solution`; none where no example has one."""
        self.num_restarted = 0
        """How often a rollout began again because its worker ended."""

    @property
    def loaded(self) -> EnvironmentInfo:
        """What the environment says about itself, after `load`."""
        assert self._loaded is not None, f"environment {self.label} is not loaded yet"
        return self._loaded

    @property
    def num_in_environment(self) -> int:
        """Rollouts that wait for the environment, and not for an answer of ours."""
        return sum(session.num_in_environment for session in self._all())

    async def load(self) -> EnvironmentInfo:
        """Constructs the environment without its data. Raises EnvironmentFailed."""
        self._loaded = await self._sessions[0].open()
        return self._loaded

    async def prompts(self, split: str) -> Sequence[Messages]:
        """Returns the prompts of a split, which lie on disk. Raises EnvironmentFailed."""
        await self.load()
        hash_keys, what = self._hash_keys if split == "train" else (), f"dataset({split!r})"
        prompts = StoredValues[Messages](list[dict[str, str]], tuple)
        solutions, identities = StoredValues[str](str, str), list[bytes]()
        num, num_examples, num_solution_bytes = 0, 1, 0

        def add(part: Prompts) -> None:
            prompts.add(part.prompts)
            solutions.add(part.solutions)
            identities.append(part.identities)

        previous = start_in_thread(lambda: None)
        while num < num_examples:
            request = LoadDataset(split=split, begin=num, hash_keys=hash_keys, task=self.label)
            part = await self._sessions[0].request(request, what)
            assert isinstance(part, Prompts)
            await previous  # is written while the worker makes the next part
            previous = start_in_thread(partial(add, part))
            num, num_examples = num + len(part.prompts.lengths) // 4, part.num_examples
            num_solution_bytes += len(part.solutions.data)
        await previous
        if not len(prompts):
            mend = "examples" if split == "train" else "examples, or eval.num_examples: 0"
            raise EnvironmentFailed(f"environment {self.label}: {what} is empty, expected {mend}")
        if split == "train":
            self.identities = np.frombuffer(b"".join(identities), "S24")
            self.solutions = solutions if num_solution_bytes > len(solutions) else []  # an empty text takes one
        return prompts

    async def run(
        self,
        task: Task,
        *,
        seed: int | None,
        begin: Callable[[], Answerer],
        score: bool = True,
    ) -> Outcome | Failure:
        """Rolls out one episode. Rewards are 0 where `score` is false. `begin` returns what answers the rollout's
        calls; it is called each time that the rollout begins. Raises EnvironmentFailed, and what the answers raise."""
        prompt = [dict(message) for message in task.messages]
        run = RunEpisode(split=task.split, index=task.index, prompt=prompt, seed=seed, score=score)
        [outcome] = await self._run(run, lambda index: begin(), 1)
        return outcome

    async def score(
        self, score: Score, *, begin: Callable[[int], Answerer], over: Callable[[int], None] = lambda index: None
    ) -> list[Outcome | Failure]:
        """Scores single answers to one prompt, in one worker. `begin` returns what answers the calls of the rewards for
        the answer with this index; it is called each time that the scoring begins. `over` is called with each index
        whose outcome is known. Raises EnvironmentFailed, and what the answers raise."""
        return await self._run(score, begin, len(score.texts), over)

    async def _run(
        self,
        request: RunEpisode | Score,
        begin: Callable[[int], Answerer],
        num: int,
        over: Callable[[int], None] = lambda index: None,
    ) -> list[Outcome | Failure]:
        known = await self._least_loaded().run(request, [begin(index) for index in range(num)], over)

        async def again(index: int, lost: WorkerLost) -> None:
            alone = one_of(request, index) if isinstance(request, Score) else request
            outcomes[index] = await self._run_again(alone, partial(begin, index), lost)
            over(index)

        outcomes = {index: outcome for index, outcome in enumerate(known) if not isinstance(outcome, WorkerLost)}
        await together(again(index, lost) for index, lost in enumerate(known) if isinstance(lost, WorkerLost))
        return [outcomes[index] for index in range(num)]

    async def _run_again(
        self, request: RunEpisode | Score, begin: Callable[[], Answerer], lost: WorkerLost
    ) -> Outcome | Failure:
        """Runs a rollout whose worker was lost: in shared workers as long as it only waited there, else alone."""
        self.num_restarted += 1
        for _ in range(MAX_SHARED - 1):
            if not lost.waited:
                break
            [outcome] = await self._least_loaded().run(request, [begin()])
            if not isinstance(outcome, WorkerLost):
                return outcome
            self.num_restarted += 1
            lost = outcome
        async with self._alone:
            session = self._session()  # never one that had a rollout before: that one's threads may still run in it
            self._alone_sessions.add(session)
            try:
                [outcome] = await session.run(request, [begin()])
                return outcome.failure if isinstance(outcome, WorkerLost) else outcome
            finally:
                await session.close()
                self._alone_sessions.remove(session)

    async def check_scoring(self, task: Task) -> None:
        """Scores an empty answer to an example, where a rollout is one answer. Raises EnvironmentFailed where no answer
        can be scored. Proves nothing where models or judges are asked, which may not be there yet."""
        if not self.loaded.single_turn:
            return

        async def unanswered(call: AnyCall) -> Reply:
            raise GivenUp(Failure(reason=AWAY, message="no model is there yet"))

        prompt = [dict(message) for message in task.messages]
        empty = Score(
            split=task.split,
            index=task.index,
            prompt=prompt,
            texts=[""],
            finish_reasons=["stop"],
            num_tokens=[0],
            seeds=[0],
            trial=True,
        )
        [failure] = await self._sessions[0].run(empty, [unanswered])
        if not isinstance(failure, Failure):  # where it has ended its worker, the first rollout that does so says it
            return
        what = f"environment {self.label}: scoring an empty answer to its first example"
        if failure.reason == BROKEN:
            raise EnvironmentFailed(f"{what} raised what no answer can be the reason for: {failure.message}")
        if failure.reason in ("env_error", "reward_not_finite"):
            last = failure.message.strip().rpartition("\n")[2]
            log.warning("%s failed, and rollouts with such an answer are dropped: %s", what, last)

    async def close(self) -> None:
        """Ends all workers."""
        await asyncio.gather(*(session.close() for session in self._all()), return_exceptions=True)
        self._forks.close()

    # --- workers ---

    def _session(self) -> Session:
        load = replace(self._load)
        return Session(
            self.label,
            load,
            forks=self._forks,
            address=self._address,
            start_s=self._start_s,
            loaded_before=self._loaded is not None,
        )

    def _all(self) -> list[Session]:
        return [*self._sessions, *self._alone_sessions]

    def _least_loaded(self) -> Session:
        """Returns the worker with the fewest rollouts; those that have ended are replaced first."""
        self._sessions = [self._session() if session.over else session for session in self._sessions]
        return min(self._sessions, key=lambda session: session.num_running)


def one_of(score: Score, index: int) -> Score:
    """Returns a request for one of the answers alone."""
    return replace(
        score,
        texts=[score.texts[index]],
        finish_reasons=[score.finish_reasons[index]],
        num_tokens=[score.num_tokens[index]],
        seeds=[score.seeds[index]],
    )

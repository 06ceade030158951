"""The rollout engine: tasks to groups of scored rollouts.

User code runs in environment workers; its calls are answered here, and the tokens stay here.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from grpo.orchestrator.background import in_thread
from grpo.orchestrator.inference.client import InferenceClient, TimedOut
from grpo.orchestrator.monitoring.metrics import Figures
from grpo.orchestrator.renderer import ChatRenderer
from grpo.orchestrator.rollouts.attempt import (
    CONTEXT_FULL,
    MAKE_ROOM,
    MAX_CHARACTERS_ON_LOOP,
    SERVER_TIMEOUT,
    Rollout,
)
from grpo.orchestrator.rollouts.conversation import single_row
from grpo.orchestrator.rollouts.messages import num_characters
from grpo.orchestrator.rollouts.records import EpisodeResult, Failure, Group, Messages, Step, Task, TrainingRow
from grpo.orchestrator.rollouts.stores import ArtifactStores
from grpo.orchestrator.rollouts.templates import Templates
from grpo.orchestrator.seeds import mixed_seed
from grpo.orchestrator.workers.protocol import AnyCall, Loaded, Outcome, Score
from msgspec.structs import replace

NUM_TOGETHER = 4
"""Groups whose answers are taken in at one turn of the event loop, however many come at once."""


class PromptTooLong(ValueError):
    """A prompt that leaves no room for an answer."""


class EpisodePool(Protocol):
    """What runs the episodes of one environment: its worker pool."""

    @property
    def loaded(self) -> Loaded: ...
    @property
    def solutions(self) -> Sequence[str]: ...
    @property
    def num_restarted(self) -> int: ...
    @property
    def record(self) -> Callable[[Failure | None], None]: ...

    async def run(
        self,
        task: Task,
        *,
        seed: int | None,
        begin: Callable[[], Callable[[AnyCall], Awaitable[Any]]],
        score: bool = True,
    ) -> Outcome | Failure:
        """Runs one episode. `begin` makes what answers its calls."""

    async def score(
        self, score: Score, *, begin: Callable[[int], Callable[[AnyCall], Awaitable[Any]]], over: Callable[[int], None]
    ) -> Sequence[Outcome | Failure]:
        """Scores single answers to one prompt."""


class RolloutEngine:
    """Rolls out groups, of all environments."""

    def __init__(
        self,
        pools: Mapping[str, EpisodePool],
        client: InferenceClient,
        renderer: ChatRenderer,
        *,
        context_len: int,
        seed: int,
        max_prompt_length: int | None = None,
        stores: ArtifactStores | None = None,
    ) -> None:
        """`pools`: the workers of each environment, by its key. `context_len`: longest prompt with answer that servers
        and batches both take, in tokens. `seed`: of what environments draw at random. `max_prompt_length`: in tokens,
        of the training examples' own prompts (None: any). `stores`: of all environments, where any has some."""
        self.client, self.renderer, self.templates = client, renderer, Templates(renderer)
        self.context_len, self.stores, self._seed = context_len, stores, seed
        self._pools = dict[str, EpisodePool]()
        for env, pool in pools.items():
            self.add_pool(env, pool)
        self.num_withdrawn = 0
        """Answers that nobody received."""
        self._max_prompt_length = max_prompt_length
        self._turns = asyncio.Semaphore(NUM_TOGETHER)
        self.max_characters = context_len * renderer.longest_token
        """No longer text fits into the context. It is not tokenized: that would take seconds for megabytes."""

    async def run_group(
        self,
        group: Group,
        *,
        sampled: Callable[[], None] = lambda: None,
        delayed: Callable[[], None] = lambda: None,
    ) -> list[EpisodeResult]:
        """Each of the group's rollouts, scored or failed. `sampled` is called once all of it is sampled that can be in
        advance: a group of single answers is one request, so that the server reads the prompt once. `delayed` is called
        once nothing of it goes on but waits for rewards that come later. Raises PromptTooLong, and what servers and
        broken environments raise."""
        most = self._max_prompt_length if group.task.split == "train" else None
        if most is not None and (num := len(await self._prompt_ids(group.task.messages))) > most:
            raise PromptTooLong(f"a prompt of {num} tokens, expected at most buffer.max_prompt_length = {most}")
        waits = _Waits(group.num, delayed)
        if self.is_single_turn(group.task.env):
            return await self._run_single_turns(group, sampled, waits)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._run_rollout(group, number, waits)) for number in range(group.num)]
        results = [one.result() for one in running]
        full = [one.failure for one in results if one.failure is not None and one.failure.reason == CONTEXT_FULL]
        if len(full) == group.num and not any(one.steps for one in results):
            raise PromptTooLong(full[-1].message)
        return results

    def add_pool(self, env: str, pool: EpisodePool) -> None:
        """Has the episodes of one more environment run in `pool`."""
        self._pools[env] = pool
        if self.stores is not None:
            self.stores.open(env, pool.loaded.stores)

    def is_single_turn(self, env: str) -> bool:
        """Whether each rollout of the environment with this key is one answer to its prompt."""
        return self._pools[env].loaded.single_turn

    def figures(self) -> Figures:
        """Returns rollouts that were begun again because their worker ended, and answers that nobody received."""
        num_restarted = sum(pool.num_restarted for pool in self._pools.values())
        return Figures(counts={"rollout/restarted": num_restarted, "rollout/answers_withdrawn": self.num_withdrawn})

    def _rollout(
        self, group: Group, number: int, waits: "_Waits", presampled: tuple[Step, TrainingRow] | None = None
    ) -> Rollout:
        roles, delayed = self._pools[group.task.env].loaded.roles, partial(waits.settled, over=False)
        return Rollout(self, group, number, roles, delayed=delayed, presampled=presampled)

    async def _run_rollout(self, group: Group, number: int, waits: "_Waits") -> EpisodeResult:
        pool, rollout = self._pools[group.task.env], self._rollout(group, number, waits)
        try:
            seed = self._seed_of(group.task, number)
            outcome = await pool.run(group.task, seed=seed, begin=rollout.begin, score=group.score)
        finally:
            rollout.close()
        waits.settled(number, over=True)
        return self._recorded(rollout.result(outcome))

    async def _run_single_turns(
        self, group: Group, sampled: Callable[[], None], waits: "_Waits"
    ) -> list[EpisodeResult]:
        """Runs a group of single answers: one request to a server, and one to a worker."""
        try:
            answers = await self._sample_group(group)
        except TimedOut as error:
            return group.failed(SERVER_TIMEOUT, str(error))
        sampled()
        rollouts = [self._rollout(group, number, waits, one) for number, one in enumerate(answers)]
        try:
            outcomes = await self._scored(group, rollouts, [step for step, _ in answers], waits)
        finally:
            for rollout in rollouts:
                rollout.close()
        return [self._recorded(one.result(outcome)) for one, outcome in zip(rollouts, outcomes, strict=True)]

    async def _scored(
        self, group: Group, rollouts: Sequence[Rollout], steps: Sequence[Step], waits: "_Waits"
    ) -> Sequence[Outcome | Failure]:
        """What the environment's rubric says about each rollout's answer."""
        if not group.score:
            return [Outcome(rewards={step.role: 0.0}, num_answers=1) for step in steps]
        task = group.task
        message = Score(
            split=task.split,
            index=task.index,
            prompt=[dict(message) for message in task.messages],
            texts=[step.text for step in steps],
            finish_reasons=[step.completion.finish_reason for step in steps],
            num_tokens=[len(step.completion.token_ids) for step in steps],
            seeds=[self._seed_of(task, one.number) for one in rollouts],
        )
        return await self._pools[task.env].score(
            message, begin=lambda place: rollouts[place].begin(), over=partial(waits.settled, over=True)
        )

    def _recorded(self, result: EpisodeResult) -> EpisodeResult:
        failure = result.failure
        if failure is None or failure.reason not in (CONTEXT_FULL, SERVER_TIMEOUT):
            # neither a prompt's length nor a slow server is the environment's fault
            self._pools[result.task.env].record(failure)
        return result

    def _seed_of(self, task: Task, number: int) -> int:
        """A rollout's own; in an evaluation that of its example, the same at every version."""
        return mixed_seed(self._seed, task.env, task.split, task.epoch, task.index, number)

    async def _prompt_ids(self, messages: Messages) -> list[int]:
        if (num := num_characters(messages)) > self.max_characters:
            raise PromptTooLong(f"a prompt of {num} characters; no {self.context_len} tokens have so many")
        if num > MAX_CHARACTERS_ON_LOOP:
            return await in_thread(self.renderer.prompt_ids, messages)
        return self.renderer.prompt_ids(messages)

    async def _sample_group(self, group: Group) -> list[tuple[Step, TrainingRow]]:
        prompt, task = await self._prompt_ids(group.task.messages), group.task
        room = self.context_len - len(prompt)
        max_tokens = room if group.params.max_tokens is None else group.params.max_tokens
        if not 1 <= max_tokens <= room:
            raise PromptTooLong(
                f"a prompt of {len(prompt)} tokens leaves {room} of {self.context_len} for the answer, expected "
                f"{group.params.max_tokens or 1}; {MAKE_ROOM}, or lower max_tokens"
            )
        [role] = self._pools[task.env].loaded.roles
        params = replace(group.params, adapter=group.adapters.name(role.id), max_tokens=max_tokens)
        completions = await self.client.generate(
            prompt, params=params, num=group.num, version=group.version, seed=group.seed
        )
        async with self._turns:
            await asyncio.sleep(0)
        opening, temperature = self.templates.opening_ids, params.temperature
        return [
            (
                Step(
                    role=role.id,
                    temperature=temperature,
                    completion=one,
                    text=text,
                    version=group.version,
                    messages=task.messages,
                    adapter=group.adapters.place(role.id),
                ),
                single_row(prompt, one, opening=opening, version=group.version, temperature=temperature),
            )
            for one, text in zip(completions, self.renderer.texts(completions), strict=True)
        ]


class _Waits:
    """Which rollouts of a group go on, and which wait for rewards that come later."""

    def __init__(self, num: int, all_wait: Callable[[], None]) -> None:
        self._going_on, self._waiting, self._all_wait = set(range(num)), set[int](), all_wait

    def settled(self, number: int, *, over: bool) -> None:
        """A rollout is over, or waits."""
        self._going_on.discard(number)
        (self._waiting.discard if over else self._waiting.add)(number)
        if self._waiting and not self._going_on:
            self._all_wait()

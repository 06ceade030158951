"""The rollout engine: tasks to groups of scored rollouts.

User code runs in environment workers; its calls are answered here, and the tokens stay here.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
from grpo.orchestrator.background import in_thread
from grpo.orchestrator.inference.client import PolicyClient, TimedOut
from grpo.orchestrator.monitoring.metrics import Figures
from grpo.orchestrator.renderer import MAX_CHARACTERS_ON_LOOP, MAX_TOKENS_ON_LOOP, ChatRenderer
from grpo.orchestrator.rollouts.clock import together
from grpo.orchestrator.rollouts.messages import num_characters
from grpo.orchestrator.rollouts.players import PlayerId
from grpo.orchestrator.rollouts.records import (
    EpisodeResult,
    Failure,
    Group,
    Messages,
    SamplingParams,
    Step,
    Task,
    TrainingRow,
    seal_of,
    single_row,
)
from grpo.orchestrator.rollouts.rollout import (
    CONTEXT_FULL,
    MAKE_ROOM,
    SERVER_TIMEOUT,
    Drawing,
    Rollout,
)
from grpo.orchestrator.rollouts.stores import ArtifactStores
from grpo.orchestrator.rollouts.templates import Templates
from grpo.orchestrator.seeds import mixed_seed
from grpo.orchestrator.workers.protocol import AnyCall, EnvironmentInfo, Mark, Outcome, Reply, Score
from grpo.transport.http import Choice
from msgspec.structs import replace

NUM_LONG_TEXTS = 2
"""Long texts that are tokenized at once, in threads: more would only take the processor from the event loop."""
LEAST_APART, MANY_TIMES = 1024, 8
"""Answers that may have so many tokens, and so many times those of their prompt, are requests of their own: what that
costs is little beside them."""
NUM_RENDERED = 512
"""Prompts whose ids are kept."""
NUM_TOGETHER = 4
"""Groups whose answers, or outcomes, are taken in at one turn of the event loop, or calls of rollouts that are prepared
or answered, however many come at once."""


Steps = Mapping[int, Mapping[int, Step]]
"""Steps by rollout of a tree, 0 for its root, and by call."""
NO_ROWS: Mapping[int, list[TrainingRow]] = {}


class PromptTooLong(ValueError):
    """A prompt that leaves no room for an answer."""


class EpisodePool(Protocol):
    """Runs the episodes of one environment: its worker pool."""

    @property
    def loaded(self) -> EnvironmentInfo: ...
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
        client: PolicyClient,
        renderer: ChatRenderer,
        *,
        context_len: int,
        seed: int,
        max_prompt_length: int | None = None,
        stores: ArtifactStores | None = None,
        opponents: Drawing | None = None,
    ) -> None:
        """`pools`: the workers of each environment, by its key. `context_len`: longest prompt with answer that servers
        and batches both take, in tokens. `seed`: of what environments draw at random. `max_prompt_length`: in tokens,
        of the training examples' own prompts (None: any). `stores`: of all environments, where any has some.
        `opponents`: draws them (None: there are none)."""
        self.opponents = opponents
        self.client, self.renderer, self.templates = client, renderer, Templates(renderer)
        self.context_len, self.stores, self._seed = context_len, stores, seed
        self._pools = dict[str, EpisodePool]()
        for env, pool in pools.items():
            self.add_pool(env, pool)
        self.num_withdrawn = 0
        """Answers that nobody received."""
        self._max_prompt_length = max_prompt_length
        self._rendered = OrderedDict[tuple[tuple[tuple[str, str], ...], ...], list[int]]()
        """Ids of the newest prompts, which may come again, by their messages."""
        self._turns = asyncio.Semaphore(NUM_TOGETHER)
        self.long_texts = asyncio.Semaphore(NUM_LONG_TEXTS)
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
        advance. `delayed` is called once nothing of it goes on but waits for rewards that come later. Raises
        PromptTooLong, and what servers and broken environments raise."""
        most = self._max_prompt_length if group.task.split == "train" else None
        if most is not None and (num := len(await self._prompt_ids(group.task.messages))) > most:
            raise PromptTooLong(f"a prompt of {num} tokens, expected at most buffer.max_prompt_length = {most}")
        delays = _Delays(group.num, delayed)
        if self.is_single_turn(group.task.env):
            return await self._run_single_turns(group, sampled, delays)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._run_rollout(group, number, delays)) for number in range(group.num)]
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
        """Returns whether each rollout of the environment with this key is one answer to its prompt."""
        return self._pools[env].loaded.single_turn

    def figures(self) -> Figures:
        """Returns rollouts that were begun again because their worker ended, and answers that nobody received."""
        num_restarted = sum(pool.num_restarted for pool in self._pools.values())
        return Figures(counts={"rollout/restarted": num_restarted, "rollout/answers_withdrawn": self.num_withdrawn})

    def _rollout(
        self, group: Group, number: int, delays: "_Delays", presampled: tuple[Step, TrainingRow] | None = None
    ) -> Rollout:
        roles, delayed = self._pools[group.task.env].loaded.roles, partial(delays.settled, over=False)
        return Rollout(self, group, number, roles, delayed=delayed, presampled=presampled)

    async def _run_rollout(self, group: Group, number: int, delays: "_Delays") -> EpisodeResult:
        pool, rollout = self._pools[group.task.env], self._rollout(group, number, delays)
        try:
            seed = self._seed_of(group.task, number)
            outcome = await pool.run(group.task, seed=seed, begin=rollout.begin, score=group.score)
        finally:
            rollout.close()
        delays.settled(number, over=True)
        result = self._result(group, number, outcome, rollout.steps, rollout.rows())
        if isinstance(outcome, Failure) or result.failure is not None or not has_players(outcome):
            return result
        return self._with_players(group, result, outcome, rollout)

    def _with_players(self, group: Group, result: EpisodeResult, outcome: Outcome, rollout: Rollout) -> EpisodeResult:
        """Returns the result of a game, and of those that it spawned, with both sides by their names, and what
        opponents said."""
        rows = rollout.rows(of_opponents=True)

        def named(one: EpisodeResult, of: Outcome) -> EpisodeResult:
            children = tuple(map(named, one.children, of.children))
            if not of.players:
                return replace(one, children=children)
            own = {role: self._own_player(group, role) for role in one.roles}
            steps = tuple(rollout.opponent_steps.get(of.rollout, {}).values())
            others = {step.role: one.rewards.get(step.role, 0.0) for step in steps}
            players = {**of.players, **own}
            opponent = None
            if steps:
                opponent = EpisodeResult(
                    id=one.id,
                    task=one.task,
                    steps=steps,
                    rows=tuple(rows.get(of.rollout, ())),
                    rewards={**one.rewards, **others},
                    players=players,
                )
            return replace(one, children=children, players=players, opponent=opponent)

        return named(result, outcome)

    def _own_player(self, group: Group, role: str) -> PlayerId:
        if self.opponents is not None:
            return self.opponents.player(group.version, group.adapters.name(role))
        return PlayerId(name=f"v{group.version}")

    async def _run_single_turns(
        self, group: Group, sampled: Callable[[], None], delays: "_Delays"
    ) -> list[EpisodeResult]:
        """Runs a group of single answers: one request to a server, and one to a worker. Where answers may be long, each
        is a request of its own: it is scored as soon as it is there, and a server that is lost takes few with it."""
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
        left = set(range(group.num))

        def taken(places: range) -> None:
            left.difference_update(places)
            if not left:
                sampled()

        run = partial(self._run_answers, group, role.id, prompt, params, taken=taken, delays=delays)
        if max_tokens < max(LEAST_APART, MANY_TIMES * len(prompt)) or self.client.is_crowded:
            return await run(range(group.num))
        return [result for [result] in await together(run(range(one, one + 1)) for one in range(group.num))]

    async def _run_answers(
        self,
        group: Group,
        role: str,
        prompt: Sequence[int],
        params: SamplingParams,
        places: range,
        *,
        taken: Callable[[range], None],
        delays: "_Delays",
    ) -> list[EpisodeResult]:
        """Has some answers of a group sampled by one request, and scored by another. `taken` is called with them in
        between."""
        seed = None if group.seed is None else group.seed + places[0]
        try:
            completions = await self.client.generate(
                prompt, params=params, num=len(places), version=group.version, seed=seed
            )
        except TimedOut as error:
            taken(places)
            failed = group.failed(SERVER_TIMEOUT, str(error))
            return [failed[place] for place in places]
        await self.turn()
        # 16 answers of 32,000 tokens are 0.1 s of work.
        is_long = sum(len(one.token_ids) for one in completions) > MAX_TOKENS_ON_LOOP
        take = partial(self._taken, group, role, prompt, completions)
        answers = dict(zip(places, await in_thread(take) if is_long else take(), strict=True))
        taken(places)
        rollouts: dict[int, Rollout] = {}  # those whose rewards call us

        async def answer(place: int, call: AnyCall) -> Reply:
            if place not in rollouts:
                rollouts[place] = self._rollout(group, place, delays, answers[place])
            return await rollouts[place](call)

        def begin(index: int) -> Callable[[AnyCall], Awaitable[Reply]]:
            if (place := places[index]) in rollouts:
                rollouts[place].begin()
            return partial(answer, place)

        try:
            steps = {place: step for place, (step, _) in answers.items()}
            outcomes = await self._scored(group, steps, begin, delays)
        finally:
            for rollout in rollouts.values():
                rollout.close()
        await self.turn()
        trees = {place: (rollout.steps, rollout.rows()) for place, rollout in rollouts.items()}
        return [
            self._result(group, place, outcome, *trees.get(place, ({0: {0: step}}, {0: [row]})))
            for outcome, (place, (step, row)) in zip(outcomes, answers.items(), strict=True)
        ]

    async def _scored(
        self,
        group: Group,
        steps: Mapping[int, Step],
        begin: Callable[[int], Callable[[AnyCall], Awaitable[Reply]]],
        delays: "_Delays",
    ) -> Sequence[Outcome | Failure]:
        """Returns the outcome of each answer, by the environment's rubric. `steps`: by place in the group."""
        task, places, answers = group.task, [*steps], [*steps.values()]
        if not group.score:
            return [Outcome(rewards={step.role: 0.0}, num_answers=1) for step in answers]

        def over(index: int) -> None:
            delays.settled(places[index], over=True)

        message = Score(
            split=task.split,
            index=task.index,
            prompt=[dict(message) for message in task.messages],
            texts=[step.text for step in answers],
            opening=self.templates.plain.opening,
            finish_reasons=[step.completion.finish_reason for step in answers],
            num_tokens=[len(step.completion.token_ids) for step in answers],
            seeds=[self._seed_of(task, place) for place in places],
        )
        return await self._pools[task.env].score(message, begin=begin, over=over)

    def _result(
        self, group: Group, number: int, outcome: Outcome | Failure, steps: Steps, rows: Mapping[int, list[TrainingRow]]
    ) -> EpisodeResult:
        result = result_of(outcome, steps, rows, name=group.name(number), task=group.task)
        failure = result.failure
        if failure is None or failure.reason not in (CONTEXT_FULL, SERVER_TIMEOUT):
            # neither a prompt's length nor a slow server is the environment's fault
            self._pools[group.task.env].record(failure)
        return result

    def _seed_of(self, task: Task, number: int) -> int:
        """Returns the seed of a rollout; in an evaluation it is the same at every version."""
        return mixed_seed(self._seed, task.env, task.split, task.epoch or 0, task.index, number)

    async def turn(self) -> None:
        """Waits for a turn of the event loop that few have: many may be answered, or scored, at once."""
        async with self._turns:
            await asyncio.sleep(0)

    async def _prompt_ids(self, messages: Messages) -> list[int]:
        if (num := num_characters(messages)) > self.max_characters:
            raise PromptTooLong(f"a prompt of {num} characters; no {self.context_len} tokens have so many")
        if num > MAX_CHARACTERS_ON_LOOP:
            async with self.long_texts:
                return await in_thread(self.renderer.prompt_ids, messages)
        texts = tuple(tuple(message.items()) for message in messages)
        if (ids := self._rendered.pop(texts, None)) is None:
            ids = self.renderer.prompt_ids(messages)
        self._rendered[texts] = ids
        if len(self._rendered) > NUM_RENDERED:
            self._rendered.popitem(last=False)
        return ids

    def _taken(
        self, group: Group, role: str, prompt: Sequence[int], completions: Sequence[Choice]
    ) -> list[tuple[Step, TrainingRow]]:
        """Returns the step and the row of each answer to a group's prompt."""
        opening, temperature = self.templates.plain.opening_ids, group.params.temperature
        adapter, prompt_ids, taken = group.adapters.place(role), np.asarray(prompt, np.int32), []
        for one, text in zip(completions, self.renderer.texts(completions), strict=True):
            row = single_row(prompt_ids, one, opening=opening, version=group.version, temperature=temperature)
            step = Step(
                role=role,
                temperature=temperature,
                completion=row.holding(one, row.turns[0]),
                text=text,
                version=group.version,
                messages=group.task.messages,
                adapter=adapter,
            )
            taken.append((step, row))
        return taken


def result_of(
    outcome: Outcome | Failure,
    steps: Steps,
    rows: Mapping[int, list[TrainingRow]] = NO_ROWS,
    *,
    name: str,
    task: Task,
) -> EpisodeResult:
    """Returns the results of a rollout and of all that it spawned, or one that says why it failed. `outcome`: what its
    worker says; `steps`: what was sampled, by rollout of the tree and by call; `rows`: by rollout of the tree. It has
    failed where credit could not be given for each answer, too, or where there is none."""
    failure = outcome if isinstance(outcome, Failure) else None
    if not isinstance(outcome, Failure):
        try:
            return _result_tree(outcome, steps, rows, name, task)
        except ValueError as error:
            failure = Failure(reason="env_error", message=str(error))
    known = tuple(step for of_one in steps.values() for step in of_one.values())
    return EpisodeResult(id=name, task=task, steps=known, failure=failure)


def _result_tree(
    outcome: Outcome, steps: Steps, rows: Mapping[int, list[TrainingRow]], name: str, task: Task
) -> EpisodeResult:
    seen: set[int] = set()

    def result(of: Outcome, name: str) -> EpisodeResult:
        own = steps.get(of.rollout, {})
        if of.rollout in seen or not of.marks.keys() <= own.keys():
            raise ValueError("state.children or the replies in state.trajectory are not as the context put them there")
        seen.add(of.rollout)
        if len(own) != of.num_answers:
            raise ValueError(
                f"the policy gave a rollout {len(own)} answers, and {of.num_answers} are in its state.trajectory; "
                "leave it as ctx.sample made it, let no call be cancelled, and await each"
            )
        own_steps = tuple(marked(step, of.marks.get(call)) for call, step in own.items())
        return EpisodeResult(
            id=name,
            task=task,
            steps=own_steps,
            rows=tuple(rows.get(of.rollout, ())),
            rewards=of.rewards,
            accuracy=of.accuracy,
            metrics=of.metrics,
            extras=of.extras,
            fields=of.fields,
            context_full=of.truncated,
            children=tuple(result(child, f"{name}.{place}") for place, child in enumerate(of.children)),
            seal=seal_of(name, own_steps, of.rewards),
        )

    made = result(outcome, name)
    if any(own and rollout not in seen for rollout, own in steps.items()):
        raise ValueError("the policy gave answers to sub-episodes that came to no end; let no spawn be cancelled")
    if not any(steps.values()):
        raise ValueError("the episode ended without an answer of the policy")
    return made


def marked(step: Step, mark: Mark | None) -> Step:
    """Returns a step with what the environment said about it."""
    return step if mark is None else replace(step, error=mark.error, observed=mark.observed)


def has_players(outcome: Outcome) -> bool:
    """Returns whether a role was bound to a player, in the rollout or in one that it spawned."""
    return bool(outcome.players) or any(map(has_players, outcome.children))


class _Delays:
    """The rollouts of a group that go on, and those that wait for rewards that come later."""

    def __init__(self, num: int, all_wait: Callable[[], None]) -> None:
        self._going_on, self._waiting, self._all_wait = set(range(num)), set[int](), all_wait

    def settled(self, number: int, *, over: bool) -> None:
        """A rollout is over, or waits."""
        self._going_on.discard(number)
        (self._waiting.discard if over else self._waiting.add)(number)
        if self._waiting and not self._going_on:
            self._all_wait()

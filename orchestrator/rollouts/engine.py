"""The rollout engine: tasks to groups of scored rollouts.

User code runs in environment workers; its calls are answered here, and the tokens stay here.
"""

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import replace

from orchestrator.inference.client import Refused as RefusedByServer
from orchestrator.renderer import ChatRenderer
from orchestrator.rollouts.conversation import Conversation, single_row
from orchestrator.rollouts.policy import PolicyClient, PromptTooLong
from orchestrator.rollouts.records import (
    Completion,
    EpisodeResult,
    Failure,
    NotFinite,
    SamplingParams,
    Step,
    Task,
    TrainingRow,
)
from orchestrator.rollouts.roles import SHARED_ADAPTER, RoleAdapters
from orchestrator.rollouts.stores import ArtifactStores
from orchestrator.rollouts.templates import TemplateRefused, Templates
from orchestrator.seeds import mixed_seed
from orchestrator.workers.pool import WorkerPool
from orchestrator.workers.protocol import Ask, Call, Outcome, Refused, Reply, Sample, Sampled, Store, Stored
from orchestrator.workers.session import GivenUp

CONTEXT_FULL, CALL_FAILED = "context_full", "failed"
MAX_CALLS = 2000
"""Of one rollout. Each is answered in its time, so that an episode without end would never be late."""
BASE, POLICY_MODEL = "base", "policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A group of rollouts that is asked for."""

    task: Task
    id: str
    """Rollouts are named `id/number`."""
    num: int
    version: int
    """The policy version that samples."""
    params: SamplingParams
    adapters: RoleAdapters = SHARED_ADAPTER
    seed: int | None = None
    """Of its requests; None for the server's own randomness."""
    score: bool = True
    """Whether the rubric is asked; otherwise rewards are 0."""


class RolloutEngine:
    """Rolls out groups, of all environments."""

    def __init__(
        self,
        pools: Mapping[str, WorkerPool],
        policy: PolicyClient,
        renderer: ChatRenderer,
        *,
        seed: int,
        stores: ArtifactStores | None = None,
    ) -> None:
        """`pools`: the workers of each environment, by its key. `seed`: of what environments draw at random. `stores`:
        of all environments, where any has some."""
        self.policy, self.renderer, self.templates = policy, renderer, Templates(renderer)
        self.stores, self._pools, self._seed = stores, pools, seed
        self._num_restarted = 0

    async def run_group(self, group: Group, *, sampled: Callable[[], None] = lambda: None) -> list[EpisodeResult]:
        """Each of the group's rollouts, scored or failed. `sampled` is called once all of it is sampled that can be in
        advance: a group of single answers is one request, so that the server reads the prompt once. Raises
        PromptTooLong, and what servers and broken environments raise."""
        if not self.is_single_turn(group.task.env):
            async with asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(self._run_rollout(group, number)) for number in range(group.num)]
            results = [one.result() for one in asked]
            full = [one.failure for one in results if one.failure is not None and one.failure.reason == CONTEXT_FULL]
            if len(full) == group.num and not any(one.steps for one in results):
                raise PromptTooLong(full[-1].message)
            return results
        completions, rows = await self._sample_group(group)
        sampled()
        async with asyncio.TaskGroup() as tasks:
            asked = [
                tasks.create_task(self._run_rollout(group, number, completion, row))
                for number, (completion, row) in enumerate(zip(completions, rows, strict=True))
            ]
        return [one.result() for one in asked]

    def is_single_turn(self, env: str) -> bool:
        """Whether each rollout of the environment with this key is one answer to its prompt."""
        return self._pools[env].loaded.single_turn

    def has_solutions(self, env: str) -> bool:
        """Whether training examples of the environment with this key have a `solution`."""
        return bool(self._pools[env].solutions)

    def newly_restarted(self) -> int:
        """Rollouts that were begun again because their worker ended, since this was last asked."""
        before, self._num_restarted = self._num_restarted, sum(pool.num_restarted for pool in self._pools.values())
        return self._num_restarted - before

    async def _run_rollout(
        self, group: Group, number: int, completion: Completion | None = None, row: TrainingRow | None = None
    ) -> EpisodeResult:
        pool, rollout_id = self._pools[group.task.env], f"{group.id}/{number}"
        attempt = first = self._attempt(group, number, completion, row)
        has_begun = False

        def begin() -> "_Attempt":
            nonlocal attempt, has_begun
            attempt, has_begun = self._attempt(group, number, completion, row) if has_begun else first, True
            return attempt

        outcome = await pool.run(
            group.task,
            seed=self._environment_seed(group, number),
            begin=begin,
            score=group.score,
            answer=first.given,
        )
        result = attempt.result(outcome, rollout_id)
        if result.failure is None or result.failure.reason != CONTEXT_FULL:  # that is the prompt's length
            pool.record(result.failure)
        return result

    async def _sample_group(self, group: Group) -> tuple[Sequence[Completion], Sequence[TrainingRow]]:
        prompt = self.renderer.prompt_ids(group.task.messages)
        role = self._pools[group.task.env].loaded.roles[0]
        params = replace(group.params, adapter=group.adapters.name(role.id))
        completions = await self.policy.generate(
            prompt, params=params, num=group.num, version=group.version, seed=group.seed
        )
        opening = self.templates.opening_ids
        return completions, [
            single_row(prompt, one, opening=opening, version=group.version, temperature=params.temperature)
            for one in completions
        ]

    def _environment_seed(self, group: Group, number: int) -> int:
        """A rollout's own; in an evaluation that of its example, the same at every version."""
        task = group.task
        return mixed_seed(self._seed, task.env, task.split, task.epoch, task.index, number)

    def _attempt(self, group: Group, number: int, completion: Completion | None, row: TrainingRow | None) -> "_Attempt":
        seed = None if group.seed is None else mixed_seed(group.seed, number)
        attempt = _Attempt(self, group, self._pools[group.task.env], seed)
        if completion is not None and row is not None:
            attempt.answered(completion, row)
        return attempt


@dataclass(frozen=True, slots=True)
class _Sampled:
    """A step, and where its tokens are."""

    step: Step
    conversation: int
    turn: int


class _Attempt:
    """One attempt at one rollout: answers its calls and keeps what was sampled."""

    def __init__(self, engine: RolloutEngine, group: Group, pool: WorkerPool, seed: int | None) -> None:
        self._engine, self._group, self._seed = engine, group, seed
        self._roles = {role.id: role for role in pool.loaded.roles}
        self._conversations: dict[int, Conversation] = {}
        self._rows: tuple[TrainingRow, ...] | None = None
        """Of a single answer that was sampled in advance."""
        self._sampled: dict[int, _Sampled] = {}
        """By call."""
        self._num_calls = 0
        self._asked: dict[bytes, int] = {}
        """How often each prompt was sampled from."""
        self.given: Sampled | None = None
        """The answer to its first call, where it was sampled in advance."""

    def answered(self, completion: Completion, row: TrainingRow) -> None:
        """Its first call has this answer."""
        [role] = self._roles
        group, [text] = self._group, self._engine.renderer.texts([completion])
        step = Step(
            role=role,
            temperature=group.params.temperature,
            completion=completion,
            text=text,
            version=group.version,
            messages=group.task.messages,
            adapter=group.adapters.place(role),
        )
        self._sampled[0], self._rows = _Sampled(step, 0, 0), (row,)
        self.given = _reply(-1, 0, text, completion)

    async def __call__(self, call: Call) -> Reply:
        """The reply to a call. Raises GivenUp, and what servers raise."""
        if self._num_calls >= MAX_CALLS:
            message = f"a rollout may call models {MAX_CALLS} times, and this one goes on; let its episode end"
            raise GivenUp(Failure(reason="env_error", message=message))
        self._num_calls += 1
        try:
            if isinstance(call, Sample):
                return await self._sample(call)
            return await self._ask(call) if isinstance(call, Ask) else self._store(call)
        except _CallRefused as refused:
            return Refused(rollout=call.rollout, call=call.call, reason=refused.reason, message=str(refused))

    async def _sample(self, call: Sample) -> Reply:
        group, role = self._group, self._roles.get(call.role)
        if role is None or call.call in self._sampled:
            raise _CallRefused(CALL_FAILED, f"call {call.call} of {call.role} is none that can be answered")
        own = (call.temperature or role.temperature) if group.task.split == "train" else None
        temperature = group.params.temperature if own is None else own
        limit = call.max_tokens or role.max_tokens or group.params.max_tokens
        try:
            conversation = self._conversation(call)
            prompt = conversation.prompt_ids()
        except (TemplateRefused, ValueError) as error:
            raise _CallRefused(CALL_FAILED, str(error)) from None
        params = replace(
            group.params,
            temperature=temperature,
            max_tokens=self._max_tokens(prompt, limit),
            adapter=group.adapters.name(call.role),
        )
        [completion] = await self._engine.policy.generate(
            prompt, params=params, num=1, version=group.version, seed=self._seed_for(prompt)
        )
        text = conversation.answer(completion, version=group.version, temperature=temperature)
        step = Step(
            role=call.role,
            temperature=temperature,
            completion=completion,
            text=text,
            version=group.version,
            messages=tuple(call.messages),
            tools=conversation.tools,
            adapter=group.adapters.place(call.role),
        )
        self._sampled[call.call] = _Sampled(step, call.conversation, conversation.num_turns - 1)
        reply = _reply(call.rollout, call.call, text, completion)
        reply.num_prompt_tokens = len(prompt)
        if call.logprobs:
            written = [self._engine.renderer.raw_text([token]) for token in completion.token_ids]
            reply.tokens = list(zip(written, completion.logprobs, strict=True))
        return reply

    def _conversation(self, call: Sample) -> Conversation:
        found = self._conversations.get(call.conversation)
        messages = call.messages if call.raw else self._harmless(call.messages)
        if found is None:
            templates = self._engine.templates
            found = Conversation(templates.raw if call.raw else templates.of(call.tools), messages)
            self._conversations[call.conversation] = found
        elif messages:
            found.add(*messages)
        return found

    def _harmless(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [self._engine.renderer.without_control(message) for message in messages]

    def _max_tokens(self, prompt: Sequence[int], limit: int | None) -> int:
        context_len = self._engine.policy.context_len
        if (room := context_len - len(prompt)) < 1:
            raise _CallRefused(
                CONTEXT_FULL,
                f"a conversation of {len(prompt)} tokens leaves no room for an answer in {context_len} tokens; raise "
                "seq_len, the server's max_model_len and that of a teacher, or let the environment say less",
            )
        return min(room, limit or room)

    async def _ask(self, call: Ask) -> Reply:
        """An answer beside the rollout, of the base model or of the version that it is sampled by, by its first
        adapter."""
        if call.model not in (BASE, POLICY_MODEL):
            raise _CallRefused(CALL_FAILED, f"model is {call.model!r}, expected {BASE} or {POLICY_MODEL}")
        try:
            template = self._engine.templates.of(None)
            prompt = template.renderer.ids_of(template.render(self._harmless(call.messages)))
        except TemplateRefused as error:
            raise _CallRefused(CALL_FAILED, str(error)) from None
        follows = self._group.params.follow and call.model == POLICY_MODEL
        params = SamplingParams(
            temperature=call.temperature, max_tokens=self._max_tokens(prompt, call.max_tokens), follow=follows
        )
        version = None if call.model == BASE else self._group.version
        try:
            [completion] = await self._engine.policy.generate(
                prompt, params=params, num=1, version=version, seed=self._seed_for(prompt)
            )
        except RefusedByServer as error:  # what is asked here is user code's: a temperature that nobody samples at
            raise _CallRefused(CALL_FAILED, str(error)) from None
        [text] = self._engine.renderer.texts([completion])
        return _reply(call.rollout, call.call, text, completion)

    def _seed_for(self, prompt: Sequence[int]) -> int | None:
        """By what is asked, and how often it was, because calls that are made at once come in no certain order."""
        if self._seed is None:
            return None
        digest = hashlib.blake2b(np.asarray(prompt, np.int32).tobytes(), digest_size=16).digest()
        self._asked[digest] = num = self._asked.get(digest, 0) + 1
        return mixed_seed(self._seed, digest.hex(), num)

    def _store(self, call: Store) -> Reply:
        task = self._group.task
        try:
            if self._engine.stores is None:
                raise KeyError("no environment of the run has stores")
            store = self._engine.stores.of(task.env, task.split, call.store)
            value = store.operate(call.operation, call.arguments)
        except (KeyError, ValueError, TypeError) as error:
            raise _CallRefused(CALL_FAILED, f"store {call.store}: {error}") from None
        return Stored(rollout=call.rollout, call=call.call, value=value)

    # --- what it came to ---

    def result(self, outcome: Outcome | Failure, rollout_id: str) -> EpisodeResult:
        """The tree of a rollout's results, or why there is none."""
        task, failure = self._group.task, None
        try:
            failure = outcome if isinstance(outcome, Failure) else self._fault(outcome)
            if failure is None:
                assert isinstance(outcome, Outcome)
                return self._tree(outcome, rollout_id)
        except NotFinite as error:
            failure = Failure(reason="reward_not_finite", message=str(error))
        except ValueError as error:
            failure = Failure(reason="env_error", message=str(error))
        steps = tuple(one.step for one in self._sampled.values())
        return EpisodeResult(id=rollout_id, task=task, steps=steps, failure=failure)

    def _fault(self, outcome: Outcome) -> Failure | None:
        """Why nothing can be trained on it: steps that are not what was sampled, tokens that belong to no step, for
        which nobody could give credit, or no tokens at all."""
        calls = _calls(outcome)
        claimed = set(calls)
        if len(claimed) < len(calls) or not claimed <= self._sampled.keys():
            message = (
                "steps of the rollout's trajectory are none of the policy's answers, or one of them again; leave the "
                "replies in state.trajectory as ctx.sample put them there"
            )
            return Failure(reason="env_error", message=message)
        if unclaimed := len(self._sampled) - len(claimed):
            message = (
                f"{unclaimed} answers that the policy gave belong to no step of the rollout, expected all: let no call "
                "be cancelled, and await each"
            )
            return Failure(reason="env_error", message=message)
        if not self._sampled:
            return Failure(reason="env_error", message="the episode ended without an answer of the policy")
        return None

    def _tree(self, outcome: Outcome, rollout_id: str) -> EpisodeResult:
        sampled = [self._sampled[marks.call] for marks in outcome.steps]
        steps = [
            one.step
            if marks.error is None and marks.observed is None
            else replace(one.step, error=marks.error, observed=marks.observed)
            for one, marks in zip(sampled, outcome.steps, strict=True)
        ]
        children = [self._tree(child, f"{rollout_id}.{n}") for n, child in enumerate(outcome.children)]
        return EpisodeResult(
            id=rollout_id,
            task=self._group.task,
            steps=tuple(steps),
            rows=self._rows_of(sampled) if self._rows is None else self._rows,
            rewards=outcome.rewards,
            accuracy=outcome.accuracy,
            metrics=outcome.metrics,
            extras=outcome.extras,
            context_full=outcome.context_full,
            children=tuple(children),
        )

    def _rows_of(self, sampled: Sequence[_Sampled]) -> tuple[TrainingRow, ...]:
        """Of the conversations in which these steps are. Raises ValueError where they hold steps of others."""
        places = {(one.conversation, one.turn): index for index, one in enumerate(sampled)}
        rows: list[TrainingRow] = []
        for number in dict.fromkeys(one.conversation for one in sampled):
            for row in self._conversations[number].rows():
                steps = [places.get((number, turn.index)) for turn in row.turns]
                if None in steps:
                    raise ValueError(
                        "answers of one conversation are in the trajectories of several rollouts; leave the replies in "
                        "state.trajectory as ctx.sample put them there"
                    )
                rows.append(replace(row, steps=tuple(steps)))
        return tuple(rows)


class _CallRefused(Exception):
    """A call comes to nothing, which the rollout's code is told."""

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        super().__init__(message)


def _reply(rollout: int, call: int, text: str, completion: Completion) -> Sampled:
    return Sampled(
        rollout=rollout,
        call=call,
        text=text,
        finish_reason=completion.finish_reason,
        num_tokens=len(completion.token_ids),
    )


def _calls(outcome: Outcome) -> list[int]:
    """The calls of all steps, those of children included."""
    return [step.call for step in outcome.steps] + [call for child in outcome.children for call in _calls(child)]

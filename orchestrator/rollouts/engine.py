"""The rollout engine: tasks to groups of scored rollouts.

User code runs in environment workers; its calls are answered here, and the tokens stay here.
"""

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
from msgspec.structs import replace

from orchestrator.background import in_thread
from orchestrator.inference.client import InferenceClient, ServerError, TimedOut
from orchestrator.inference.client import Refused as RefusedByServer
from orchestrator.renderer import ChatRenderer
from orchestrator.rollouts.conversation import Conversation, single_row
from orchestrator.rollouts.local import LocalPool
from orchestrator.rollouts.messages import num_characters
from orchestrator.rollouts.records import EpisodeResult, Failure, Messages, SamplingParams, Step, Task, TrainingRow
from orchestrator.rollouts.roles import SHARED_ADAPTER, RoleAdapters
from orchestrator.rollouts.stores import ArtifactStores
from orchestrator.rollouts.templates import Templates
from orchestrator.seeds import mixed_seed
from orchestrator.workers.pool import WorkerPool
from orchestrator.workers.protocol import AnyCall, Ask, Delay, Refused, Reply, Sample, Sampled, Store, Stored
from orchestrator.workers.session import GivenUp
from transport.http import Choice

T = TypeVar("T")
CONTEXT_FULL, CALL_FAILED, SERVER_TIMEOUT = "context_full", "failed", "server_timeout"
NUM_TOGETHER = 4
"""Groups whose answers are taken in at one turn of the event loop, however many come at once."""
MAX_CALLS = 2000
"""Of one rollout. Each is answered in its time, so that an episode without end would never be late."""
MAX_CHARACTERS_ON_LOOP = 1 << 14
"""Longer texts are tokenized in a thread."""
FOR_ALL = (401, 403)
"""What servers refuse with these, they refuse whoever asks."""
MAKE_ROOM = "raise seq_len, the server's max_model_len and that of a teacher"


class PromptTooLong(ValueError):
    """A prompt that leaves no room for an answer."""


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
    first: int = 0
    """Number of the first of its rollouts."""


class RolloutEngine:
    """Rolls out groups, of all environments."""

    def __init__(
        self,
        pools: Mapping[str, "WorkerPool | LocalPool"],
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
        self.context_len, self.stores, self._pools, self._seed = context_len, stores, pools, seed
        self._num_restarted, self._max_prompt_length = 0, max_prompt_length
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
        given: list[_Given | None] = [None] * group.num
        if self.is_single_turn(group.task.env):
            try:
                given = [*await self._sample_group(group)]
            except TimedOut as error:
                failure = Failure(reason=SERVER_TIMEOUT, message=str(error))
                ids = (f"{group.id}/{group.first + number}" for number in range(group.num))
                return [EpisodeResult(id=one, task=group.task, failure=failure) for one in ids]
            sampled()
        async with asyncio.TaskGroup() as tasks:
            waits = _Waits(group.num, delayed)
            running = [tasks.create_task(self._run_rollout(group, n, one, waits)) for n, one in enumerate(given)]
        results = [one.result() for one in running]
        full = [one.failure for one in results if one.failure is not None and one.failure.reason == CONTEXT_FULL]
        if len(full) == group.num and not any(one.steps for one in results):
            raise PromptTooLong(full[-1].message)
        return results

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

    async def _run_rollout(self, group: Group, number: int, given: "_Given | None", waits: "_Waits") -> EpisodeResult:
        task, pool = group.task, self._pools[group.task.env]
        attempts, generating = list[_Attempt](), dict[tuple[object, ...], asyncio.Task[list[Choice]]]()

        def begin() -> _Attempt:
            attempts.append(
                _Attempt(self, group, pool, number, given, generating, lambda: waits.settled(number, over=False))
            )
            return attempts[-1]

        try:
            told = await pool.run(
                task,
                # a rollout's own; in an evaluation that of its example, the same at every version
                seed=mixed_seed(self._seed, task.env, task.split, task.epoch, task.index, number),
                begin=begin,
                score=group.score,
                answer=None if given is None else _reply(given.text, given.completion),
            )
        finally:
            for one in generating.values():
                one.cancel()
        waits.settled(number, over=True)
        result = attempts[-1].result(told, f"{group.id}/{group.first + number}")
        if result.failure is None or result.failure.reason not in (CONTEXT_FULL, SERVER_TIMEOUT):
            pool.record(result.failure)  # neither a prompt's length nor a slow server is the environment's fault
        return result

    async def _prompt_ids(self, messages: Messages) -> list[int]:
        if (num := num_characters(messages)) > self.max_characters:
            raise PromptTooLong(f"a prompt of {num} characters; no {self.context_len} tokens have so many")
        if num > MAX_CHARACTERS_ON_LOOP:
            return await in_thread(self.renderer.prompt_ids, messages)
        return self.renderer.prompt_ids(messages)

    async def _sample_group(self, group: Group) -> "list[_Given]":
        prompt = await self._prompt_ids(group.task.messages)
        room = self.context_len - len(prompt)
        max_tokens = room if group.params.max_tokens is None else group.params.max_tokens
        if not 1 <= max_tokens <= room:
            raise PromptTooLong(
                f"a prompt of {len(prompt)} tokens leaves {room} of {self.context_len} for the answer, expected "
                f"{group.params.max_tokens or 1}; {MAKE_ROOM}, or lower max_tokens"
            )
        [role] = self._pools[group.task.env].loaded.roles
        params = replace(group.params, adapter=group.adapters.name(role.id), max_tokens=max_tokens)
        completions = await self.client.generate(
            prompt, params=params, num=group.num, version=group.version, seed=group.seed
        )
        async with self._turns:
            await asyncio.sleep(0)
        opening = self.templates.opening_ids
        row = partial(single_row, prompt, opening=opening, version=group.version, temperature=params.temperature)
        return [
            _Given(completion=one, row=row(one), text=text)
            for one, text in zip(completions, self.renderer.texts(completions), strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """The answer to a rollout's first call, which was sampled in advance together with the others of its group."""

    completion: Choice
    row: TrainingRow
    text: str


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


@dataclass(slots=True)
class _Talk:
    """A conversation, and the calls that its turns answer."""

    rows: Callable[[], list[TrainingRow]]
    calls: list[int] = field(default_factory=list)
    conversation: Conversation | None = None


class _Attempt:
    """One attempt at one rollout: answers its calls and keeps what was sampled."""

    def __init__(
        self,
        engine: RolloutEngine,
        group: Group,
        pool: "WorkerPool | LocalPool",
        number: int,
        given: _Given | None,
        generating: "dict[tuple[object, ...], asyncio.Task[list[Choice]]]",
        delayed: Callable[[], None],
    ) -> None:
        """`generating`: what servers were asked in this rollout, answered or not. An attempt that asks the same again
        after its worker has ended gets the answer of the one before. `delayed`: called where it begins to wait for a
        reward."""
        self._engine, self._group, self._number, task = engine, group, number, group.task
        self._generating, self._delayed = generating, delayed
        self._roles = {role.id: role for role in pool.loaded.roles}
        self._talks: dict[int, _Talk] = {}
        self._steps: dict[int, Step] = {}
        """By call."""
        self._num_calls = 0
        self._has_waited = False
        """For a reward that comes later: servers may have unloaded the group's version meanwhile."""
        self._asked: dict[bytes, int] = {}
        """How often each prompt was sampled from."""
        if given is not None:
            [role] = self._roles
            self._talks[-1] = _Talk(rows=lambda: [given.row], calls=[0])
            self._steps[0] = self._step(role, given.completion, given.text, group.params.temperature, task.messages)

    async def __call__(self, call: AnyCall) -> Reply:
        """The reply to a call. Raises GivenUp, and what servers raise."""
        if self._num_calls >= MAX_CALLS:
            message = f"a rollout may call models {MAX_CALLS} times, and this one goes on; let its episode end"
            raise GivenUp(Failure(reason="env_error", message=message))
        self._num_calls += 1
        try:
            if isinstance(call, Delay):
                self._has_waited = True
                self._delayed()
                return Stored(value=None)
            if isinstance(call, Sample):
                return await self._sample(call)
            return await self._ask(call) if isinstance(call, Ask) else self._store(call)
        except TimedOut as error:
            raise GivenUp(Failure(reason=SERVER_TIMEOUT, message=str(error))) from None
        except _CallRefused as refused:
            return Refused(reason=refused.reason, message=str(refused))
        except (ServerError, GivenUp):
            raise
        except Exception as error:  # what was asked is user code's, whoever chokes on it
            message = f"{type(call).__name__} came to nothing: {type(error).__name__}: {str(error)[:1000]}"
            return Refused(reason=CALL_FAILED, message=message)

    async def _sample(self, call: Sample) -> Reply:
        group, role = self._group, self._roles.get(call.role)
        if role is None or call.call in self._steps:
            raise _CallRefused(CALL_FAILED, f"call {call.call} of {call.role} is none that can be answered")
        own = (call.temperature or role.temperature) if group.task.split == "train" else None
        temperature = group.params.temperature if own is None else own

        def tokenized() -> tuple[list[int], Conversation, list[int]]:
            calls, conversation = self._talk(call)
            return calls, conversation, conversation.prompt_ids()

        calls, conversation, prompt = await self._tokenized(tokenized, call.messages, call.tools)
        params = replace(
            group.params,
            follow=self._follows,
            temperature=temperature,
            max_tokens=self._max_tokens(prompt, call.max_tokens or role.max_tokens or group.params.max_tokens),
            adapter=group.adapters.name(call.role),
        )
        completion = await self._generate(prompt, params, group.version)
        text = conversation.answer(completion, version=group.version, temperature=temperature)
        calls.append(call.call)
        step = self._step(call.role, completion, text, temperature, tuple(call.messages), conversation.tools)
        self._steps[call.call] = step
        reply = _reply(text, completion)
        reply.num_prompt_tokens = len(prompt)
        if call.logprobs:
            written = [self._engine.renderer.raw_text([token]) for token in completion.token_ids]
            reply.tokens = list(zip(written, completion.logprobs, strict=True))
        return reply

    def _step(
        self,
        role: str,
        completion: Choice,
        text: str,
        temperature: float,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> Step:
        return Step(
            role=role,
            temperature=temperature,
            completion=completion,
            text=text,
            version=self._group.version,
            messages=messages,
            tools=tools,
            adapter=self._group.adapters.place(role),
        )

    def _talk(self, call: Sample) -> tuple[list[int], Conversation]:
        """The conversation of a call, with its new messages, and the calls before it."""
        templates, found = self._engine.templates, self._talks.get(call.conversation)
        messages = call.messages if call.raw else self._harmless(call.messages)
        if found is None or found.conversation is None:
            conversation = Conversation(templates.raw if call.raw else templates.of(call.tools), messages)
            found = self._talks[call.conversation] = _Talk(rows=conversation.rows, conversation=conversation)
            return found.calls, conversation
        if messages:
            found.conversation.add(*messages)
        return found.calls, found.conversation

    def _harmless(self, messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
        return [self._engine.renderer.without_control(message) for message in messages]

    def _max_tokens(self, prompt: Sequence[int], limit: int | None) -> int:
        context_len = self._engine.context_len
        if (room := context_len - len(prompt)) < 1:
            raise _CallRefused(
                CONTEXT_FULL,
                f"a conversation of {len(prompt)} tokens leaves no room for an answer in {context_len} tokens; "
                f"{MAKE_ROOM}, or let the environment say less",
            )
        return min(room, limit or room)

    @property
    def _follows(self) -> bool:
        """Whether servers answer under the newest version, which each token then has on record. An evaluation's own
        version stays."""
        return self._group.params.follow or (self._has_waited and self._group.task.split == "train")

    async def _tokenized(self, make: Callable[[], T], *said: object) -> T:
        """What `make` makes of what user code has said: in a thread, where that is long."""
        engine = self._engine
        if (num := num_characters(said)) > engine.max_characters:
            raise _CallRefused(
                CONTEXT_FULL,
                f"messages of {num} characters; no {engine.context_len} tokens have so many, which is what the context "
                f"holds; {MAKE_ROOM}, or let the environment say less",
            )
        try:
            return await in_thread(make) if num > MAX_CHARACTERS_ON_LOOP else make()
        except ValueError as error:  # TemplateRefused among them
            raise _CallRefused(CALL_FAILED, str(error)) from None

    async def _ask(self, call: Ask) -> Reply:
        """An answer beside the rollout, of the base model or of the version that it is sampled by, by its first
        adapter."""
        if call.model not in ("base", "policy"):
            raise _CallRefused(CALL_FAILED, f"model is {call.model!r}, expected base or policy")

        def tokenized() -> list[int]:
            template = self._engine.templates.of(None)
            return template.renderer.ids_of(template.render(self._harmless(call.messages)))

        prompt = await self._tokenized(tokenized, call.messages)
        is_policy = call.model == "policy"
        params = SamplingParams(
            temperature=call.temperature,
            max_tokens=self._max_tokens(prompt, call.max_tokens),
            follow=self._follows and is_policy,
        )
        completion = await self._generate(prompt, params, self._group.version if is_policy else None)
        return _reply(self._engine.renderer.texts([completion])[0], completion)

    async def _generate(self, prompt: Sequence[int], params: SamplingParams, version: int | None) -> Choice:
        """One answer. Its seed follows from what is asked, and how often it was, because calls that are made at once
        come in no certain order."""
        digest = hashlib.blake2b(np.asarray(prompt, np.int32).tobytes(), digest_size=16).digest()
        self._asked[digest] = num = self._asked.get(digest, 0) + 1
        key = digest, num, params, version
        if key not in self._generating:
            base = self._group.seed
            seed = None if base is None else mixed_seed(mixed_seed(base, self._number), digest.hex(), num)
            asked = self._engine.client.generate(prompt, params=params, num=1, version=version, seed=seed)
            self._generating[key] = asyncio.create_task(asked)
        try:
            [completion] = await asyncio.shield(self._generating[key])
        except RefusedByServer as error:
            if error.status in FOR_ALL:
                raise
            raise _CallRefused(CALL_FAILED, str(error)) from None
        return completion

    def _store(self, call: Store) -> Reply:
        task, stores = self._group.task, self._engine.stores
        try:
            if stores is None:
                raise KeyError("no environment of the run has stores")
            value = stores.of(task.env, task.split, call.store).operate(call.operation, call.arguments)
        except (KeyError, ValueError, TypeError) as error:
            raise _CallRefused(CALL_FAILED, f"store {call.store}: {error}") from None
        return Stored(value=value)

    # --- what it came to ---

    def result(self, told: EpisodeResult | Failure, rollout_id: str) -> EpisodeResult:
        """The tree of a rollout's results, of what its worker has told, or why there is none."""
        failure = told if isinstance(told, Failure) else None
        try:
            if isinstance(told, EpisodeResult):
                self._check([step.call for one in told.walk() for step in one.steps])
                return self._tree(told, rollout_id)
        except ValueError as error:
            failure = Failure(reason="env_error", message=str(error))
        return EpisodeResult(id=rollout_id, task=self._group.task, steps=tuple(self._steps.values()), failure=failure)

    def _check(self, calls: Sequence[int]) -> None:
        """Raises ValueError where nothing can be trained on it: steps that are not what was sampled, tokens that belong
        to no step, for which nobody could give credit, or no tokens at all."""
        if len({*calls}) < len(calls) or not {*calls} <= self._steps.keys():
            raise ValueError(
                "steps of the rollout's trajectory are none of the policy's answers, or one of them again; leave the "
                "replies in state.trajectory as ctx.sample put them there"
            )
        if num_others := len(self._steps) - len(calls):
            raise ValueError(
                f"{num_others} answers that the policy gave belong to no step of the rollout, expected all: let no "
                "call be cancelled, and await each"
            )
        if not calls:
            raise ValueError("the episode ended without an answer of the policy")

    def _tree(self, told: EpisodeResult, rollout_id: str) -> EpisodeResult:
        return replace(
            told,
            id=rollout_id,
            task=self._group.task,
            steps=tuple(map(self._with_error, told.steps)),
            rows=self._rows({step.call: index for index, step in enumerate(told.steps)}),
            children=tuple(self._tree(child, f"{rollout_id}.{n}") for n, child in enumerate(told.children)),
        )

    def _with_error(self, told: Step) -> Step:
        known = self._steps[told.call]
        if told.error is None and told.observed is None:
            return known
        return replace(known, error=told.error, observed=told.observed)

    def _rows(self, places: Mapping[int, int]) -> tuple[TrainingRow, ...]:
        """Of the conversations in which these steps are, by call. Raises ValueError where they hold steps of others."""
        rows: list[TrainingRow] = []
        for talk in self._talks.values():
            if not any(call in places for call in talk.calls):
                continue
            if not all(call in places for call in talk.calls):
                raise ValueError(
                    "answers of one conversation are in the trajectories of several rollouts; leave the replies in "
                    "state.trajectory as ctx.sample put them there"
                )
            for row in talk.rows():
                steps = tuple(places[talk.calls[turn.index]] for turn in row.turns)
                rows.append(row if row.steps == steps else replace(row, steps=steps))
        return tuple(rows)


class _CallRefused(Exception):
    """A call comes to nothing, which the rollout's code is told."""

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        super().__init__(message)


def _reply(text: str, completion: Choice) -> Sampled:
    return Sampled(text=text, finish_reason=completion.finish_reason, num_tokens=len(completion.token_ids))

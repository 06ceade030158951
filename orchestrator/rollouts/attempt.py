"""One attempt at one rollout: answers its calls, and keeps what was sampled."""

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
from grpo.orchestrator.background import in_thread
from grpo.orchestrator.inference.client import InferenceClient, ServerError, TimedOut
from grpo.orchestrator.inference.client import Refused as RefusedByServer
from grpo.orchestrator.renderer import ChatRenderer
from grpo.orchestrator.rollouts.conversation import Conversation
from grpo.orchestrator.rollouts.messages import num_characters
from grpo.orchestrator.rollouts.records import EpisodeResult, Failure, Group, SamplingParams, Step, TrainingRow
from grpo.orchestrator.rollouts.roles import Role
from grpo.orchestrator.rollouts.stores import ArtifactStores
from grpo.orchestrator.rollouts.templates import Templates
from grpo.orchestrator.seeds import mixed_seed
from grpo.orchestrator.workers.protocol import (
    AnyCall,
    Ask,
    Delay,
    Refused,
    Reply,
    Sample,
    Sampled,
    Store,
    Stored,
    Withdraw,
)
from grpo.orchestrator.workers.session import GivenUp
from grpo.transport.http import Choice
from msgspec.structs import replace

T = TypeVar("T")
CONTEXT_FULL, CALL_FAILED, SERVER_TIMEOUT = "context_full", "failed", "server_timeout"
MAX_CALLS = 2000
"""Of one rollout. Each is answered in its time, so that an episode without end would never be late."""
MAX_CHARACTERS_ON_LOOP = 1 << 14
"""Longer texts are tokenized in a thread."""
FOR_ALL = (401, 403)
"""What servers refuse with these, they refuse whoever asks."""
MAKE_ROOM = "raise seq_len, the server's max_model_len and that of a teacher"


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The answer to a rollout's first call, which was sampled in advance together with the others of its group."""

    completion: Choice
    row: TrainingRow
    text: str


@dataclass(slots=True)
class _Talk:
    """A conversation, and the calls that its turns answer."""

    rows: Callable[[], list[TrainingRow]]
    calls: list[int] = field(default_factory=list)
    conversation: Conversation | None = None


class Means(Protocol):
    """What answers the calls of all attempts: the engine."""

    client: InferenceClient
    renderer: ChatRenderer
    templates: Templates
    stores: ArtifactStores | None
    context_len: int
    max_characters: int
    num_withdrawn: int


class Attempt:
    """One attempt at one rollout: answers its calls and keeps what was sampled."""

    def __init__(
        self,
        engine: Means,
        group: Group,
        roles: Sequence[Role],
        number: int,
        given: Given | None,
        generating: "dict[tuple[object, ...], asyncio.Task[list[Choice]]]",
        delayed: Callable[[], None],
    ) -> None:
        """`generating`: what servers were asked in this rollout, answered or not. An attempt that asks the same again
        after its worker has ended gets the answer of the one before. `delayed`: called where it begins to wait for a
        reward."""
        self._engine, self._group, self._number, task = engine, group, number, group.task
        self._generating, self._delayed = generating, delayed
        self._roles = {role.id: role for role in roles}
        self._talks: dict[int, _Talk] = {}
        self._steps: dict[int, Step] = {}
        """By call."""
        self._num_calls = 0
        self._has_waited = False
        """For a reward that comes later: servers may have unloaded the group's version meanwhile."""
        self._asked: dict[bytes, int] = {}
        """How often each prompt was sampled from."""
        self._free: dict[bytes, list[int]] = {}
        """Of each prompt, the numbers of answers that were withdrawn: they are given to who asks the same again."""
        self._numbers: dict[int, tuple[bytes, int]] = {}
        """Prompt and number of each call's answer."""
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
            if isinstance(call, Withdraw):
                return self._withdraw(call.call)
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
        completion = await self._generate(prompt, params, group.version, call.call)
        text = conversation.answer(completion, version=group.version, temperature=temperature)
        calls.append(call.call)
        step = self._step(call.role, completion, text, temperature, tuple(call.messages), conversation.tools)
        self._steps[call.call] = step
        reply = reply_of(text, completion)
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
        completion = await self._generate(prompt, params, self._group.version if is_policy else None, call.call)
        return reply_of(self._engine.renderer.texts([completion])[0], completion)

    async def _generate(self, prompt: Sequence[int], params: SamplingParams, version: int | None, call: int) -> Choice:
        """One answer. Its seed follows from what is asked, and how often it was, because calls that are made at once
        come in no certain order."""
        digest = hashlib.blake2b(np.asarray(prompt, np.int32).tobytes(), digest_size=16).digest()
        if free := self._free.get(digest):
            num = free.pop(0)
        else:
            self._asked[digest] = num = self._asked.get(digest, 0) + 1
        self._numbers[call] = digest, num
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

    def _withdraw(self, call: int) -> Reply:
        """Nobody received the answer to a call, which is not trained. Who asks the same again gets it."""
        for talk in self._talks.values() if call in self._steps else ():
            if talk.calls[-1:] == [call] and talk.conversation is not None:
                talk.calls.pop()
                talk.conversation.take_back()
                del self._steps[call]
        if call not in self._steps and (known := self._numbers.pop(call, None)) is not None:
            digest, num = known
            self._free.setdefault(digest, []).append(num)
            self._engine.num_withdrawn += 1
        return Stored(value=None)

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


def reply_of(text: str, completion: Choice) -> Sampled:
    return Sampled(text=text, finish_reason=completion.finish_reason, num_tokens=len(completion.token_ids))

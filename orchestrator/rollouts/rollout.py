"""A rollout while it runs: answers its calls and keeps its tree of conversations and steps."""

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

import numpy as np
from grpo.orchestrator.background import in_thread
from grpo.orchestrator.inference.client import JOINED_TOKENS, PolicyClient, RequestRefused, ServerError, TimedOut
from grpo.orchestrator.renderer import MAX_CHARACTERS_ON_LOOP, MAX_TOKENS_ON_LOOP, ChatRenderer
from grpo.orchestrator.rollouts.conversation import Conversation
from grpo.orchestrator.rollouts.messages import num_characters
from grpo.orchestrator.rollouts.players import BASE, NEWEST, PlayerId
from grpo.orchestrator.rollouts.records import (
    Failure,
    Group,
    SamplingParams,
    Step,
    TrainingRow,
)
from grpo.orchestrator.rollouts.roles import Role
from grpo.orchestrator.rollouts.stores import ArtifactStores
from grpo.orchestrator.rollouts.templates import Templates
from grpo.orchestrator.seeds import mixed_seed
from grpo.orchestrator.workers.protocol import (
    AnyCall,
    Ask,
    CallRefused,
    Delay,
    Draw,
    Reply,
    Sample,
    Sampled,
    ScoreAnswers,
    StoreCall,
    StoreReply,
    Withdraw,
)
from grpo.orchestrator.workers.session import GivenUp
from grpo.transport.http import Choice
from msgspec.structs import replace

T = TypeVar("T")
CONTEXT_FULL, CALL_FAILED, SERVER_TIMEOUT = "context_full", "failed", "server_timeout"
MAX_CALLS = 2000
"""Calls of one rollout. Each call gives it new time, so that no deadline ends an endless episode."""
FOR_ALL = (401, 403)
"""HTTP statuses of refusals that concern the whole run, such as a wrong key."""
MAKE_ROOM = "raise seq_len, the server's max_model_len and that of a teacher"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """The opponent of a game that our servers answer for."""

    id: PlayerId
    version: int | None
    """None for the base model."""
    adapter: str | None = None
    follows: bool = False
    """It is the newest policy where that changes meanwhile."""


class Drawing(Protocol):
    """Draws opponents, and names the policy's own side."""

    def player(self, version: int | None, adapter: str | None) -> PlayerId: ...

    async def draw(self, group: Group, number: int, call: Draw) -> Drawn:
        """Returns the opponent of rollout `number` of a group, once all servers serve it. Raises ValueError for one
        that there is not."""


class EngineParts(Protocol):
    """The parts of the engine that answering calls needs."""

    client: PolicyClient
    renderer: ChatRenderer
    templates: Templates
    stores: ArtifactStores | None
    opponents: Drawing | None
    context_len: int
    max_characters: int
    long_texts: asyncio.Semaphore
    num_withdrawn: int

    async def turn(self) -> None:
        """Waits for a turn of the event loop that few have."""


class Rollout:
    """One rollout, with all that it spawns: answers its calls, and keeps what was sampled."""

    def __init__(
        self,
        engine: EngineParts,
        group: Group,
        number: int,
        roles: Sequence[Role],
        *,
        delayed: Callable[[int], None],
        presampled: tuple[Step, TrainingRow] | None = None,
    ) -> None:
        """`number`: its place in the group. `delayed`: called with it where the rollout begins to wait for a reward.
        `presampled`: its first answer, where that was sampled together with the others of the group."""
        self.number, self._engine, self._group, self._delayed = number, engine, group, delayed
        self._roles, self._presampled = {role.id: role for role in roles}, presampled
        self._generating: dict[tuple[object, ...], asyncio.Task[list[Choice]]] = {}
        """Requests to servers. A rollout that begins again, because its worker has ended, and makes the same requests
        gets the same answers."""
        self.begin()

    def begin(self) -> Self:
        """Begins from the first call, also once more."""
        self.steps: dict[int, dict[int, Step]] = {}
        """Steps by rollout of the tree, 0 for this one, and by call."""
        self.opponent_steps: dict[int, dict[int, Step]] = {}
        """The same of opponents."""
        self._drawn: dict[int, Drawn] = {}
        """Opponents by the call that drew them."""
        self._conversations: dict[tuple[int, int], Conversation] = {}
        """Conversations by rollout of the tree and number."""
        self._num_calls = 0
        self._has_waited = False
        """True after a wait for a delayed reward: servers may have unloaded the group's version meanwhile."""
        self._asked: dict[bytes, int] = {}
        """The number of samples from each prompt."""
        self._free: dict[bytes, list[int]] = {}
        """Numbers of withdrawn answers by prompt. The next call with the same prompt gets one of them."""
        self._numbers: dict[int, tuple[bytes, int]] = {}
        """The prompt and the number of each call's answer."""
        if self._presampled is not None:
            self.steps[0] = {0: self._presampled[0]}
        return self

    def close(self) -> None:
        """Cancels all requests to servers."""
        for request in self._generating.values():
            request.cancel()

    async def __call__(self, call: AnyCall) -> Reply:
        """Returns the reply to a call. Raises GivenUp, and what servers raise."""
        if self._num_calls >= MAX_CALLS:
            message = f"a rollout may call models {MAX_CALLS} times, and this one goes on; let its episode end"
            raise GivenUp(Failure(reason="env_error", message=message))
        self._num_calls += 1
        try:
            if isinstance(call, Withdraw):
                return self._withdraw(call.call)
            if isinstance(call, Delay):
                self._has_waited = True
                self._delayed(self.number)
                return StoreReply(value=None)
            if isinstance(call, Sample):
                return await self._sample(call)
            if isinstance(call, Draw):
                return await self._draw(call)
            if isinstance(call, ScoreAnswers):
                return await self._score_answers(call)
            return await self._ask(call) if isinstance(call, Ask) else self._store(call)
        except TimedOut as error:
            raise GivenUp(Failure(reason=SERVER_TIMEOUT, message=str(error))) from None
        except _CallRefused as refused:
            return CallRefused(reason=refused.reason, message=str(refused))
        except (ServerError, GivenUp):
            raise
        except Exception as error:  # the call is user code's, whoever chokes on it
            message = f"{type(call).__name__} failed: {type(error).__name__}: {str(error)[:1000]}"
            return CallRefused(reason=CALL_FAILED, message=message)

    async def _sample(self, call: Sample) -> Reply:
        group, role = self._group, self._roles.get(call.role)
        opponent = None if call.drawn is None else self._drawn.get(call.drawn)
        steps = (self.steps if call.drawn is None else self.opponent_steps).setdefault(call.rollout, {})
        if role is None or call.call in steps or (opponent is None and call.drawn is not None):
            raise _CallRefused(CALL_FAILED, f"call {call.call} of {call.role} is none that can be answered")
        own = (call.temperature or role.temperature) if group.task.split == "train" else None
        temperature = group.params.temperature if own is None else own
        version: int | None = group.version
        adapter, follow = group.adapters.name(call.role), self._follows
        if opponent is not None:
            version, adapter, follow = opponent.version, opponent.adapter, follow and opponent.follows
            if group.task.split != "train":  # one that answers greedily is another player
                temperature = call.temperature or role.temperature or 1.0

        conversations = self._conversations  # where this rollout begins once more, a thread goes on with the old ones

        def tokenized() -> tuple[Conversation, Sequence[int]]:
            conversation = self._conversation(call, conversations)
            return conversation, conversation.prompt_ids()

        limit = call.max_tokens or role.max_tokens or group.params.max_tokens
        takes_turns = limit is None or limit > JOINED_TOKENS  # shorter ones that are asked for together are one request
        if takes_turns:
            await self._engine.turn()
        known = conversations.get((call.rollout, call.conversation))
        before = 0 if known is None else known.num_characters
        conversation, prompt = await self._tokenized(tokenized, call.messages, call.tools, num_before=before)
        params = replace(
            group.params,
            follow=follow,
            noisy=group.params.noisy and opponent is None,
            temperature=temperature,
            max_tokens=self._max_tokens(prompt, limit),
            adapter=adapter,
        )
        completion = await self._generate(prompt, params, version, call.call)
        if takes_turns:
            await self._engine.turn()
        is_long, recorded = len(completion.token_ids) > MAX_TOKENS_ON_LOOP, version or 0
        texts = await in_thread(conversation.texts_of, completion) if is_long else None
        text = conversation.answer(completion, version=recorded, temperature=temperature, call=call.call, texts=texts)
        steps[call.call] = Step(
            role=call.role,
            temperature=temperature,
            completion=completion,
            text=text,
            version=recorded,
            messages=tuple(call.messages),
            tools=conversation.tools,
            adapter=group.adapters.place(call.role),
        )
        reply = reply_of(text, completion)
        reply.num_prompt_tokens, reply.opening = len(prompt), conversation.opening
        if call.logprobs:
            raw_text, ids = self._engine.renderer.raw_text, completion.token_ids.tolist()
            written = await in_thread(lambda: [raw_text([one]) for one in ids])
            reply.tokens = list(zip(written, completion.logprobs.tolist(), strict=True))
        return reply

    async def _draw(self, call: Draw) -> Reply:
        """Draws an opponent."""
        opponents, version = self._engine.opponents, self._group.version
        try:
            if opponents is not None:
                drawn = await opponents.draw(self._group, self.number, call)
            elif call.pool in (BASE, NEWEST):
                known = None if call.pool == BASE else version
                drawn = Drawn(id=PlayerId(name=call.pool), version=known, adapter=call.adapter)
            else:
                raise ValueError(
                    f"the pool {call.pool!r} is of snapshots of a run, and here are only {BASE} and {NEWEST}"
                )
        except ValueError as error:
            raise _CallRefused(CALL_FAILED, str(error)) from None
        self._drawn[call.call] = drawn
        return StoreReply(value={"name": drawn.id.name, "digest": drawn.id.digest})

    def _conversation(self, call: Sample, known: dict[tuple[int, int], Conversation]) -> Conversation:
        """Returns the conversation of a call, with its new messages."""
        templates, key = self._engine.templates, (call.rollout, call.conversation)
        messages = call.messages if call.raw else self._harmless(call.messages)
        if (conversation := known.get(key)) is None:
            template = templates.raw if call.raw else templates.of(call.tools)
            conversation = known[key] = Conversation(template, messages)
        elif messages:
            conversation.add(*messages)
        return conversation

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
        """True if servers answer under the newest version, which each token then has on record. An evaluation's own
        version stays."""
        return self._group.params.follow or (self._has_waited and self._group.task.split == "train")

    async def _tokenized(self, make: Callable[[], T], *texts: object, num_before: int = 0) -> T:
        """Returns the result of `make`, which runs in a thread if user code's texts are long, or the conversation is,
        which has `num_before` characters."""
        engine = self._engine
        if (num := num_characters(texts)) > engine.max_characters:
            raise _CallRefused(
                CONTEXT_FULL,
                f"messages of {num} characters; no {engine.context_len} tokens have so many, which is what the context "
                f"holds; {MAKE_ROOM}, or let the environment say less",
            )
        try:
            if num > MAX_CHARACTERS_ON_LOOP:
                async with engine.long_texts:
                    return await in_thread(make)
            return await in_thread(make) if num + num_before > MAX_CHARACTERS_ON_LOOP else make()
        except ValueError as error:  # TemplateRefused among them
            raise _CallRefused(CALL_FAILED, str(error)) from None

    async def _ask(self, call: Ask) -> Reply:
        """Samples an answer that is not trained, from the base model, or from the first adapter of the rollout's own
        version."""
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

    async def _score_answers(self, call: ScoreAnswers) -> Reply:
        """Returns the log-probabilities of answers, of the rollout's own version."""
        group, role, template = self._group, self._roles.get(call.role), self._engine.templates.of(None)
        if role is None:
            raise _CallRefused(CALL_FAILED, f"there is no role {call.role}")
        limit, end = role.max_tokens or group.params.max_tokens, template.end_id

        def tokenized() -> tuple[list[list[int]], list[list[list[int]]]]:
            prompts, answers = list[list[int]](), list[list[list[int]]]()
            for messages, own in zip(call.prompts, call.answers, strict=True):
                text = template.render(self._harmless(messages))
                prompts.append(template.renderer.ids_of(text))
                ids = [template.renderer.ids_behind(text, answer) for answer in own]
                ended = [one if end is None or len(one) == limit else [*one, end] for one in ids]
                answers.append(ended)
            return prompts, answers

        try:
            prompts, answers = await in_thread(tokenized)
        except ValueError as error:  # TemplateRefused among them
            raise _CallRefused(CALL_FAILED, str(error)) from None
        longest = max((len(ids) + max(map(len, own)) for ids, own in zip(prompts, answers, strict=True)), default=0)
        if longest >= self._engine.context_len:
            message = f"a prompt with its answer of {longest} tokens does not fit into {self._engine.context_len}"
            raise _CallRefused(CONTEXT_FULL, f"{message}; {MAKE_ROOM}, or let the environment say less")
        try:
            found = await self._engine.client.score_answers(
                prompts,
                answers,
                group.version,
                temperature=role.temperature or 1.0,
                adapter=group.adapters.name(call.role),
            )
        except RequestRefused as error:
            if error.status in FOR_ALL:
                raise
            raise _CallRefused(CALL_FAILED, str(error)) from None
        return StoreReply(value=found)

    async def _generate(self, prompt: Sequence[int], params: SamplingParams, version: int | None, call: int) -> Choice:
        """Returns one answer. Its seed follows from the prompt and the number of samples from it, because calls at the
        same time come in no certain order."""
        digest = hashlib.blake2b(np.asarray(prompt, np.int32).tobytes(), digest_size=16).digest()
        if free := self._free.get(digest):
            num = free.pop(0)
        else:
            self._asked[digest] = num = self._asked.get(digest, 0) + 1
        self._numbers[call] = digest, num
        key = digest, num, params, version
        if key not in self._generating:
            base = self._group.seed
            seed = None if base is None else mixed_seed(mixed_seed(base, self.number), digest.hex(), num)
            request = self._engine.client.generate(prompt, params=params, num=1, version=version, seed=seed)
            self._generating[key] = asyncio.create_task(request)
        try:
            [completion] = await asyncio.shield(self._generating[key])
        except RequestRefused as error:
            if error.status in FOR_ALL:
                raise
            raise _CallRefused(CALL_FAILED, str(error)) from None
        return completion

    def _withdraw(self, call: int) -> Reply:
        """Takes the answer to a call back, because nobody received it: it is not trained."""
        for (rollout, _), conversation in self._conversations.items():
            if conversation.calls[-1:] == [call]:
                conversation.take_back()
                for steps in (self.steps, self.opponent_steps):
                    steps.get(rollout, {}).pop(call, None)
        all_steps = (*self.steps.values(), *self.opponent_steps.values())
        is_kept = any(call in steps for steps in all_steps)
        if not is_kept and (known := self._numbers.pop(call, None)) is not None:
            digest, num = known
            self._free.setdefault(digest, []).append(num)
            self._engine.num_withdrawn += 1
        return StoreReply(value=None)

    def _store(self, call: StoreCall) -> Reply:
        task, stores = self._group.task, self._engine.stores
        try:
            if stores is None:
                raise KeyError("no environment of the run has stores")
            value = stores.of(task.env, task.split, call.store).operate(call.operation, call.arguments)
        except (KeyError, ValueError, TypeError) as error:
            raise _CallRefused(CALL_FAILED, f"store {call.store}: {error}") from None
        return StoreReply(value=value)

    def rows(self, *, of_opponents: bool = False) -> dict[int, list[TrainingRow]]:
        """Returns what was sampled, for training, by rollout of the tree; or what opponents answered."""
        all_steps = self.opponent_steps if of_opponents else self.steps
        rows = {} if self._presampled is None or of_opponents else {0: [self._presampled[1]]}
        for (rollout, _), conversation in self._conversations.items():
            steps = all_steps.get(rollout, {})
            if not any(call in steps for call in conversation.calls):  # one is of one role, and so of one player
                continue
            made = conversation.rows({call: place for place, call in enumerate(steps)})
            rows.setdefault(rollout, []).extend(made)
            for row in made:
                for turn in row.turns:
                    call = conversation.calls[turn.index]
                    steps[call] = steps[call].within(row, turn)
        return rows


class _CallRefused(Exception):
    """A call fails. The rollout's code gets the error."""

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        super().__init__(message)


def reply_of(text: str, completion: Choice) -> Sampled:
    return Sampled(text=text, finish_reason=completion.finish_reason, num_tokens=len(completion.token_ids))

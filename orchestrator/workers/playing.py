"""Rolls out episodes in an environment's process: all of them on one event loop, each as a task of its own."""

import asyncio
import contextlib
import copy
import gc
import itertools
import os
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from orchestrator.envs.base import Environment, episode_of
from orchestrator.episodes.arena import Answer, Arena, CallFailed, ContextFull, Stage
from orchestrator.episodes.messages import Message, messages_of
from orchestrator.episodes.rubric import RewardNotFinite
from orchestrator.episodes.state import EpisodeState, Outcome, ProcessSpent, Reply
from orchestrator.workers.child_marker import Marker
from orchestrator.workers.child_stream import Inbox, Outbox
from orchestrator.workers.wire import (
    BEAT_S,
    HEADER,
    Asked,
    Begin,
    Called,
    Cancel,
    Ended,
    Failed,
    MarkedError,
    Played,
    PlayedStep,
    Raised,
    Refused,
    Request,
    Sampled,
    StoreAnswer,
    Stored,
    frame,
)
from orchestrator.workers.wire import Answer as WireAnswer

SPENT_EXIT = 70
FLUSH_S = 5.0
MAX_MESSAGE_CHARACTERS = 20_000
RESERVE_BYTES = 4 << 20
"""Given up when memory has run out, to say so."""


class Player:
    """The rollouts of one environment that are running.

    Consumes Begin and Cancel, and Sampled, Refused and StoreAnswer, for which the rollouts wait. A rollout ends with
    one Ended or Failed.
    """

    def __init__(
        self, environment: Environment, outbox: Outbox, marker: Marker, loop: asyncio.AbstractEventLoop
    ) -> None:
        episode = episode_of(environment)
        assert episode is not None
        self._environment, self._episode = environment, episode
        self._outbox, self._marker, self._loop = outbox, marker, loop
        self._splits: dict[str, Sequence[Mapping[str, Any]]] = {}
        self._running: dict[int, tuple[asyncio.Task[None], SocketBackend]] = {}
        self._calls = itertools.count()
        self._answers: dict[int, asyncio.Future[Sampled | StoreAnswer]] = {}
        """What calls wait for, by their number."""
        self._reserve: bytearray | None = bytearray(RESERVE_BYTES)

    def take(self, request: Request) -> None:
        """What the orchestrator sends."""
        match request:
            case Sampled() | StoreAnswer():
                if (waiting := self._answers.pop(request.call, None)) is not None and not waiting.done():
                    waiting.set_result(request)
            case Refused():
                if (waiting := self._answers.pop(request.call, None)) is not None and not waiting.done():
                    error = ContextFull if request.reason == "context_full" else CallFailed
                    waiting.set_exception(error(request.message))
            case Begin():
                backend = SocketBackend(request.rollout, self)
                task = self._marker.start(self._loop, request.rollout, self._roll_out(request, backend))
                self._running[request.rollout] = task, backend
                task.add_done_callback(lambda task: self._ended(request.rollout))
            case Cancel():
                if (running := self._running.get(request.rollout)) is not None:
                    running[1].over = "cancelled"
                    running[0].cancel()
            case _:
                message = f"a process that rolls out episodes was sent a {type(request).__name__}"
                self._outbox.send(frame(Raised(reason="env_error", message=message)))

    async def answer(self, call: int, message: Called | Asked | Stored) -> Any:
        """What the orchestrator answers to a call. Raises ContextFull and CallFailed."""
        waiting = self._answers[call] = self._loop.create_future()
        try:
            self._outbox.send(_checked(message))
            await self._outbox.drain()
            return await waiting
        finally:
            self._answers.pop(call, None)

    def next_call(self) -> int:
        """A number for a call."""
        return next(self._calls)

    # --- one rollout ---

    async def _roll_out(self, begin: Begin, backend: "SocketBackend") -> None:
        """Whatever user code raises becomes an answer, too."""
        answer: WireAnswer
        try:
            outcome = await self._play(begin, backend)
            answer = Ended(rollout=begin.rollout, played=_played(outcome))
            if backend.over == "cancelled":  # user code went on all the same
                answer = Failed(rollout=begin.rollout, reason="cancelled", message="")
            data = _checked(answer)
        except BaseException as error:  # user code may raise even SystemExit; the orchestrator decides what that means
            data = frame(self._failed(begin.rollout, backend, error))
        backend.over = backend.over or "over"
        del self._running[begin.rollout]
        self._outbox.send(data)

    def _ended(self, rollout: int) -> None:
        """A task that is cancelled before it begins says nothing itself."""
        if self._running.pop(rollout, None) is not None:
            self._outbox.send(frame(Failed(rollout=rollout, reason="cancelled", message="")))

    async def _play(self, begin: Begin, backend: "SocketBackend") -> Outcome:
        example = self._example(begin)
        stage = Stage(
            backend=backend,
            split=begin.split,
            episodes=self._environment.episodes,
            stores=tuple(self._environment.stores),
            score=begin.score,
        )
        state = EpisodeState(example=example)
        return await self._episode.play(Arena(stage, state=state, roles=self._episode.roles, seed=begin.seed))

    def _example(self, begin: Begin) -> Mapping[str, Any]:
        """Raises ValueError where it is another one than the orchestrator knows."""
        if (examples := self._splits.get(begin.split)) is None:
            examples = self._splits[begin.split] = self._environment.dataset(begin.split)
        if begin.index >= len(examples):
            raise ValueError(
                f"dataset({begin.split!r}) has {len(examples)} examples now and had more before; it must be the same "
                "at every call: seed what it draws at random"
            )
        if (prompt := messages_of(examples[begin.index], begin.index)) != begin.prompt:
            raise ValueError(
                f"example {begin.index} of dataset({begin.split!r}) has the prompt {prompt!r}, and had "
                f"{begin.prompt!r} before; it must be the same at every call: seed what it draws at random"
            )
        return copy.deepcopy(examples[begin.index])

    def _failed(self, rollout: int, backend: "SocketBackend", error: BaseException) -> Failed:
        if isinstance(error, MemoryError):
            self._end_the_process(rollout, "env_memory", error)
        if isinstance(error, ProcessSpent):
            self._end_the_process(rollout, "env_error", error)
        if isinstance(error, asyncio.CancelledError) and backend.over == "cancelled":
            return Failed(rollout=rollout, reason="cancelled", message="")
        if isinstance(error, RewardNotFinite):
            return Failed(rollout=rollout, reason="reward_not_finite", message=shortened(str(error)))
        if isinstance(error, ContextFull):
            return Failed(rollout=rollout, reason="context_full", message=shortened(str(error)))
        message = shortened("".join(traceback.format_exception(error)))
        return Failed(rollout=rollout, reason="env_error", message=message)

    def _end_the_process(self, rollout: int, reason: str, error: Exception) -> None:
        """What user code keeps cannot be given back, so that the other rollouts would fail as well."""
        self._reserve = None
        traceback.clear_frames(error.__traceback__)
        gc.collect()
        message = shortened("".join(traceback.format_exception(error)))
        self._outbox.send(frame(Failed(rollout=rollout, reason=reason, message=message)))
        with contextlib.suppress(OSError):
            self._outbox.flush(FLUSH_S)
        os._exit(SPENT_EXIT)


class SocketBackend:
    """A rollout's calls, as frames."""

    def __init__(self, rollout: int, player: Player) -> None:
        self._rollout, self._player = rollout, player
        self.over = ""
        """`cancelled`, or `over`, once nobody may call any more."""

    async def call(
        self,
        *,
        role: str,
        conversation: int,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        max_tokens: int | None,
    ) -> Answer:
        called = Called(
            rollout=self._rollout,
            call=self._number(),
            role=role,
            conversation=conversation,
            messages=[dict(message) for message in messages],
            tools=None if tools is None else [dict(tool) for tool in tools],
            max_tokens=max_tokens,
        )
        sampled = await self._player.answer(called.call, called)
        return Answer(
            call=called.call, text=sampled.text, finish_reason=sampled.finish_reason, num_tokens=sampled.num_tokens
        )

    async def ask(self, *, model: str, messages: Sequence[Message], temperature: float, max_tokens: int | None) -> str:
        asked = Asked(
            rollout=self._rollout,
            call=self._number(),
            model=model,
            messages=[dict(message) for message in messages],
            temperature=temperature,
            max_tokens=max_tokens,
        )
        text: str = (await self._player.answer(asked.call, asked)).text
        return text

    async def stored(self, *, store: str, operation: str, arguments: Mapping[str, Any]) -> Any:
        stored = Stored(
            rollout=self._rollout,
            call=self._number(),
            store=store,
            operation=operation,
            arguments=dict(arguments),
        )
        return (await self._player.answer(stored.call, stored)).result

    def _number(self) -> int:
        if self.over == "cancelled":
            raise asyncio.CancelledError("the rollout has been cancelled")
        if self.over:
            raise CallFailed("the rollout is over, and something that it started goes on; await all tasks in it")
        return self._player.next_call()


def serve_episodes(
    environment: Environment, inbox: Inbox, outbox: Outbox, marker: Marker, loop: asyncio.AbstractEventLoop
) -> None:
    """Rolls out what the inbox asks for, until the process ends."""
    loop.set_task_factory(marker.make_task)
    player = Player(environment, outbox, marker, loop)
    inbox.deliver_to(lambda request: _hand_over(loop, player, request))
    threading.Thread(target=_tell_what_runs, args=(outbox, marker), daemon=True).start()
    loop.run_forever()


def _tell_what_runs(outbox: Outbox, marker: Marker) -> None:
    """In a thread of its own, which goes on while user code keeps the loop from it."""
    while True:
        time.sleep(BEAT_S)
        outbox.send_between(frame(marker.beat()))


def shortened(message: str) -> str:
    """A message with its beginning and its end; a traceback may repeat an endless text."""
    if len(message) <= MAX_MESSAGE_CHARACTERS:
        return message.encode(errors="replace").decode()
    half = MAX_MESSAGE_CHARACTERS // 2
    left_out = len(message) - 2 * half
    return f"{message[:half]}\n[{left_out} characters left out]\n{message[-half:]}".encode(errors="replace").decode()


def _hand_over(loop: asyncio.AbstractEventLoop, player: Player, request: Request) -> None:
    loop.call_soon_threadsafe(player.take, request)


_decoder: msgspec.msgpack.Decoder[WireAnswer] = msgspec.msgpack.Decoder(WireAnswer)


def _checked(message: WireAnswer) -> bytes:
    """A frame that the orchestrator can read. Raises ValueError where user code put in something of another type than
    is expected there."""
    data = frame(message)
    try:
        _decoder.decode(data[HEADER.size :])
    except msgspec.ValidationError as error:
        raise ValueError(f"a {type(message).__name__} of this rollout holds a value of a wrong type: {error}") from None
    return data


def _played(outcome: Outcome) -> Played:
    return Played(
        steps=[_played_step(reply) for reply in outcome.state.trajectory],
        rewards=outcome.rewards,
        accuracy=outcome.accuracy,
        metrics=outcome.metrics,
        extras=outcome.extras,
        truncated=outcome.state.truncated,
        children=[_played(child) for child in outcome.children],
    )


def _played_step(reply: Reply) -> PlayedStep:
    observed = None if reply.observed is None else [dict(message) for message in reply.observed]
    if reply.error is None:
        return PlayedStep(call=reply.call, observed=observed)
    return PlayedStep(
        call=reply.call,
        error=MarkedError(
            error_kind=reply.error.error_kind,
            hint_template_key=reply.error.hint_template_key,
            message=reply.error.message,
        ),
        observed=observed,
    )

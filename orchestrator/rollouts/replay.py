"""Episodes with answers that were written beforehand: no process, no server. For tests, and for teachers, who are
shown what the policy saw."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from orchestrator.envs.base import Environment, episode_of
from orchestrator.rollouts.context import CallFailed, RolloutContext, Shared
from orchestrator.rollouts.messages import Message
from orchestrator.rollouts.state import EpisodeState
from orchestrator.rollouts.stores import ArtifactStore
from orchestrator.workers import protocol

Answers = Sequence[str] | Callable[[str, list[dict[str, Any]]], str]
"""Texts in the order in which answers are asked for, those of sub-episodes included, which play one after the other; or
a function of the role and all messages of the conversation, which may raise what `ctx.sample` raises."""


class _Exhausted(BaseException):
    """No answer is left; no episode catches it."""

    def __init__(self, role: str, num: int, messages: list[dict[str, Any]]) -> None:
        super().__init__(role, num)
        self.role, self.num, self.messages = role, num, messages


async def play(
    environment: Environment,
    example: Mapping[str, Any],
    answers: Answers,
    *,
    split: str = "train",
    seed: int | None = 0,
    asked: Answers | None = None,
) -> EpisodeState:
    """Rolls out and scores an example with the policy's `answers`, and those to `ctx.ask` in `asked`, where the
    function gets `base` or `policy` for the role. Artifact stores are empty at first.

    Raises what the environment raises, and ValueError where an answer more is asked for than there are.

    Example: ``state = asyncio.run(play(Guess(), {"prompt": "...", "number": 7}, ["5", "7"]))``
    """
    backend = ScriptedBackend(environment.stores, answers, asked)
    try:
        return await _play(environment, example, backend, split, seed)
    except _Exhausted as error:
        raise ValueError(
            f"{error.role} is asked for answer {error.num + 1}, and {error.num} were given; it is to answer "
            f"{error.messages[-1]!r}"
        ) from None


async def replay(
    environment: Environment,
    example: Mapping[str, Any],
    answers: Sequence[str],
    *,
    split: str = "train",
    seed: int | None = 0,
) -> tuple[Message, ...]:
    """The messages that the policy sees after these answers, or the whole conversation where the rollout ends with
    them. The same as the policy saw only if the environment does the same again with the same `seed`.

    Raises what the environment raises.
    """
    backend = ScriptedBackend(environment.stores, answers, None)
    try:
        state = await _play(environment, example, backend, split, seed)
    except _Exhausted as error:
        return tuple(error.messages)
    if state.messages:
        return tuple(state.messages)
    return (*state.last.messages, state.last.message) if state.last else ()


class ScriptedBackend:
    """Answers what was written beforehand."""

    def __init__(self, stores: Mapping[str, int], answers: Answers, asked: Answers | None) -> None:
        self._answers, self._asked = _Script(answers), _Script(asked if asked is not None else ())
        self._conversations: dict[int, list[dict[str, Any]]] = {}
        self._calls: Iterator[int] = itertools.count()
        self._stores = {name: ArtifactStore(name, max_size=max_size) for name, max_size in stores.items()}

    async def __call__(self, call: protocol.Call) -> Any:
        call.call = next(self._calls)
        if isinstance(call, protocol.Store):
            try:
                value = self._stores[call.store].operate(call.operation, call.arguments)
            except (KeyError, ValueError) as error:
                raise CallFailed(str(error.args[0])) from None
            return protocol.Stored(rollout=-1, call=call.call, value=value)
        if isinstance(call, protocol.Ask):
            return self._sampled(call, self._asked.next(call.model, call.messages))
        known = self._conversations.setdefault(call.conversation, [])
        known += call.messages
        text = self._answers.next(call.role, list(known))
        known.append({"role": "assistant", "content": text})
        return self._sampled(call, text)

    @staticmethod
    def _sampled(call: protocol.Sample | protocol.Ask, text: str) -> protocol.Sampled:
        """Each letter is a token."""
        sampled = protocol.Sampled(-1, call.call, text=text, finish_reason="stop", num_tokens=len(text))
        if isinstance(call, protocol.Sample) and call.logprobs:
            sampled.tokens = [(letter, 0.0) for letter in text]
        return sampled


class _Script:
    def __init__(self, answers: Answers) -> None:
        self._answers, self._num = answers, 0

    def next(self, role: str, messages: list[dict[str, Any]]) -> str:
        if callable(self._answers):
            return self._answers(role, messages)
        if self._num == len(self._answers):
            raise _Exhausted(role, self._num, messages)
        self._num += 1
        return self._answers[self._num - 1]


async def _play(
    environment: Environment, example: Mapping[str, Any], backend: ScriptedBackend, split: str, seed: int | None
) -> EpisodeState:
    episode = episode_of(environment)
    shared = Shared(backend=backend, split=split, episodes=environment.episodes, stores=tuple(environment.stores))
    state = EpisodeState(example=example)
    return await episode.run(RolloutContext(shared, state=state, roles=episode.roles, seed=seed))

"""Episodes with answers that were written beforehand: no process, no server. For tests and for trying things out."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo.orchestrator.rollouts.context import CallFailed
from grpo.orchestrator.rollouts.environment import Environment, episode_of
from grpo.orchestrator.rollouts.episode import run_episode
from grpo.orchestrator.rollouts.state import EpisodeState
from grpo.orchestrator.rollouts.stores import ArtifactStore
from grpo.orchestrator.workers import protocol

Answers = Sequence[str] | Callable[[str, list[dict[str, Any]]], str]
"""Texts in the order in which answers are asked for, those of sub-episodes included, which play one after the other; or
a function of the role and all messages of the conversation, which may raise what `ctx.sample` raises."""


async def play(
    environment: Environment,
    example: Mapping[str, Any],
    answers: Answers,
    *,
    split: str = "train",
    seed: int | None = 0,
    asked: Answers = (),
) -> EpisodeState:
    """Rolls out and scores an example with the policy's `answers`, and those to `ctx.ask` in `asked`, where the
    function gets `base` or `policy` for the role. Opponents that are drawn answer from `answers` too.
    Artifact stores are empty at first.

    Raises what the environment raises, and ValueError where an answer more is asked for than there are.

    Example: ``state = asyncio.run(play(Guess(), {"prompt": "...", "number": 7}, ["5", "7"]))``
    """
    return await run_episode(
        episode_of(environment),
        ScriptedBackend(environment.stores, answers, asked),
        example=example,
        split=split,
        seed=seed,
        episodes=environment.episodes,
        stores=environment.stores,
        pools=environment.pools,
    )


class ScriptedBackend:
    """Answers what was written beforehand."""

    def __init__(self, stores: Mapping[str, int], answers: Answers, asked: Answers = ()) -> None:
        self._answers, self._asked = _script(answers), _script(asked)
        self._conversations: dict[int, list[dict[str, Any]]] = {}
        self._stores = {name: ArtifactStore(name, max_size=max_size) for name, max_size in stores.items()}

    async def __call__(self, call: protocol.AnyCall) -> Any:
        if isinstance(call, protocol.Delay | protocol.Withdraw):
            return protocol.StoreReply(value=None)
        if isinstance(call, protocol.StoreCall):
            try:
                value = self._stores[call.store].operate(call.operation, call.arguments)
            except (KeyError, ValueError) as error:
                raise CallFailed(str(error.args[0])) from None
            return protocol.StoreReply(value=value)
        if isinstance(call, protocol.Draw):
            return protocol.StoreReply(value={"name": call.pool, "digest": ""})
        if isinstance(call, protocol.Ask):
            return await self.answer(call, call.messages)
        if isinstance(call, protocol.ScoreAnswers):
            raise CallFailed("answers that were written beforehand have no probabilities; ask a server")
        known = self._conversations.setdefault(call.conversation, [])
        known += call.messages
        answer = await self.answer(call, list(known))
        known.append({"role": "assistant", "content": answer.text})
        return answer

    async def answer(self, call: protocol.Sample | protocol.Ask, messages: list[dict[str, Any]]) -> protocol.Sampled:
        """The answer to all messages of a conversation; a letter stands for a token."""
        if isinstance(call, protocol.Ask):
            text, logprobs = self._asked(call.model, messages), False
        else:
            text, logprobs = self._answers(call.role, messages), call.logprobs
        tokens = [(letter, 0.0) for letter in text] if logprobs else []
        return protocol.Sampled(text=text, finish_reason="stop", num_tokens=len(text), tokens=tokens)


def _script(answers: Answers) -> Callable[[str, list[dict[str, Any]]], str]:
    """Answers as a function."""
    if callable(answers):
        return answers
    left, num = iter(answers), len(answers)

    def following(role: str, messages: list[dict[str, Any]]) -> str:
        if (text := next(left, None)) is None:
            raise ValueError(
                f"{role} is asked for answer {num + 1}, and {num} were given; it is to answer {messages[-1]!r}"
            )
        return text

    return following

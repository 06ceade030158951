"""A backend that tests see into, and rollout contexts on it."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from grpo.orchestrator.rollouts.context import RolloutContext
from grpo.orchestrator.rollouts.environment import Environment
from grpo.orchestrator.rollouts.episode import Episode
from grpo.orchestrator.rollouts.play import play
from grpo.orchestrator.rollouts.roles import Role
from grpo.orchestrator.rollouts.rubric import Rubric
from grpo.orchestrator.rollouts.state import EpisodeState
from grpo.orchestrator.workers import protocol


class OpenBackend:
    """Gives these answers in turn, or `a0`, `a1`, ...; while it is closed, calls wait."""

    def __init__(self, *answers: str) -> None:
        self._answers = answers
        self.calls: list[protocol.Sample] = []
        self.open = asyncio.Event()
        self.open.set()
        self.error: Exception | None = None
        """Raised by the next call."""

    async def __call__(self, call: protocol.AnyCall) -> Any:
        if isinstance(call, protocol.Ask):
            return protocol.Sampled(text="asked", finish_reason="stop", num_tokens=1)
        assert isinstance(call, protocol.Sample)
        number = len(self.calls)
        self.calls.append(call)
        await self.open.wait()
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        text = self._answers[number] if self._answers else f"a{number}"
        return protocol.Sampled(call=number, text=text, finish_reason="stop", num_tokens=2)


def context_on(
    backend: Any,
    *roles: Role,
    example: Mapping[str, Any] | None = None,
    episodes: Mapping[str, Episode] | None = None,
) -> RolloutContext:
    """With the role `policy`, where no other is given."""
    return RolloutContext(
        backend,
        state=EpisodeState(example=example or {"prompt": "hi"}),
        roles=roles or (Role(id="policy"),),
        seed=0,
        episodes=episodes or {},
    )


def user(content: str) -> dict[str, Any]:
    """A message of the user's."""
    return {"role": "user", "content": content}


def assistant(content: str, **more: Any) -> dict[str, Any]:
    """A message of the assistant's."""
    return {"role": "assistant", "content": content, **more}


async def score_of(rubric: Rubric, completion: str, example: Mapping[str, Any]) -> EpisodeState:
    """What a rubric says of a single answer."""

    class Single(Environment):
        def dataset(self, split: str) -> Sequence[Mapping[str, Any]]:
            return []

    environment = Single()
    environment.rubric = rubric
    return await play(environment, {"prompt": "", **example}, [completion])

"""A backend that tests see into, and rollout contexts on it."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.envs.base import Environment
from orchestrator.rollouts.context import Answer, RolloutContext, Runnable, Shared
from orchestrator.rollouts.messages import Message
from orchestrator.rollouts.replay import play
from orchestrator.rollouts.roles import Role
from orchestrator.rollouts.rubric import Rubric
from orchestrator.rollouts.state import EpisodeState


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a backend was asked for."""

    role: str
    conversation: int
    messages: list[Message]
    tools: Sequence[Mapping[str, Any]] | None
    max_tokens: int | None


class OpenBackend:
    """Answers in turn `a0`, `a1`, ...; while it is closed, calls wait."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.asked: list[Mapping[str, Any]] = []
        self.open = asyncio.Event()
        self.open.set()
        self.text: str | None = None
        """Instead of those."""
        self.error: Exception | None = None
        """Raised by the next call."""

    async def sample(
        self,
        *,
        role: str,
        conversation: int,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        max_tokens: int | None,
    ) -> Answer:
        number = len(self.calls)
        self.calls.append(
            Call(
                role=role,
                conversation=conversation,
                messages=list(messages),
                tools=tools,
                max_tokens=max_tokens,
            )
        )
        await self.open.wait()
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return Answer(call=number, text=self.text or f"a{number}", finish_reason="stop", num_tokens=2)

    async def ask(self, **asked: Any) -> str:
        self.asked.append(asked)
        return "asked"

    async def store(self, **stored: Any) -> Any:
        self.asked.append(stored)
        return {"size": 3, "add": "id", "sample": [["id", {"q": 1}]]}.get(stored["operation"])


def context_on(
    backend: Any,
    *roles: Role,
    example: Mapping[str, Any] | None = None,
    episodes: Mapping[str, Runnable] | None = None,
    seed: int | None = 0,
    stores: Sequence[str] = (),
) -> RolloutContext:
    """With the role `policy`, where no other is given."""
    return RolloutContext(
        Shared(backend=backend, split="train", episodes=episodes or {}, stores=stores),
        state=EpisodeState(example=example or {"prompt": "hi"}),
        roles=roles or (Role(id="policy"),),
        seed=seed,
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

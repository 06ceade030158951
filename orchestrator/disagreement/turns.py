"""The policy's turns in a rollout: the state, what it saw of it as tokens, and what it did."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.disagreement.actions import Action
from orchestrator.episodes.records import EpisodeResult
from orchestrator.episodes.state import StepError

Messages = tuple[Mapping[str, Any], ...]
Tools = Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceTurn:
    """A turn of the policy, and the state in which it acted."""

    step: int
    """Its place among the rollout's steps."""
    messages: Messages
    """The state in which it acted, as its environment tells all of it, or else the conversation until then, the
    policy's own answers included."""
    tools: Tools
    """What could be called, in the OpenAI format; None: nothing that anybody was told of."""
    prompt_ids: Sequence[int]
    """[Lp] the same as tokens, as the server was given and sampled them."""
    sampled_ids: Sequence[int]
    """[Lr] what the policy sampled, its end-of-turn token included where it was sampled."""
    action: Action
    versions: tuple[tuple[int, int], ...]
    """Runs of (policy version, number of tokens) that sampled it."""
    error: StepError | None
    """That the environment saw in it."""
    adapter: int = 0
    """The one that acted, by its place among the run's."""


def turns_of(rollout: EpisodeResult) -> list[TraceTurn]:
    """All turns in which the policy acted, in the order of its conversations."""
    return list(_of_conversations(rollout))


def _of_conversations(rollout: EpisodeResult) -> Iterator[TraceTurn]:
    messages: list[Mapping[str, Any]] = []
    for row in rollout.rows:
        for turn, place in zip(row.turns, row.steps, strict=True):
            step = rollout.steps[place]
            if turn.index == 0:
                messages = []
            messages += step.messages
            yield TraceTurn(
                step=place,
                messages=tuple(messages if step.observed is None else step.observed),
                tools=step.tools,
                prompt_ids=row.token_ids[: turn.begins].tolist(),
                sampled_ids=row.token_ids[turn.begins : turn.ends].tolist(),
                action=Action(text=step.text),
                versions=step.versions,
                error=step.error,
                adapter=step.adapter,
            )
            messages.append({"role": "assistant", "content": step.text})

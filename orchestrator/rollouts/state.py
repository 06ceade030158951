"""A rollout as user code sees it, while it runs and once it is over: text, no tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from grpo.orchestrator.rollouts.messages import Message
from grpo.orchestrator.rollouts.players import PlayerId


class StepError(msgspec.Struct, frozen=True, kw_only=True):
    """An error that the environment saw in a step: a tool call that failed, for example.

    Example: ``StepError(error_kind="unknown_tool", hint_template_key="tools", message="there is no tool lookup")``
    """

    error_kind: str
    hint_template_key: str
    """Which hint would have helped."""
    message: str = ""
    """The environment's own words about it."""


@dataclass(slots=True, kw_only=True)
class Reply:
    """One answer, of the policy or of the player that a role was bound to."""

    role: str
    """The role that answered."""
    messages: tuple[Message, ...]
    """All messages before it."""
    text: str
    """Without control tokens."""
    finish_reason: str
    """`stop`, or `length` where it was cut short."""
    num_tokens: int
    index: int
    """Its place in the rollout's trajectory."""
    num_prompt_tokens: int = 0
    opening: str = ""
    """The text by which the model's chat template opens the policy's turn, before the answer: it may begin the policy's
    thinking, or end it."""
    tokens: tuple[tuple[str, float], ...] = ()
    """Each of its tokens as text with its log-probability; only where they were asked for."""
    call: int = -1
    """Its number among all calls of the rollout and of those that it spawned."""
    observed: tuple[Message, ...] | None = None
    """The result of `ChatEpisode.observe` before it answered."""
    error: StepError | None = None
    """Set by `EpisodeState.mark_error`."""
    player: PlayerId | None = None
    """Who answered, untrained; None for the policy itself."""

    @property
    def message(self) -> dict[str, str]:
        """The answer as a chat message."""
        return {"role": "assistant", "content": self.text}


@dataclass(slots=True, kw_only=True)
class EpisodeState:
    """A rollout. An episode object serves many rollouts at a time: what belongs to one of them goes here, into `data`,
    never into `self`. Once the rollout is over, it says what it came to."""

    example: Mapping[str, Any]
    """One of the environment's dataset, or one that was spawned."""
    number: int = 0
    """0, or which of the sub-episodes it is, as they were spawned anywhere below one rollout."""
    messages: list[Message] = field(default_factory=list)
    """The conversation so far, where the episode keeps one."""
    trajectory: list[Reply] = field(default_factory=list)
    """All answers of the rollout's roles, opponents' included; its children's are theirs."""
    players: dict[str, PlayerId] = field(default_factory=dict)
    """Opponents by the role that they are bound to."""
    role: str = ""
    """The role that acts now, or acted last."""
    data: dict[str, Any] = field(default_factory=dict)
    """The episode's own."""
    done: bool = False
    truncated: bool = False
    """Ended because the context was full."""
    children: list["EpisodeState"] = field(default_factory=list)
    """Rollouts of `RolloutContext.spawn`, which are over and scored."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Rewards by role, once it is scored."""
    accuracy: float = 0.0
    """The measure that evaluation reports, once it is scored."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The rubric's metrics, once it is scored."""
    extras: dict[str, Any] = field(default_factory=dict)
    """The result of `Episode.extras`, once it is scored."""

    @property
    def turn(self) -> int:
        """Number of answers so far."""
        return len(self.trajectory)

    @property
    def last(self) -> Reply | None:
        """The newest answer."""
        return self.trajectory[-1] if self.trajectory else None

    @property
    def last_text(self) -> str:
        """The newest answer's text; empty where there is none."""
        return self.trajectory[-1].text if self.trajectory else ""

    @property
    def roles(self) -> tuple[str, ...]:
        """The policy's roles that acted, in the order in which they did first; no opponents."""
        return tuple(dict.fromkeys(reply.role for reply in self.trajectory if reply.player is None))

    @property
    def reward(self) -> float:
        """The reward of the policy's role that acted first; 0 if none acted, or before it is scored."""
        return self.rewards.get(self.roles[0], 0.0) if self.roles else 0.0

    def mark_error(self, error_kind: str, hint_template_key: str, message: str = "", *, index: int = -1) -> None:
        """Marks an answer, the newest where no `index` is given, as one that went wrong. Raises ValueError where there
        is no such answer."""
        if not -self.turn <= index < self.turn:
            raise ValueError(f"answer {index} is to be marked as {error_kind}, and there are {self.turn} answers")
        error = StepError(error_kind=error_kind, hint_template_key=hint_template_key, message=message)
        self.trajectory[index].error = error

"""The policy's turns in a rollout, and which of them are worth asking teachers about."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from grpo.configs.auxiliary import Selection
from grpo.orchestrator.auxiliary.preferences.agreement import Action, Tools
from grpo.orchestrator.rollouts.records import EpisodeResult, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A turn of the policy, and the state in which it acted."""

    rollout: EpisodeResult
    step: int
    """Its place among the rollout's steps."""
    messages: Sequence[Mapping[str, Any]]
    """The state as its environment tells all of it, or else the conversation until then, the policy's own answers
    included."""
    prompt_ids: Sequence[int]
    """[Lp] the conversation as tokens, as the server was given and sampled them."""
    sampled_ids: Sequence[int]
    """[Lr] what the policy sampled, its end-of-turn token included where it was sampled."""

    @property
    def answer(self) -> Step:
        """What was sampled, and what the environment saw in it."""
        return self.rollout.steps[self.step]

    @property
    def tools(self) -> Tools:
        """What could be called."""
        return self.answer.tools

    @property
    def action(self) -> Action:
        """What the policy did."""
        return Action(text=self.answer.text)

    @property
    def version(self) -> int:
        """The oldest version that sampled any of it."""
        return min(version for version, _ in self.answer.versions)


def state_key(messages: Sequence[Mapping[str, Any]], tools: Tools) -> str:
    """The same for equal states. Raises ValueError or TypeError for messages that are no JSON."""
    canonical = json.dumps([list(messages), list(tools or ())], sort_keys=True)
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


def turns_of(rollout: EpisodeResult) -> list[Turn]:
    """All turns in which the policy acted, in the order of its conversations."""
    turns: list[Turn] = []
    messages: list[Mapping[str, Any]] = []
    for row in rollout.rows:
        for turn, place in zip(row.turns, row.steps, strict=True):
            step = rollout.steps[place]
            if turn.index == 0:
                messages = []
            messages += step.messages
            turns.append(
                Turn(
                    rollout=rollout,
                    step=place,
                    messages=tuple(messages if step.observed is None else step.observed),
                    prompt_ids=row.token_ids[: turn.begins].tolist(),
                    sampled_ids=row.token_ids[turn.begins : turn.ends].tolist(),
                )
            )
            messages.append({"role": "assistant", "content": step.text})
    return turns


def chosen_turns(group: Sequence[EpisodeResult], select: Sequence[Selection]) -> list[Turn]:
    """The turns of a group's rollouts that any of `select` names."""
    mean = fmean(result.reward for result in group)

    def is_low(reward: float) -> bool:
        """But for rounding, by which the mean of equal rewards may be above them."""
        return reward < mean and not math.isclose(reward, mean, abs_tol=1e-12)

    def is_chosen(turn: Turn) -> bool:
        by_error = "errors" in select and turn.answer.error is not None
        return by_error or "all" in select or ("low_reward" in select and is_low(turn.rollout.reward))

    return [turn for result in group for turn in turns_of(result) if is_chosen(turn)]

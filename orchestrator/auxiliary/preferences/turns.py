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
from grpo.orchestrator.rollouts.records import EpisodeResult, Step, TrainingRow, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTurn:
    """A turn of the policy, and the state in which it acted."""

    rollout: EpisodeResult
    step: int
    """Its index among the rollout's steps."""
    messages: Sequence[Mapping[str, Any]]
    """The state as its environment describes all of it, or else the conversation until then, the policy's own answers
    included."""
    row: TrainingRow
    turn: Turn
    """Its tokens in the row."""

    @property
    def prompt_ids(self) -> list[int]:
        """Returns [Lp] the conversation as tokens, as the server was given and sampled them."""
        return [*self.row.token_ids[: self.turn.begins].tolist()]

    @property
    def sampled_ids(self) -> list[int]:
        """Returns [Lr] what the policy sampled, its end-of-turn token included where it was sampled."""
        return [*self.row.token_ids[self.turn.begins : self.turn.ends].tolist()]

    @property
    def answer(self) -> Step:
        """Returns what was sampled, and what the environment saw in it."""
        return self.rollout.steps[self.step]

    @property
    def tools(self) -> Tools:
        """Returns what could be called."""
        return self.answer.tools

    @property
    def action(self) -> Action:
        """Returns what the policy did."""
        return Action(text=self.answer.text)

    @property
    def version(self) -> int:
        """Returns the oldest version that sampled any of it."""
        return min(version for version, _ in self.answer.versions)


def state_key(messages: Sequence[Mapping[str, Any]], tools: Tools) -> str:
    """Returns a name that is equal for equal states. Raises ValueError or TypeError for messages that are no JSON."""
    canonical = json.dumps([list(messages), list(tools or ())], sort_keys=True)
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


def turns_of(rollout: EpisodeResult) -> list[PolicyTurn]:
    """Returns all turns in which the policy acted, in the order of its conversations."""
    turns: list[PolicyTurn] = []
    messages: list[Mapping[str, Any]] = []
    for row in rollout.rows:
        for turn, index in zip(row.turns, row.steps, strict=True):
            step = rollout.steps[index]
            if turn.index == 0:
                messages = []
            messages += step.messages
            state = tuple(messages if step.observed is None else step.observed)
            turns.append(PolicyTurn(rollout=rollout, step=index, messages=state, row=row, turn=turn))
            messages.append({"role": "assistant", "content": step.text})
    return turns


def chosen_turns(group: Sequence[EpisodeResult], select: Sequence[Selection]) -> list[PolicyTurn]:
    """Returns the turns of a group's rollouts that any of `select` names."""
    mean = fmean(result.reward for result in group)

    def is_low(reward: float) -> bool:
        """Whether it is below the mean by more than rounding, which may bring the mean of equal rewards above them."""
        return reward < mean and not math.isclose(reward, mean, abs_tol=1e-12)

    def is_chosen(turn: PolicyTurn) -> bool:
        by_error = "errors" in select and turn.answer.error is not None
        return by_error or "all" in select or ("low_reward" in select and is_low(turn.rollout.reward))

    return [turn for result in group for turn in turns_of(result) if is_chosen(turn)]

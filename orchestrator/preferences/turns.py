"""The policy's turns in a rollout, and which of them are worth asking teachers about."""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from configs.auxiliary import PreferenceSettings
from orchestrator.preferences.agreement import Action, Tools
from orchestrator.rollouts.records import EpisodeResult, Step
from orchestrator.seeds import mixed_seed


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
    """The same for equal states."""
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


def chosen_turns(
    group: Sequence[EpisodeResult], turns: Sequence[Sequence[Turn]], settings: PreferenceSettings, *, seed: int
) -> list[Turn]:
    """Those of a group's `turns`, by rollout, that any strategy of `settings.select` names, of these a share by lot.
    The lot depends on the seed, the rollout and the turn alone, so that a run that goes on draws as it would have."""
    chosen: set[tuple[str, int]] = set()
    if "all" in settings.select:
        chosen |= {_place(turn) for own in turns for turn in own}
    if "errors" in settings.select:
        chosen |= {_place(turn) for own in turns for turn in own if turn.answer.error is not None}
    if "low_reward" in settings.select:
        chosen |= _low_reward(group, turns, settings.low_reward_below)
    if "first_divergence" in settings.select:
        chosen |= _first_divergence(turns)

    def is_drawn(turn: Turn) -> bool:
        return mixed_seed(seed, "worth-asking", *_place(turn)) < settings.fraction * 2**56

    drawn = [[turn for turn in own if _place(turn) in chosen and is_drawn(turn)] for own in turns]
    return [turn for own in drawn for turn in own[: settings.max_turns]]


def _place(turn: Turn) -> tuple[str, int]:
    return turn.rollout.id, turn.step


def _low_reward(
    group: Sequence[EpisodeResult], turns: Sequence[Sequence[Turn]], below: float | None
) -> set[tuple[str, int]]:
    """Of rollouts with a reward `below` that; None: below the group's mean, but for rounding, by which the mean of
    equal rewards may be above them."""
    mean = fmean(result.reward for result in group)

    def is_low(reward: float) -> bool:
        return reward < below if below is not None else reward < mean and not math.isclose(reward, mean, abs_tol=1e-12)

    return {_place(turn) for result, own in zip(group, turns, strict=True) if is_low(result.reward) for turn in own}


def _first_divergence(turns: Sequence[Sequence[Turn]]) -> set[tuple[str, int]]:
    """The first turn of each rollout in which a sibling did something else in the same state."""
    keys = {_place(turn): state_key(turn.messages, turn.tools) for own in turns for turn in own}
    did: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)
    for own in turns:
        for turn in own:
            did[keys[_place(turn)]].add((turn.rollout.id, turn.action.text))

    def diverges(turn: Turn) -> bool:
        others = (text for other, text in did[keys[_place(turn)]] if other != turn.rollout.id)
        return any(text != turn.action.text for text in others)

    firsts = (next(filter(diverges, own), None) for own in turns)
    return {_place(turn) for turn in firsts if turn is not None}

"""Which turns are worth asking teachers about."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Literal, get_args

from orchestrator.seeds import mixed_seed

StrategyName = Literal["all", "errors", "low_reward", "first_divergence"]
"""Which turns: all; those in which the environment saw an error; all of rollouts whose reward is below their group's
mean; the first of each rollout in which a sibling did something else in the same state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFacts:
    """What strategies look at. Example: ``TurnFacts(state="9f…", did="LOOKUP[cat]", failed=True)``"""

    state: str
    """Key of the state in which the policy acted; empty where no strategy reads it."""
    did: str
    """What it did, as text."""
    failed: bool
    """Whether the environment saw an error in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFacts:
    """A rollout, as strategies see it."""

    id: str
    """The rollout's."""
    reward: float
    turns: Sequence[TurnFacts]


Place = tuple[int, int]
"""(rollout in the group, turn in the rollout)"""
Strategy = Callable[[Sequence[TraceFacts]], set[Place]]


def all_turns(group: Sequence[TraceFacts]) -> set[Place]:
    """Every turn."""
    return {(i, j) for i, trace in enumerate(group) for j in range(len(trace.turns))}


def errors(group: Sequence[TraceFacts]) -> set[Place]:
    """Turns in which the environment saw an error."""
    return {(i, j) for i, trace in enumerate(group) for j, turn in enumerate(trace.turns) if turn.failed}


def low_reward(group: Sequence[TraceFacts], *, below: float | None = None) -> set[Place]:
    """All turns of rollouts with a reward `below` that; None: below the group's mean, but for rounding, by which the
    mean of equal rewards may be above them."""
    if not group:
        return set()
    mean = fmean(trace.reward for trace in group)

    def is_low(reward: float) -> bool:
        return reward < below if below is not None else reward < mean and not math.isclose(reward, mean, abs_tol=1e-12)

    return {(i, j) for i, trace in enumerate(group) if is_low(trace.reward) for j in range(len(trace.turns))}


def first_divergence(group: Sequence[TraceFacts]) -> set[Place]:
    """The first turn of each rollout in which a sibling did something else in the same state."""
    did: defaultdict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for i, trace in enumerate(group):
        for turn in trace.turns:
            did[turn.state][i].add(turn.did)
    return {
        (i, next(j for j, turn in enumerate(trace.turns) if _diverges(i, turn, did)))
        for i, trace in enumerate(group)
        if any(_diverges(i, turn, did) for turn in trace.turns)
    }


def _diverges(rollout: int, turn: TurnFacts, did: Mapping[str, Mapping[int, set[str]]]) -> bool:
    return any(texts != {turn.did} for other, texts in did[turn.state].items() if other != rollout)


_STRATEGIES: dict[str, Strategy] = {
    "all": all_turns,
    "errors": errors,
    "low_reward": low_reward,
    "first_divergence": first_divergence,
}


class Chooser:
    """Turns that any of the strategies names, and of these a share by lot. The lot depends on the seed, the rollout and
    the turn alone, so that a run that goes on draws as it would have.

    Example: ``Chooser(["errors", "first_divergence"], share=0.25, seed=0)``
    """

    def __init__(
        self,
        strategies: Sequence[str],
        *,
        share: float = 1.0,
        seed: int = 0,
        max_per_trace: int | None = None,
        below: float | None = None,
    ) -> None:
        """`max_per_trace`: the first ones of a rollout, of those that were drawn. `below`: the reward that counts as
        low, None for the group's mean."""
        if unknown := [name for name in strategies if name not in get_args(StrategyName)]:
            raise ValueError(f"there is no strategy {unknown[0]!r}; there are {', '.join(get_args(StrategyName))}")
        if not strategies:
            raise ValueError(f"no strategies were given; give one or more of {', '.join(get_args(StrategyName))}")
        if not 0 <= share <= 1:
            raise ValueError(f"share is {share}, expected 0 to 1")
        if max_per_trace is not None and max_per_trace < 1:
            raise ValueError(f"max_per_trace is {max_per_trace}, expected at least 1, or none")
        if below is not None and "low_reward" not in strategies:
            raise ValueError(f"below is {below}, and no strategy is low_reward, which alone reads it; leave it out")
        self.reads_states = "first_divergence" in strategies
        """Otherwise nobody need work out the keys of states."""
        known: dict[str, Strategy] = {**_STRATEGIES, "low_reward": partial(low_reward, below=below)}
        self._strategies = [known[name] for name in strategies]
        self._share, self._seed, self._max_per_trace = share, seed, max_per_trace

    def choose(self, group: Sequence[TraceFacts]) -> list[Place]:
        """Of the rollouts of one example, in order."""
        worth = set[Place]().union(*(strategy(group) for strategy in self._strategies))
        by_trace: defaultdict[int, list[Place]] = defaultdict(list)
        for i, j in sorted(worth):
            if self._drawn(group[i].id, j):
                by_trace[i].append((i, j))
        return [place for places in by_trace.values() for place in places[: self._max_per_trace]]

    def _drawn(self, trace: str, turn: int) -> bool:
        return mixed_seed(self._seed, "worth-asking", trace, turn) < self._share * 2**56

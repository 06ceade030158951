"""What an episode with sub-episodes leaves behind: scored rollouts, each with the rollouts that it spawned."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.episodes.types import Failure, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateResult:
    """A scored rollout and its children.

    Example: a proposer whose question two solvers tried:
    ``GenerateResult(rollout=proposed, rewards={"proposer": 1.0}, children=(solved, failed))``
    """

    rollout: Rollout
    rewards: Mapping[str, float]
    """Reward of each role by its id; every role that has a step in the rollout has one."""
    children: tuple["GenerateResult", ...] = ()
    """Results of its sub-episodes."""
    accuracy: float = 0.0
    """The measure that evaluation reports."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the rubric measured, by name."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """What the episode says of the rollout, for logs."""

    def __post_init__(self) -> None:
        roles = {step.role for step in self.rollout.steps}
        if missing := sorted(roles - self.rewards.keys()):
            raise ValueError(
                f"rollout {self.rollout.id} has rewards for {sorted(self.rewards)}, and steps of {missing} as well; "
                "a rubric must give every role that acted a reward"
            )
        for role, reward in self.rewards.items():
            if not math.isfinite(reward):
                raise ValueError(f"rollout {self.rollout.id} has reward {reward} for {role}, expected a finite number")

    def step_reward(self, index: int) -> float:
        """The reward of the role that took a step."""
        return self.rewards[self.rollout.steps[index].role]

    def num_sampled_tokens(self, role: str) -> int:
        """Tokens that the policy sampled in a role, in this rollout alone."""
        return sum(len(step.completion.token_ids) for step in self.rollout.steps if step.role == role)

    @property
    def reward(self) -> float:
        """Of the role that acted first, which stands for the whole rollout where one number must."""
        return self.rewards[self.roles[0]] if self.rollout.steps else 0.0

    @property
    def roles(self) -> tuple[str, ...]:
        """Ids of the roles that acted in this rollout, in the order in which they did first."""
        return tuple(dict.fromkeys(step.role for step in self.rollout.steps))

    def walk(self) -> Iterator["GenerateResult"]:
        """This result, then each child with all below it."""
        yield self
        for child in self.children:
            yield from child.walk()

    @property
    def num_tokens(self) -> int:
        """Tokens that the policy sampled in the whole tree."""
        return sum(rollout.num_sampled_tokens for rollout in self.all_rollouts())

    @property
    def versions(self) -> list[int]:
        """Policy versions that sampled any of the tree, ascending."""
        return sorted({version for rollout in self.all_rollouts() for version in rollout.versions})

    def all_rollouts(self) -> list[Rollout]:
        """Of the whole tree, parents before their children."""
        return [result.rollout for result in self.walk()]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRollout:
    """A rollout that has no reward."""

    rollout: Rollout
    """As far as it is known."""
    failure: Failure


def walk_all(results: Iterable[GenerateResult]) -> Iterator[GenerateResult]:
    """Every result of several trees, tree by tree."""
    for result in results:
        yield from result.walk()


def levels(results: Iterable[GenerateResult]) -> Iterator[tuple[GenerateResult, ...]]:
    """Groups by level of the hierarchy: the results themselves form one group, and each parent's children form one of
    their own."""
    top = tuple(results)
    if top:
        yield top
    for result in walk_all(top):
        if result.children:
            yield result.children

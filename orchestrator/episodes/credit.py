"""Credit: which advantage each step of each rollout gets."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from orchestrator.advantage import group_relative
from orchestrator.episodes.episode import GenerateResult

StepKey = tuple[str, int]
"""(rollout id, index of the step)"""


class CreditAssigner(ABC):
    """Advantages from rewards; knows nothing of tokens."""

    @abstractmethod
    def compute(self, results: Sequence[GenerateResult]) -> dict[StepKey, float]:
        """The advantage of every step of one group's rollouts."""


class GRPOCredit(CreditAssigner):
    """Reward minus the group's mean, for every step of the rollout alike."""

    def compute(self, results: Sequence[GenerateResult]) -> dict[StepKey, float]:
        advantages_G = group_relative([result.score.reward for result in results])
        return {
            (result.rollout.id, index): advantage
            for result, advantage in zip(results, advantages_G, strict=True)
            for index in range(len(result.rollout.steps))
        }

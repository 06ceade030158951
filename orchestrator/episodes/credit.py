"""Credit: which advantage each step of each rollout gets."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from orchestrator.advantage import AdvantageFunction, group_relative
from orchestrator.episodes.episode import GenerateResult

StepKey = tuple[str, int]
"""(rollout id, index of the step)"""


class CreditAssigner(ABC):
    """Advantages from rewards; knows of tokens only how many there are."""

    @abstractmethod
    def compute(self, results: Sequence[GenerateResult]) -> dict[StepKey, float]:
        """The advantage of every step of one group's rollouts."""


class GRPOCredit(CreditAssigner):
    """The rollout's advantage within its group, for every step of it alike."""

    def __init__(self, advantage: AdvantageFunction = group_relative) -> None:
        self._advantage = advantage

    def compute(self, results: Sequence[GenerateResult]) -> dict[StepKey, float]:
        rewards_G = [result.score.reward for result in results]
        advantages_G = self._advantage(rewards_G, [result.rollout.num_sampled_tokens for result in results])
        return {
            (result.rollout.id, index): advantage
            for result, advantage in zip(results, advantages_G, strict=True)
            for index in range(len(result.rollout.steps))
        }

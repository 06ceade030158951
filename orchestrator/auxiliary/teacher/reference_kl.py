"""The KL to the model before training as a term of the reward.

Legend: `L` tokens of one row.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from grpo.configs.rollouts import RewardShapingSettings
from grpo.orchestrator.auxiliary.teacher.scoring import ReferenceTeacher, Scoring
from grpo.orchestrator.hooks import Opening
from grpo.orchestrator.rollouts.records import EpisodeResult
from grpo.orchestrator.samples import RowKey, ScoredGroup, numbered_rows
from grpo.orchestrator.shaping import RewardTerm
from grpo.transport.records import Float32
from numpy.typing import NDArray

Estimator = Literal["k1", "k2", "k3"]


class ReferenceKl(RewardTerm):
    """Takes the KL to the base model off rewards. A rollout that the servers do not score is dropped: its reward would
    be another one than those of its group."""

    metric = "reward/reference_kl_penalty"
    server_room = 1  # vLLM samples one token more than it scores

    def __init__(self, settings: RewardShapingSettings, reference: Scoring) -> None:
        self._settings, self._reference = settings, reference

    @property
    def waits_for(self) -> str | None:
        """Returns the reference's name while it is asked."""
        return self._reference.teacher.name if self._reference.num_groups else None

    async def before_credit(self, group: ScoredGroup) -> None:
        """Waits for the servers."""
        scored, failed = await self._reference.score(group.results)
        group.drop({rollout_id: f"reference_{error.reason}" for rollout_id, error in failed.items()})
        sums = summed_kl(group.results, scored, self._settings.reference_kl_estimator)
        self.add_to(group, lambda result, role: -self._settings.reference_kl * sums[result.id, role])


def summed_kl(
    results: Sequence[EpisodeResult], scored: Mapping[RowKey, Float32], estimator: Estimator
) -> dict[tuple[str, str], float]:
    """Returns the KL of all tokens of a role in a rollout, summed, by (rollout id, role). `scored`: [L] the reference's
    log-probabilities of each row."""
    sums: defaultdict[tuple[str, str], float] = defaultdict(float)
    for _, key, result, row in numbered_rows(results):
        for turn, step in zip(row.turns, row.steps, strict=True):
            own = slice(turn.begins, turn.ends)
            estimates = kl_estimates(row.logprobs[own], scored[key][own], estimator)
            sums[result.id, result.steps[step].role] += float(estimates.sum())
    return sums


def kl_estimates(policy_L: Float32, reference_L: Float32, estimator: Estimator) -> NDArray[np.float64]:
    """Estimates of KL(policy ‖ reference) [L] of tokens that the policy sampled, from their log-probabilities (Schulman
    2020, "Approximating KL divergence"), with d = policy - reference: k1 = d, k2 = d² / 2, k3 = exp(-d) - 1 + d."""
    d = policy_L.astype(np.float64) - reference_L
    if estimator == "k1":
        return d
    return d * d / 2 if estimator == "k2" else np.expm1(-d) + d


async def open(opening: Opening) -> ReferenceKl:
    """Returns the term of `reward_shaping.reference_kl`."""
    return ReferenceKl(opening.settings.reward_shaping, Scoring(ReferenceTeacher(opening.client.score)))

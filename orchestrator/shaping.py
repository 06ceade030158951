"""Reward shaping before advantages are computed, and advantages that need the whole batch.

Legend: `L` tokens of one row, `S` samples of a batch.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec
import numpy as np
from grpo.configs.orch import OrchSettings
from grpo.configs.rollouts import AnyAdvantage
from grpo.orchestrator.advantage import ROUNDING, constant_credit
from grpo.orchestrator.auxiliary.teacher.scoring import Teaching
from grpo.orchestrator.rollouts.records import EpisodeResult, NotFinite, TooLarge
from grpo.orchestrator.samples import FinishedGroup, training_samples
from grpo.transport.records import Float32, TrainingSample
from numpy.typing import NDArray

Estimator = Literal["k1", "k2", "k3"]
BASELINES = "baselines"
"""The key of the state that is kept with a batch."""


def overlong_penalty(num_tokens: int, *, max_tokens: int, interval: int) -> float:
    """The soft overlong punishment of DAPO (Yu et al. 2025, arXiv:2503.14476, equation 13): 0 up to `max_tokens` -
    `interval` tokens, from there linearly down to -1 at `max_tokens`, and -1 beyond."""
    over = num_tokens - (max_tokens - interval)
    return -min(1.0, max(0.0, over / interval))


def kl_estimates(policy_L: Float32, reference_L: Float32, estimator: Estimator) -> NDArray[np.float64]:
    """Estimates of KL(policy ‖ reference) [L] of tokens that the policy sampled, from their log-probabilities (Schulman
    2020, "Approximating KL divergence"), with d = policy - reference: k1 = d, k2 = d² / 2, k3 = exp(-d) - 1 + d."""
    d = policy_L.astype(np.float64) - reference_L
    if estimator == "k1":
        return d
    return d * d / 2 if estimator == "k2" else np.expm1(-d) + d


class RewardShaping:
    """The terms that the settings' `reward_shaping` adds to rewards. Rewards in metrics and traces stay what the
    environment gave."""

    def __init__(self, settings: OrchSettings, reference: Teaching | None = None) -> None:
        """`reference`: the base model, where the KL to it is taken off."""
        self._chosen, self._reference = settings.reward_shaping, reference
        self._max_tokens = settings.sampling.max_tokens or settings.seq_len
        self._totals: defaultdict[str, list[float]] = defaultdict(list)

    async def shaped(self, results: Sequence[EpisodeResult]) -> tuple[list[EpisodeResult], dict[str, str]]:
        """Results with the rewards that advantages are made of, and by rollout id the reason why the others have
        none."""
        shaped, failed = list(results), dict[str, str]()
        if self._chosen.overlong_interval is not None:
            shaped = self._each_less(shaped, self._overlong, "reward/overlong_penalty", failed)
            results = [result for result in results if result.id not in failed]
        if self._reference is not None:
            samples = training_samples(results, constant_credit, group="")
            scored, failures = await self._reference.teach(samples)
            failed |= {rollout_id: f"reference_{error.reason}" for rollout_id, error in failures.items()}
            penalties = _penalties(results, scored, failed, self._chosen.reference_kl_estimator)
            coefficient = self._chosen.reference_kl

            def off(result: EpisodeResult, role: str) -> float:
                return -coefficient * penalties[result.id, role]

            kept = [result for result in shaped if result.id not in failed]
            shaped = self._each_less(kept, off, "reward/reference_kl_penalty", failed)
        return shaped, failed

    def _each_less(
        self,
        results: Sequence[EpisodeResult],
        of: Callable[[EpisodeResult, str], float],
        metric: str,
        failed: dict[str, str],
    ) -> list[EpisodeResult]:
        """Each by `_less`. Those whose reward is none any more are told in `failed`."""
        made = []
        for result in results:
            try:
                made.append(self._less(result, of, metric))
            except NotFinite as error:
                failed[result.id] = "reward_too_large" if isinstance(error, TooLarge) else "reward_not_finite"
        return made

    def metrics(self) -> dict[str, float]:
        """Means over rollouts and roles since the last call of what was added to rewards."""
        means = {name: math.fsum(values) / len(values) for name, values in self._totals.items()}
        self._totals.clear()
        return means

    def _overlong(self, result: EpisodeResult, role: str) -> float:
        """Returns the penalty for the role's longest answer."""
        longest = max(len(step.completion.token_ids) for step in result.steps if step.role == role)
        interval = self._chosen.overlong_interval
        assert interval is not None
        return overlong_penalty(longest, max_tokens=self._max_tokens, interval=interval)

    def _less(self, result: EpisodeResult, of: Callable[[EpisodeResult, str], float], metric: str) -> EpisodeResult:
        """The result and all that it spawned, with what `of` says added to the rewards of roles that acted."""
        added = {role: of(result, role) for role in result.roles}
        self._totals[metric] += added.values()
        rewards = {role: reward + added.get(role, 0.0) for role, reward in result.rewards.items()}
        children = tuple(self._less(child, of, metric) for child in result.children)
        return msgspec.structs.replace(result, rewards=rewards, children=children)


def _penalties(
    results: Sequence[EpisodeResult], scored: Sequence[TrainingSample], failed: Mapping[str, str], estimator: Estimator
) -> dict[tuple[str, str], float]:
    """The KL of all tokens of a role in a rollout, summed, by (rollout id, role). `scored`: the samples of all rows of
    the results that have not failed, in their order."""
    sums: defaultdict[tuple[str, str], float] = defaultdict(float)
    samples: Iterator[TrainingSample] = iter(scored)
    for root in results:
        if root.id in failed:
            continue
        for result in root.walk():
            for row in result.rows:
                reference = next(samples).teacher_logprobs
                assert reference is not None
                for turn, step in zip(row.turns, row.steps, strict=True):
                    own = slice(turn.begins, turn.ends)
                    estimates = kl_estimates(row.logprobs[own], reference[own], estimator)
                    sums[result.id, result.steps[step].role] += float(estimates.sum())
    return sums


# --- advantages of a batch ---


class BatchAdvantages:
    """Advantages that need the whole batch, of samples that come with their rewards, or with advantages in their group.

    - `running_baseline`: A = r - b, where b is the running mean of the environment's rewards by batch, b ← decay · b +
      (1 - decay) · mean(r): REINFORCE with a reinforcement baseline (Williams 1992, "Simple statistical
      gradient-following algorithms", section 3). It begins as the mean of the first batch.
    - `reinforce_plus_plus`: A = (r - mean(r)) / std(r) over all loss tokens of the batch (Hu et al. 2025,
      arXiv:2501.03262); with `group_baseline` r is the reward minus its group's mean (REINFORCE++-baseline).
    """

    def __init__(self, settings: AnyAdvantage, state: Mapping[str, Any] | None = None) -> None:
        """`state`: what was kept with the batch after which the run goes on."""
        self._settings = settings
        self._baselines: dict[str, float] = dict((state or {}).get(BASELINES, {}))

    def state(self) -> dict[str, Any]:
        """JSON, to be kept with a batch."""
        return {BASELINES: dict(self._baselines)} if self._settings.type == "running_baseline" else {}

    def applied(self, groups: Sequence[FinishedGroup]) -> list[FinishedGroup]:
        """The groups of one batch with their samples' advantages; as they are where these do not need the batch."""
        if self._settings.type == "running_baseline":
            return self._against_baselines(groups, decay=self._settings.decay)
        if self._settings.type != "reinforce_plus_plus":
            return list(groups)
        values = [values_of(sample) for group in groups for sample in group.samples]
        joined = np.concatenate(values)
        mean, std = float(joined.mean()), float(joined.std())
        if std <= ROUNDING * max(1.0, abs(mean)):  # what rounding leaves of equal rewards
            return [_changed(group, lambda sample: np.zeros(1)) for group in groups]
        return [_changed(group, lambda sample: _less(sample.advantages, mean) / std) for group in groups]

    def _against_baselines(self, groups: Sequence[FinishedGroup], *, decay: float) -> list[FinishedGroup]:
        rewards: defaultdict[str, list[float]] = defaultdict(list)
        for group in groups:
            for sample in group.samples:
                rewards[sample.env].append(float(np.mean(values_of(sample))))
        means = {env: math.fsum(own) / len(own) for env, own in rewards.items()}
        known = means | self._baselines
        made = [_changed(group, lambda sample: _less(sample.advantages, known[sample.env])) for group in groups]
        self._baselines |= {env: decay * known[env] + (1 - decay) * mean for env, mean in means.items()}
        return made


def _less(rewards: float | Float32, baseline: float) -> NDArray[np.float64]:
    """The rewards less the baseline: exactly 0 where rounding is all that is left."""
    values = np.asarray(rewards, np.float64)
    difference = values - baseline
    return np.where(np.abs(difference) <= ROUNDING * max(abs(baseline), np.abs(values).max()), 0.0, difference)


def values_of(sample: TrainingSample) -> NDArray[np.float64]:
    """The advantages of the sample's loss tokens, at least one."""
    tokens = np.broadcast_to(np.asarray(sample.advantages, np.float64), sample.loss_mask.shape)
    return tokens[sample.loss_mask] if sample.loss_mask.any() else tokens[:1]


def _changed(group: FinishedGroup, advantages: Callable[[TrainingSample], NDArray[Any]]) -> FinishedGroup:
    def new(sample: TrainingSample) -> TrainingSample:
        value = advantages(sample)
        return msgspec.structs.replace(
            sample, advantages=float(value.reshape(-1)[0]) if value.size == 1 else value.astype(np.float32)
        )

    return replace(group, samples=[new(sample) for sample in group.samples])

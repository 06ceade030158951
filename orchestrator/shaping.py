"""Reward shaping before advantages are computed, and advantages that need the whole batch."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from grpo.configs.orch import OrchSettings
from grpo.configs.rollouts import AnyAdvantage
from grpo.orchestrator.advantage import ROUNDING
from grpo.orchestrator.hooks import Hook
from grpo.orchestrator.monitoring.metrics import Figures
from grpo.orchestrator.rollouts.records import EpisodeResult, NotFinite, TooLarge
from grpo.orchestrator.samples import ScoredGroup
from grpo.transport.records import Float32, TrainingSample
from numpy.typing import NDArray

BASELINES = "baselines"
"""The key of the state that is kept with a batch."""


def overlong_penalty(num_tokens: int, *, max_tokens: int, interval: int) -> float:
    """The soft overlong punishment of DAPO (Yu et al. 2025, arXiv:2503.14476, equation 13): 0 up to `max_tokens` -
    `interval` tokens, from there linearly down to -1 at `max_tokens`, and -1 beyond."""
    over = num_tokens - (max_tokens - interval)
    return -min(1.0, max(0.0, over / interval))


class RewardTerm(Hook):
    """Adds something to the rewards that credit sees. In metrics and traces they stay what the environment gave."""

    metric: str
    """The mean over rollouts and roles of what it adds."""
    _sum, _num = 0.0, 0

    def add_to(self, group: ScoredGroup, term: Callable[[EpisodeResult, str], float]) -> None:
        """Adds `term(result, role)` to the rewards of each role that acted, in all rollouts and in those that they
        spawned. A rollout whose reward cannot be trained on then is dropped."""
        changed, failed = list[EpisodeResult](), dict[str, str]()
        for result in group.credited:
            try:
                changed.append(self._with(result, term))
            except NotFinite as error:
                failed[result.id] = "reward_too_large" if isinstance(error, TooLarge) else "reward_not_finite"
        group.drop(failed)
        group.credited = changed

    def figures(self) -> Figures:
        """Returns the mean of what was added."""
        return Figures(means={self.metric: (self._sum, self._num)})

    def _with(self, result: EpisodeResult, term: Callable[[EpisodeResult, str], float]) -> EpisodeResult:
        added = {role: term(result, role) for role in result.roles}
        self._sum, self._num = self._sum + math.fsum(added.values()), self._num + len(added)
        rewards = {role: reward + added.get(role, 0.0) for role, reward in result.rewards.items()}
        children = tuple(self._with(child, term) for child in result.children)
        return msgspec.structs.replace(result, rewards=rewards, children=children)


class OverlongPenalty(RewardTerm):
    """Takes DAPO's penalty for long answers off rewards."""

    metric = "reward/overlong_penalty"

    def __init__(self, settings: OrchSettings) -> None:
        """`settings` with `reward_shaping.overlong_interval`."""
        self._max_tokens = settings.sampling.max_tokens or settings.seq_len
        self._interval = settings.reward_shaping.overlong_interval or 0

    async def before_credit(self, group: ScoredGroup) -> None:
        """Penalises each role by its longest answer."""
        self.add_to(group, self._penalty)

    def _penalty(self, result: EpisodeResult, role: str) -> float:
        longest = max(len(step.completion.token_ids) for step in result.steps if step.role == role)
        return overlong_penalty(longest, max_tokens=self._max_tokens, interval=self._interval)


def shaping_hooks(settings: OrchSettings) -> list[Hook]:
    """Returns the reward terms that the settings ask for and that need nobody else."""
    return [] if settings.reward_shaping.overlong_interval is None else [OverlongPenalty(settings)]


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

    def apply(self, groups: Sequence[ScoredGroup]) -> None:
        """Replaces the advantages of one batch's samples; leaves them as they are where they do not need the batch."""
        if self._settings.type == "running_baseline":
            self._subtract_baselines(groups, decay=self._settings.decay)
        if self._settings.type != "reinforce_plus_plus":
            return
        values = [values_of(sample) for group in groups for sample in group.samples]
        joined = np.concatenate(values)
        mean, std = float(joined.mean()), float(joined.std())
        equal = std <= ROUNDING * max(1.0, abs(mean))  # what rounding leaves of equal rewards
        _replace(groups, lambda sample: np.zeros(1) if equal else _less(sample.advantages, mean) / std)

    def _subtract_baselines(self, groups: Sequence[ScoredGroup], *, decay: float) -> None:
        rewards: defaultdict[str, list[float]] = defaultdict(list)
        for group in groups:
            for sample in group.samples:
                rewards[sample.env].append(float(np.mean(values_of(sample))))
        means = {env: math.fsum(own) / len(own) for env, own in rewards.items()}
        known = means | self._baselines
        _replace(groups, lambda sample: _less(sample.advantages, known[sample.env]))
        self._baselines |= {env: decay * known[env] + (1 - decay) * mean for env, mean in means.items()}


def _less(rewards: float | Float32, baseline: float) -> NDArray[np.float64]:
    """The rewards less the baseline: exactly 0 where rounding is all that is left."""
    values = np.asarray(rewards, np.float64)
    difference = values - baseline
    return np.where(np.abs(difference) <= ROUNDING * max(abs(baseline), np.abs(values).max()), 0.0, difference)


def values_of(sample: TrainingSample) -> NDArray[np.float64]:
    """The advantages of the sample's loss tokens, at least one."""
    tokens = np.broadcast_to(np.asarray(sample.advantages, np.float64), sample.loss_mask.shape)
    return tokens[sample.loss_mask] if sample.loss_mask.any() else tokens[:1]


def _replace(groups: Sequence[ScoredGroup], advantages: Callable[[TrainingSample], NDArray[Any]]) -> None:
    """Gives each sample the advantages that the function returns: [1] or [L]."""

    def new(sample: TrainingSample) -> TrainingSample:
        value = advantages(sample)
        return msgspec.structs.replace(
            sample, advantages=float(value.reshape(-1)[0]) if value.size == 1 else value.astype(np.float32)
        )

    for group in groups:
        group.samples = [new(sample) for sample in group.samples]

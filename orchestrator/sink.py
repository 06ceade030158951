"""Where scored rollouts go: to samples with advantages, in groups that wait for their batch."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from grpo.configs.orch import OrchSettings
from grpo.configs.rollouts import fewest_rollouts
from grpo.orchestrator.advantage import Credit
from grpo.orchestrator.background import in_thread
from grpo.orchestrator.filters import Filter
from grpo.orchestrator.hooks import Hook
from grpo.orchestrator.monitoring.fates import Fates
from grpo.orchestrator.renderer import MAX_TOKENS_ON_LOOP
from grpo.orchestrator.rollouts.engine import RolloutEngine
from grpo.orchestrator.rollouts.records import EpisodeResult
from grpo.orchestrator.samples import ScoredGroup, add_samples, judge_group, unfit
from grpo.orchestrator.scheduler import Scheduler

log = logging.getLogger(__name__)

TOO_LATE = "too_late"
"""Why a group is dropped whose rewards came when no batch could have it any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSink:
    """Takes what a schedule has rolled out. A schedule, such as the sampling loop, asks the `scheduler` which groups
    may start, rolls them out by the `engine`, and hands the results to `take`, `finish` and `complete` in turn."""

    settings: OrchSettings
    engine: RolloutEngine
    scheduler: Scheduler
    fates: Fates
    filters: Sequence[Filter]
    hooks: Sequence[Hook]
    finished: dict[int, ScoredGroup] = field(default_factory=dict)
    """Groups that wait for their batch, by number."""

    def take(self, results: Sequence[EpisodeResult]) -> list[EpisodeResult]:
        """Returns the rollouts that have a reward, and drops the others."""
        usable = []
        for result in results:
            if result.failure is not None:
                self.fates.dropped([result], result.failure.reason)
            else:
                self.fates.scored(result)
                usable.append(result)
        return usable

    async def finish(self, usable: Sequence[EpisodeResult], credit: Credit, *, group: str) -> ScoredGroup:
        """Returns the group's samples, without those that filters and hooks withhold, and without any where the trainer
        would refuse one. Drops what hooks take out. Raises FunctionFailed."""
        is_long = bool(self.filters) and sum(result.num_tokens for result in usable) > MAX_TOKENS_ON_LOOP
        judged = await in_thread(judge_group, usable, self.filters) if is_long else judge_group(usable, self.filters)
        scored = ScoredGroup(list(usable), *judged)
        for hook in self.hooks:
            await hook.before_credit(scored)
        if scored.dropped and len(scored.results) < fewest_rollouts(self.settings.advantage):
            scored.drop({result.id: "group_too_small" for result in scored.results})
        add_samples(scored, credit, number=group)
        if (why := unfit(scored.samples)) is not None:
            log.error("group %s is not trained: %s", group, why)
            scored.samples = ()
            scored.withheld = {result.id: "not_finite" for result in scored.results} | scored.withheld
        for result in usable:
            if result.id in scored.dropped:
                self.fates.dropped([result], scored.dropped[result.id])
        return scored

    def complete(self, number: int, group: ScoredGroup) -> bool:
        """Has the group with this number wait for its batch. Returns false where it will be in none, because it has no
        samples or is too late; its rollouts are dropped, and another group may start in its place."""
        if not group.samples:
            self.scheduler.failed(number)
        elif self.scheduler.completed(number, oldest=group.oldest_version):
            self.finished[number] = group
            self.fates.withheld(group)
            return True
        for result in group.results:
            self.fates.dropped([result], group.withheld.get(result.id, TOO_LATE))
        return False

"""Where scored rollouts go: to samples with advantages, in groups that wait for their batch."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from grpo.configs.orch import OrchSettings
from grpo.orchestrator.advantage import Credit, StepKey
from grpo.orchestrator.auxiliary.evidence import with_evidence
from grpo.orchestrator.auxiliary.losses import AuxiliaryLosses
from grpo.orchestrator.filters import Filter
from grpo.orchestrator.monitoring.fates import Fates
from grpo.orchestrator.rollouts.engine import RolloutEngine
from grpo.orchestrator.rollouts.records import EpisodeResult
from grpo.orchestrator.samples import FinishedGroup, finish_group, judge_group, unfit
from grpo.orchestrator.scheduler import Scheduler
from grpo.orchestrator.shaping import RewardShaping
from grpo.transport.records import Float32

log = logging.getLogger(__name__)

TOO_LATE = "too_late"
"""Why a group is dropped whose rewards came when no batch could have it any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSink:
    """Takes what a schedule has rolled out. A schedule, such as the sampling loop, gets leases of groups from the
    `scheduler`, rolls them out by the `engine`, and hands the results to `take`, `finish` and `complete` in turn."""

    settings: OrchSettings
    engine: RolloutEngine
    scheduler: Scheduler
    fates: Fates
    filters: Sequence[Filter]
    auxiliary: AuxiliaryLosses
    shaping: RewardShaping
    finished: dict[int, FinishedGroup] = field(default_factory=dict)
    """Groups that wait for their batch, by number."""

    async def take(self, results: Sequence[EpisodeResult]) -> tuple[list[EpisodeResult], Sequence[EpisodeResult]]:
        """Returns the results that have a reward, and the same with the rewards that credit sees. Drops the others."""
        usable = []
        for result in results:
            if result.failure is not None:
                self.fates.dropped([result], result.failure.reason)
            else:
                self.fates.scored(result)
                usable.append(result)
        shaped, unshaped = await self.shaping.shaped(usable)
        for result in usable:
            if result.id in unshaped:
                self.fates.dropped([result], unshaped[result.id])
        return [result for result in usable if result.id not in unshaped], shaped

    async def finish(
        self, usable: Sequence[EpisodeResult], shaped: Sequence[EpisodeResult], credit: Credit, *, group: str
    ) -> FinishedGroup:
        """Returns the group's samples, with hints and the teacher's part, without those that filters and teachers
        withhold, and without any where the trainer would refuse one. `credit` sees the `shaped` results. Raises
        FunctionFailed."""
        found, withheld = judge_group(usable, self.filters)
        hinted = await self.auxiliary.hinted(usable, withheld=withheld)
        added: Mapping[StepKey, Float32] = {}
        if (evidence := self.auxiliary.evidence) is not None:
            known = await evidence.of_group(usable, hinted.hints, withheld=withheld)
            shaped, added = [with_evidence(one, known) for one in shaped], evidence.added(usable, known)
        if not self.auxiliary.trains_hints():
            hinted = replace(hinted, hints={})
        made = finish_group(
            usable,
            lambda _: credit(shaped),
            group=group,
            found=found,
            withheld=withheld,
            hinted=hinted,
            added=added,
        )
        made = await self.auxiliary.taught(made)
        if (why := unfit(made.samples)) is not None:
            log.error("group %s is not trained: %s", group, why)
            refused = {result.id: "not_finite" for result in usable if result.id not in made.withheld}
            made = replace(made, samples=(), withheld={**made.withheld, **refused})
        if made.samples:
            self.auxiliary.offer(usable)
        else:
            self.auxiliary.count_hints([made])
        return made

    def complete(self, number: int, group: FinishedGroup) -> bool:
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

"""Packs finished groups into batches and ships them, each with the state to resume from."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from configs.orch import OrchSettings
from configs.rollouts import fewest_rollouts
from orchestrator.auxiliary import AuxiliaryLosses
from orchestrator.background import in_thread
from orchestrator.buffer import Buffer
from orchestrator.filters import Filter
from orchestrator.inference.sleep import SleepScheduler
from orchestrator.inference.watch import ServerWatch
from orchestrator.ledger import Ledger
from orchestrator.monitoring.metrics import batch_metrics, found_metrics
from orchestrator.monitoring.recorder import Recorder
from orchestrator.monitoring.story import Story
from orchestrator.monitoring.timeline import ORCHESTRATOR, Timeline
from orchestrator.monitoring.traces import Traces
from orchestrator.packing import pack
from orchestrator.rollouts.engine import RolloutEngine
from orchestrator.samples import FinishedGroup
from orchestrator.scheduler import Scheduler, Shipment
from orchestrator.shaping import BatchAdvantages, RewardShaping
from transport.batches.filesystem import BatchSender
from transport.run import RunFolder

log = logging.getLogger(__name__)

LITTLE_SPREAD = 0.75
"""Share of groups without spread above which a batch is warned of."""


@dataclass(kw_only=True)
class Assembling:
    """Batches, from finished groups to the channel."""

    settings: OrchSettings
    run_folder: RunFolder
    num_ranks: int
    """Processes of the trainer."""
    scheduler: Scheduler
    buffer: Buffer
    ledger: Ledger
    engine: RolloutEngine
    filters: Sequence[Filter]
    auxiliary: AuxiliaryLosses
    shaping: RewardShaping
    advantages: BatchAdvantages
    recorder: Recorder
    timeline: Timeline
    traces: Traces
    watch: ServerWatch
    sleep: SleepScheduler | None
    """In sleep mode."""
    sender: BatchSender
    finished: dict[int, FinishedGroup]
    """Groups that wait for their batch, by number."""
    story: Story | None
    shipped_at_s: dict[int, float]
    """When batches left whose version is not there yet, on the monotonic clock."""
    _little_spread: bool = field(default=False, init=False)
    """In the newest batch."""

    async def run(self) -> None:
        """Consumes: finished groups. Waits for: enough of them, and the version that lets the batch ship; in sleep
        mode, for all others who want the servers. Unblocked by: sample, versions, evaluate. Ends when: the last batch
        has shipped."""
        while not self.scheduler.finished:
            servers_wanted = self.sleep is not None and self.scheduler.num_claims > 0
            if servers_wanted or (shipment := self.scheduler.ship()) is None:
                await self.scheduler.changed.wait()
                continue
            self.shipped_at_s[shipment.step] = time.monotonic()  # the trainer is waited for from here on
            await self._send(shipment)

    async def _send(self, shipment: Shipment) -> None:
        """What a later process needs in order to go on after this batch is on disk before the batch can be received."""
        step, began_s = shipment.step, time.time()
        slept = {} if self.sleep is None else await self.sleep.sleep(step)
        groups = self.advantages.applied([self.finished.pop(ticket.group) for ticket in shipment.tickets])
        for ticket in shipment.tickets:
            self.buffer.closed(ticket.group)
        batches = await in_thread(
            pack,
            [sample for group in groups for sample in group.samples],
            seq_len=self.settings.seq_len,
            num_ranks=self.num_ranks,
            run_id=self.run_folder.run_id,
            step=step,
            pairs=self.auxiliary.pairs_of_step(step),
        )
        of_batch = await in_thread(batch_metrics, groups, step)  # of thousands of rollouts: beside the event loop
        generate_s = self.timeline.generated(step, [ticket.group for ticket in shipment.tickets])
        metrics = self._metrics(step, groups, of_batch | slept, generate_s)
        self._warn_of_little_spread(step, metrics["reward/groups_without_spread"])
        self.traces.shipped(step, groups)
        if self.story is not None:
            self.story.batch(step, groups)
        artifacts = {} if self.engine.stores is None else self.engine.stores.save(step)
        self.ledger.examples_moved(self.buffer.moved(), step)
        commit = self.ledger.shipping(
            [rollout_id for group in groups for rollout_id in group.trained],
            step,
            state=self.buffer.state() | {"artifacts": artifacts} | self.auxiliary.state() | self.advantages.state(),
            metrics=metrics,
        )
        self.timeline.add(ORCHESTRATOR, "pack", start_s=began_s, end_s=time.time(), step=step)
        await in_thread(commit)
        self.shipped_at_s[step] = time.monotonic()
        with self.timeline.span(ORCHESTRATOR, "ship", step=step):
            await in_thread(self.sender.send, step, batches)
            await in_thread(self.sender.flush)
        self.ledger.shipped(step)

    def _warn_of_little_spread(self, step: int, share: float) -> None:
        """Once for each time that it begins."""
        before, self._little_spread = self._little_spread, share > LITTLE_SPREAD
        if self._little_spread and not before and fewest_rollouts(self.settings.advantage) > 1:
            log.warning(
                "in %.0f %% of the groups of batch %d all rewards are equal, and teach nothing; give prompts that the "
                "policy solves at times, more rollouts_per_example, or buffer.online_difficulty_filtering: true",
                100 * share,
                step,
            )

    def _metrics(
        self, step: int, groups: Sequence[FinishedGroup], known: dict[str, float], generate_s: float
    ) -> Mapping[str, float]:
        self.auxiliary.count_hints(groups)
        metrics = (
            known
            | self.buffer.metrics()
            | found_metrics(groups, [one.name for one in self.filters])
            | self.watch.metrics()
            | self.auxiliary.metrics()
            | self.shaping.metrics()
            | {"rollout/restarted": float(self.engine.newly_restarted())}
            | {"perf/max_concurrent_groups": float(self.scheduler.max_in_flight)}
        )
        return self.recorder.shipped(step, metrics, dropped=self.ledger.num_dropped, generate_s=generate_s)

"""Packs finished groups into batches and ships them, each with the state to resume from."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from grpo.configs.rollouts import fewest_rollouts
from grpo.orchestrator.background import in_thread
from grpo.orchestrator.buffer import Buffer
from grpo.orchestrator.hooks import STATE, kept_state
from grpo.orchestrator.inference.sleep import SleepScheduler
from grpo.orchestrator.inference.watch import ServerWatch
from grpo.orchestrator.loops.sample import Intake
from grpo.orchestrator.monitoring.metrics import batch_metrics, found_metrics
from grpo.orchestrator.monitoring.timeline import ORCHESTRATOR
from grpo.orchestrator.packing import pack
from grpo.orchestrator.samples import FinishedGroup
from grpo.orchestrator.scheduler import Shipment
from grpo.orchestrator.shaping import BatchAdvantages
from grpo.transport.batches.filesystem import BatchSender
from grpo.transport.run import RunFolder

log = logging.getLogger(__name__)

LITTLE_SPREAD = 0.75
"""Share of groups without spread above which a batch is warned of."""


@dataclass(kw_only=True)
class Assembling:
    """Batches, from finished groups to the channel."""

    intake: Intake
    """What it shares with who starts rollouts."""
    run_folder: RunFolder
    num_ranks: int
    """Processes of the trainer."""
    buffer: Buffer
    advantages: BatchAdvantages
    watch: ServerWatch
    sleep: SleepScheduler | None
    """In sleep mode."""
    sender: BatchSender
    shipped_at_s: dict[int, float]
    """When batches left whose version is not there yet, on the monotonic clock."""
    _little_spread: bool = field(default=False, init=False)
    """In the newest batch."""

    async def run(self) -> None:
        """Consumes: finished groups. Waits for: enough of them, and the version that lets the batch ship; in sleep
        mode, for all others who want the servers. Unblocked by: sample, versions, evaluate. Ends when: the last batch
        has shipped."""
        scheduler = self.intake.scheduler
        while not scheduler.finished:
            servers_wanted = self.sleep is not None and scheduler.num_claims > 0
            if servers_wanted or (shipment := scheduler.ship()) is None:
                await scheduler.changed.wait()
                continue
            self.shipped_at_s[shipment.step] = time.monotonic()  # the trainer is waited for from here on
            await self._send(shipment)

    async def _send(self, shipment: Shipment) -> None:
        """What a later process needs in order to go on after this batch is on disk before the batch can be received."""
        intake, step, began_s = self.intake, shipment.step, time.time()
        slept = {} if self.sleep is None else await self.sleep.sleep(step)
        groups = self.advantages.applied([intake.finished.pop(ticket.group) for ticket in shipment.tickets])
        for ticket in shipment.tickets:
            self.buffer.closed(ticket.group)
        batches = await in_thread(
            pack,
            [sample for group in groups for sample in group.samples],
            seq_len=intake.settings.seq_len,
            num_ranks=self.num_ranks,
            run_id=self.run_folder.run_id,
            step=step,
            pairs=[pair for hook in intake.hooks for pair in hook.before_batch(step)],
        )
        of_batch = await in_thread(batch_metrics, groups, step)  # of thousands of rollouts: beside the event loop
        generate_s = intake.timeline.generated(step, [ticket.group for ticket in shipment.tickets])
        metrics = self._metrics(step, groups, of_batch | slept, generate_s)
        self._warn_of_little_spread(step, metrics["reward/groups_without_spread"])
        intake.traces.shipped(step, groups)
        intake.recorder.batch(step, groups)
        state = {"artifacts": {} if intake.engine.stores is None else intake.engine.stores.save(step)}
        state |= self.buffer.state() | self.advantages.state() | {STATE: kept_state(intake.hooks)}
        intake.ledger.examples_moved(self.buffer.moved(), step)
        commit = intake.ledger.shipping(
            [rollout_id for group in groups for rollout_id in group.trained],
            step,
            state=state,
            metrics=metrics,
        )
        intake.timeline.add(ORCHESTRATOR, "pack", start_s=began_s, end_s=time.time(), step=step)
        await in_thread(commit)
        self.shipped_at_s[step] = time.monotonic()
        with intake.timeline.span(ORCHESTRATOR, "ship", step=step):
            await in_thread(self.sender.send, step, batches)
        intake.ledger.shipped(step)

    def _warn_of_little_spread(self, step: int, share: float) -> None:
        """Once for each time that it begins."""
        before, self._little_spread = self._little_spread, share > LITTLE_SPREAD
        if self._little_spread and not before and fewest_rollouts(self.intake.settings.advantage) > 1:
            log.warning(
                "in %.0f %% of the groups of batch %d all rewards are equal, and teach nothing; give prompts that the "
                "policy solves at times, more rollouts_per_example, or buffer.online_difficulty_filtering: true",
                100 * share,
                step,
            )

    def _metrics(
        self, step: int, groups: Sequence[FinishedGroup], known: dict[str, float], generate_s: float
    ) -> Mapping[str, float]:
        intake = self.intake
        metrics = known | self.buffer.metrics() | found_metrics(groups, [one.name for one in intake.filters])
        metrics["perf/max_concurrent_groups"] = float(intake.scheduler.max_in_flight)
        return intake.recorder.shipped(
            step,
            metrics,
            parts=[self.watch.figures(), intake.engine.figures(), *(hook.figures() for hook in intake.hooks)],
            dropped=intake.ledger.num_dropped,
            generate_s=generate_s,
        )

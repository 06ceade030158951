"""Packs finished groups into batches and ships them, each with the state to resume from."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from grpo.configs.rollouts import fewest_rollouts
from grpo.orchestrator.background import in_thread
from grpo.orchestrator.buffer import Buffer
from grpo.orchestrator.hooks import STATE, kept_state
from grpo.orchestrator.inference.sleep import SleepScheduler
from grpo.orchestrator.inference.watch import ServerWatch
from grpo.orchestrator.monitoring.metrics import batch_metrics, found_metrics
from grpo.orchestrator.monitoring.timeline import ORCHESTRATOR
from grpo.orchestrator.packing import pack
from grpo.orchestrator.samples import ScoredGroup
from grpo.orchestrator.scheduler import Shipment
from grpo.orchestrator.shaping import BatchAdvantages
from grpo.orchestrator.sink import RolloutSink
from grpo.orchestrator.startup import Ready
from grpo.orchestrator.witness import expected_witness, placed
from grpo.transport.batches.filesystem import BatchSender
from grpo.transport.records import Tolerance

log = logging.getLogger(__name__)

LITTLE_SPREAD = 0.75
"""Share of groups without spread above which a batch is warned of."""


@dataclass(kw_only=True)
class Assembling:
    """Batches, from finished groups to the channel."""

    ready: Ready
    sink: RolloutSink
    buffer: Buffer
    advantages: BatchAdvantages
    watch: ServerWatch
    sleep: SleepScheduler | None
    """In sleep mode."""
    sender: BatchSender
    tolerances: Mapping[str, Tolerance]
    """What each server's log-probabilities are held to."""
    _little_spread: bool = field(default=False, init=False)
    """In the newest batch."""

    async def run(self) -> None:
        """Consumes: finished groups. Waits for: enough of them, and the version that lets the batch ship; in sleep
        mode, for all others who want the servers. Unblocked by: sample, versions, evaluate. Ends when: the last batch
        has shipped."""
        scheduler = self.sink.scheduler
        while not scheduler.finished:
            is_blocked = self.sleep is not None and scheduler.servers_wanted
            if is_blocked or (shipment := scheduler.ship()) is None:
                await scheduler.changed.wait()
                continue
            self.sink.fates.shipped_at_s[shipment.step] = time.monotonic()  # the trainer is waited for from here on
            await self._send(shipment)

    async def _send(self, shipment: Shipment) -> None:
        """Packs and sends a batch, once what a later process needs to go on after it is on disk."""
        sink, step, began_s = self.sink, shipment.step, time.time()
        fates, timeline = sink.fates, sink.fates.timeline
        slept = {} if self.sleep is None else await self.sleep.sleep(step)
        groups = [sink.finished.pop(number) for number in shipment.versions]
        self.advantages.apply(groups)
        for number in shipment.versions:
            self.buffer.closed(number)
        samples = [sample for group in groups for sample in group.samples]
        pairs = [pair for hook in sink.hooks for pair in hook.before_batch(step)]
        expected = await in_thread(expected_witness, samples, pairs, self.ready.trainer.loss, step=step)
        batches = await in_thread(
            pack,
            samples,
            capacity=sink.settings.pack_tokens,
            num_ranks=self.ready.trainer.num_ranks,
            run_id=self.ready.run.run_id,
            step=step,
            pairs=pairs,
            tolerances=dict(self.tolerances),
        )
        of_batch = await in_thread(batch_metrics, groups, step)  # of thousands of rollouts: beside the event loop
        await in_thread(fates.doubles.batch, step, [group.results for group in groups])
        self._warn_of_little_spread(step, of_batch["reward/groups_without_spread"])
        commit = fates.shipping(
            step,
            groups,
            metrics=of_batch | slept | self._metrics(groups),
            parts=[self.watch.figures(), sink.engine.figures(), *(hook.figures() for hook in sink.hooks)],
            state=self.buffer.state() | self.advantages.state() | {STATE: kept_state(sink.hooks)},
            pools=self.buffer.moved(),
            expected=replace(expected, places=placed(batches)),
        )
        timeline.add(ORCHESTRATOR, "pack", start_s=began_s, end_s=time.time(), step=step)
        await in_thread(commit)
        fates.shipped_at_s[step] = time.monotonic()
        with timeline.span(ORCHESTRATOR, "ship", step=step):
            await in_thread(self.sender.send, step, batches)
        fates.ledger.shipped(step)

    def _warn_of_little_spread(self, step: int, share: float) -> None:
        """Warns once each time that it begins."""
        settings = self.sink.settings
        needed = fewest_rollouts(settings.advantage) > 1 and not settings.buffer.skip_verification
        before, self._little_spread = self._little_spread, share > LITTLE_SPREAD
        if self._little_spread and not before and needed:
            log.warning(
                "in %.0f %% of the groups of batch %d all rewards are equal, and teach nothing; give prompts that the "
                "policy solves at times, more rollouts_per_example, or buffer.online_difficulty_filtering: true",
                100 * share,
                step,
            )

    def _metrics(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        metrics = self.buffer.metrics() | found_metrics(groups, [one.name for one in self.sink.filters])
        return metrics | {"perf/max_concurrent_groups": float(self.sink.scheduler.max_in_flight)}

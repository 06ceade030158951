"""Packs finished groups into batches and ships them, each with the state to resume from."""

import logging
import time
from collections.abc import Sequence

from orchestrator.background import in_thread
from orchestrator.loops.shared import Shared
from orchestrator.monitoring.conversations import is_due, write_conversations
from orchestrator.monitoring.metrics import ScoredGroup, found_metrics
from orchestrator.monitoring.timeline import ORCHESTRATOR
from orchestrator.packing import pack
from orchestrator.samples import FinishedGroup
from orchestrator.scheduler import Shipment
from transport.batches.base import BatchSender

log = logging.getLogger(__name__)


class Assembling:
    """Batches, from finished groups to the channel."""

    def __init__(self, shared: Shared, sender: BatchSender) -> None:
        self._shared, self._sender = shared, sender

    async def run(self) -> None:
        """Consumes: finished groups. Waits for: enough of them, and the version that lets the batch ship; in sleep
        mode, for all others who want the servers. Unblocked by: sample, versions, evaluate. Ends
        when: the last batch has shipped."""
        scheduler, changed = self._shared.scheduler, self._shared.changed
        while not scheduler.finished:
            servers_wanted = self._shared.sleep is not None and self._shared.num_wanting > 0
            shipment = None if servers_wanted else scheduler.ship()
            if shipment is None:
                await changed.wait()
                continue
            self._shared.shipped_at_s[shipment.step] = time.monotonic()  # the trainer is waited for from here on
            await self._send(shipment)
            changed.ring()

    async def _keep_conversations(self, step: int, groups: Sequence[FinishedGroup]) -> None:
        """They are for people: where they cannot be written, the run goes on."""
        settings, folder = self._shared.settings.conversations, self._shared.ready.run.path
        if is_due(settings, step):
            try:
                await in_thread(write_conversations, folder, step, groups[: settings.num_groups])
            except OSError as error:
                log.warning("the conversations of batch %d are not kept: %s", step, error)

    async def _send(self, shipment: Shipment) -> None:
        """What a later process needs in order to go on after this batch is on disk before the batch can be received."""
        shared, step, began_s = self._shared, shipment.step, time.time()
        slept = {} if shared.sleep is None else await shared.sleep.sleep(step)
        groups = [shared.waiting.pop(ticket.group) for ticket in shipment.tickets]
        for ticket in shipment.tickets:
            shared.buffer.closed(ticket.group)
        samples = [sample for group in groups for sample in group.samples]
        batches = await in_thread(
            pack,
            samples,
            seq_len=shared.settings.seq_len,
            num_ranks=shared.ready.trainer.gpus,
            run_id=shared.ready.run.run_id,
            step=step,
            pairs=shared.auxiliary.pairs_of_step(step),
        )
        shared.auxiliary.count_hints(groups)
        scored = [ScoredGroup(results=group.results, step=step, found=group.found) for group in groups]
        metrics = shared.recorder.shipped(
            step,
            scored,
            dropped=shared.ledger.num_dropped,
            generate_s=shared.generating.total_s,
            more=shared.buffer.metrics()
            | found_metrics(scored, [one.name for one in shared.filters])
            | shared.health.metrics()
            | slept
            | shared.auxiliary.metrics()
            | {"rollout/restarted": float(shared.engine.newly_restarted())}
            | {"perf/max_concurrent_groups": float(shared.scheduler.max_in_flight)},
        )
        shared.reporter.batch(step, groups)
        await self._keep_conversations(step, groups)
        rollout_ids = [rollout_id for group in groups for rollout_id in group.trained]
        state = (
            shared.buffer.state()
            | {"artifacts": {} if shared.engine.stores is None else shared.engine.stores.save(step)}
            | shared.auxiliary.state()
        )
        shared.ledger.examples_moved(shared.buffer.moved(), step)
        commit = shared.ledger.shipping(rollout_ids, step, state=state, metrics=metrics)
        shared.timeline.generated(step, [ticket.group for ticket in shipment.tickets])
        shared.timeline.add(ORCHESTRATOR, "pack", start_s=began_s, end_s=time.time(), step=step)
        await in_thread(commit)
        shared.shipped_at_s[step] = time.monotonic()
        with shared.timeline.span(ORCHESTRATOR, "ship", step=step):
            await in_thread(self._sender.send, step, batches)
        shared.ledger.shipped(step)

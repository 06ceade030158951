"""Writes the status file, and keeps the ledger's database up to date."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo.configs.orch import OrchSettings
from grpo.orchestrator.background import in_thread
from grpo.orchestrator.hooks import Hook
from grpo.orchestrator.inference.sleep import SleepScheduler
from grpo.orchestrator.inference.weight_sync import WeightSync
from grpo.orchestrator.ledger import Ledger
from grpo.orchestrator.loops.evaluate import EVALUATION
from grpo.orchestrator.scheduler import Scheduler
from grpo.orchestrator.startup import Ready
from grpo.orchestrator.workers.pool import WorkerPool
from grpo.transport.checkpoints import Checkpoints

REPORT_INTERVAL_S = 0.25


@dataclass(kw_only=True)
class Reporting:
    """The status file, and the ledger's database: what has changed, and what no checkpoint needs any more."""

    settings: OrchSettings
    ready: Ready
    first_version: int
    """The version to begin with."""
    scheduler: Scheduler
    sync: WeightSync
    sleep: SleepScheduler | None
    environments: Mapping[str, WorkerPool]
    hooks: Sequence[Hook]
    ledger: Ledger

    async def run(self) -> None:
        """Consumes: the state of all loops. Waits for: the clock. Unblocked by: it. Ends when: it is cancelled."""
        kept, checkpoints = list[int](), Checkpoints(self.ready.run)
        while True:
            await in_thread(self.ledger.changes())
            state, waiting_for = self._state()
            self.ready.status.set(state, step=self.scheduler.shipped + 1, waiting_for=waiting_for)
            steps = await in_thread(checkpoints.steps)
            if steps and steps != kept:
                await in_thread(self.ledger.forget, steps)
                kept = steps
            await asyncio.sleep(REPORT_INTERVAL_S)

    def _state(self) -> tuple[str, str | None]:
        """Returns what goes on, and whom it waits for."""
        scheduler, client = self.scheduler, self.sync.client
        if not client.pool.routed:
            return "waiting", f"inference servers: {', '.join(client.pool.out)}"
        if self.sleep is not None and self.sleep.waits_for is not None:
            return "waiting", self.sleep.waits_for
        environments = sorted(key for key, one in self.environments.items() if one.num_in_environment)
        if environments and client.num_in_flight == 0:
            return "scoring", f"environment {', '.join(environments)}"
        awaited = [hook.waits_for for hook in self.hooks if hook.waits_for is not None]
        if awaited and client.num_in_flight == 0:
            return "scoring", ", ".join(awaited)
        if scheduler.num_in_flight > 0:
            return "sampling", None
        if scheduler.blocks[EVALUATION]:
            return "evaluating", None
        if self.sync.loading is not None:
            version, servers = self.sync.loading
            return f"loading version {version}", f"inference servers: {', '.join(sorted(servers))}"
        if (live := scheduler.live) is None:
            return "waiting", f"trainer: version {self.first_version}"
        if scheduler.finished and live == self.settings.max_steps:
            return "evaluating", None
        if self.sleep is not None and scheduler.servers_wanted:  # the next batch waits for that
            return "evaluating", None
        return "waiting", f"trainer: version {live + 1}"

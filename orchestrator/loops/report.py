"""Says what goes on, for whoever looks from outside, and completes the trainer's checkpoints."""

import asyncio
from collections.abc import Mapping
from typing import Any

from orchestrator.background import in_thread
from orchestrator.loops.shared import Shared

REPORT_INTERVAL_S = 0.25


class Reporting:
    """The status file, the ledger's database, and the orchestrator's part of checkpoints."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._forgotten: int | None = None
        """The oldest checkpoint that a run can go back to, when artifacts were last forgotten."""

    async def run(self) -> None:
        """Consumes: the state of all loops. Waits for: the clock. Unblocked by: it. Ends when: it is cancelled."""
        shared = self._shared
        while True:
            await in_thread(shared.ledger.changes())
            state, waiting_for = self._state()
            shared.ready.status.set(state, step=shared.scheduler.shipped + 1, waiting_for=waiting_for)
            await self.complete_checkpoints()
            await asyncio.sleep(REPORT_INTERVAL_S)

    async def complete_checkpoints(self) -> None:
        """Adds the orchestrator's part to the trainer's checkpoints that lack it."""
        shared = self._shared
        await in_thread(shared.checkpoints.complete, self._state_after)
        oldest = min(shared.checkpoints.completed, default=None)
        if oldest is not None and oldest != self._forgotten:
            await in_thread(shared.ledger.forget_artifacts, oldest)
            self._forgotten = oldest

    def _state_after(self, step: int) -> Mapping[str, Any] | None:
        """What the orchestrator needs in order to go on after `step`."""
        shipped = self._shared.ledger.state_after(step)
        return None if shipped is None else shipped.state

    def _state(self) -> tuple[str, str | None]:
        """What goes on, and whom it waits for."""
        shared, scheduler = self._shared, self._shared.scheduler
        if not (members := shared.servers.membership).routed:
            return "waiting", f"inference servers: {', '.join(members.out)}"
        if shared.sleep is not None and shared.sleep.waits_for is not None:
            return "waiting", shared.sleep.waits_for
        environments = sorted(key for key, pool in shared.environments.items() if pool.num_at_code)
        if environments and shared.servers.num_in_flight == 0:
            return "scoring", f"environment {', '.join(environments)}"
        teacher, being_taught = shared.auxiliary.teaching, shared.auxiliary.num_being_taught
        if teacher is not None and being_taught and shared.servers.num_in_flight == 0:
            return "scoring", teacher.teacher.name
        if scheduler.num_in_flight > 0:
            return "sampling", None
        if scheduler.paused:
            return "evaluating", None
        if shared.relay.loading is not None:
            version, servers = shared.relay.loading
            return f"loading version {version}", f"inference servers: {', '.join(sorted(servers))}"
        if (live := scheduler.live) is None:
            return "waiting", f"trainer: version {shared.progress.first_version}"
        if scheduler.finished and live == shared.settings.max_steps:
            return "evaluating", None
        if shared.sleep is not None and shared.num_wanting:  # the next batch waits for that
            return "evaluating", None
        return "waiting", f"trainer: version {live + 1}"

"""Watches the servers' health, and lets as many groups be in flight as they can take."""

from collections.abc import Sequence

from orchestrator.concurrency import Concurrency
from orchestrator.loops.shared import Shared
from transport.http import ServerLoad


class Pacing:
    """The limit of groups in flight, where it is to follow the servers."""

    def __init__(self, shared: Shared) -> None:
        self._shared, settings = shared, shared.settings
        self._control: Concurrency | None = None
        if settings.min_concurrent_groups is not None:
            self._control = Concurrency(least=settings.min_concurrent_groups, most=settings.most_concurrent_groups)

    async def run(self) -> None:
        """Consumes: what the servers say about their load. Waits for: their answers. Unblocked by: servers. Ends when:
        it is cancelled."""
        await self._shared.health.watch(self._observe)

    def _observe(self, loads: Sequence[ServerLoad]) -> None:
        scheduler = self._shared.scheduler
        if self._control is not None:
            scheduler.limit(self._control.observe(loads, num_in_flight=scheduler.num_in_flight))
            self._shared.changed.ring()

"""What the loops share: the state machines that decide, the records of what happened, and the bell that wakes all."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from configs.orch import OrchSettings
from orchestrator.auxiliary import AuxiliaryLosses
from orchestrator.background import Bell, BusyClock
from orchestrator.buffer import Buffer
from orchestrator.filters import Filter
from orchestrator.inference.client import ServerPool
from orchestrator.inference.health import Health
from orchestrator.inference.sleep import SleepScheduler
from orchestrator.inference.weight_sync import Relay
from orchestrator.ledger import Ledger
from orchestrator.monitoring.recorder import Recorder
from orchestrator.monitoring.timeline import Timeline
from orchestrator.monitoring.trackers import Reporter
from orchestrator.resuming import Progress
from orchestrator.rollouts.engine import RolloutEngine
from orchestrator.samples import FinishedGroup
from orchestrator.scheduler import Scheduler
from orchestrator.startup import Ready
from orchestrator.workers.pool import WorkerPool
from transport.checkpoints import Checkpoints


@dataclass(slots=True, kw_only=True)
class Shared:
    """One run. Whoever changes what another loop waits for rings `changed`."""

    settings: OrchSettings
    ready: Ready
    progress: Progress
    """What an earlier process had done."""
    servers: ServerPool
    environments: Mapping[str, WorkerPool]
    """By key."""
    engine: RolloutEngine
    buffer: Buffer
    filters: list[Filter]
    auxiliary: AuxiliaryLosses
    """What is learned from besides rewards."""
    scheduler: Scheduler
    ledger: Ledger
    recorder: Recorder
    reporter: Reporter
    relay: Relay
    timeline: Timeline
    health: Health
    checkpoints: Checkpoints
    sleep: SleepScheduler | None
    """In sleep mode."""
    changed: Bell = field(default_factory=Bell)
    generating: BusyClock = field(default_factory=BusyClock)
    waiting: dict[int, FinishedGroup] = field(default_factory=dict)
    """Groups that wait for their batch, by number."""
    num_wanting: int = 0
    """Who wants the servers besides rollouts: evaluations that are due or going on, and a version that is loaded."""
    shipped_at_s: dict[int, float] = field(default_factory=dict)
    """When batches left whose version is not there yet, on the monotonic clock."""

    def since_shipped_s(self, step: int, *, least_s: float) -> float:
        """Seconds since batch `step` left, or since `least_s` on the monotonic clock where that is later. A batch of an
        earlier process is there already."""
        now_s = time.monotonic()
        shipped_s = self.shipped_at_s.get(step, least_s if step <= self.scheduler.shipped else now_s)
        return now_s - max(least_s, shipped_s)

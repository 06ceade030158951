"""Batches between threads of one process: the same promises without files."""

import threading
import time
from collections.abc import Sequence

from transport.batches.base import BatchReceiver, BatchSender, check_delivery
from transport.codec import decode, encode
from transport.errors import DeadlineError
from transport.types import MicroBatch


class MemoryBatches:
    """One channel; make a sender and a receiver for each rank from it."""

    def __init__(self, *, run_id: str) -> None:
        self.run_id = run_id
        self.steps: dict[int, list[bytes]] = {}
        self.last_step: int | None = None
        self.changed = threading.Condition()


class MemoryBatchSender(BatchSender):
    """Encodes as the other backends do, so that what arrives cannot alias what was sent."""

    def __init__(self, channel: MemoryBatches) -> None:
        self._channel = channel

    def send(self, step: int, ranks: Sequence[Sequence[MicroBatch]]) -> None:
        for rank, batches in enumerate(ranks):
            check_delivery(batches, run_id=self._channel.run_id, step=step, rank=rank)
        with self._channel.changed:
            self._channel.steps[step] = [encode(batches) for batches in ranks]
            self._channel.changed.notify_all()

    def finish(self, last_step: int) -> None:
        with self._channel.changed:
            self._channel.last_step = last_step
            self._channel.changed.notify_all()


class MemoryBatchReceiver(BatchReceiver):
    """Receives for one rank."""

    def __init__(self, channel: MemoryBatches, *, rank: int = 0) -> None:
        self._channel, self._rank = channel, rank

    def receive(self, step: int, *, timeout_s: float) -> tuple[MicroBatch, ...] | None:
        channel, deadline = self._channel, time.monotonic() + timeout_s
        with channel.changed:
            while step not in channel.steps:
                if channel.last_step is not None and step > channel.last_step:
                    return None
                if not channel.changed.wait(deadline - time.monotonic()):
                    raise DeadlineError(f"waited {timeout_s:g} s for the orchestrator to deliver batch {step}")
            data = channel.steps[step][self._rank]
        batches = decode(data)
        check_delivery(batches, run_id=channel.run_id, step=step, rank=self._rank)
        return batches

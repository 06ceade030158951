"""Batches between threads of one process: the same promises without files."""

import threading
import time
from collections.abc import Callable, Sequence

from transport.batches.base import BatchReceiver, BatchSender, check_delivery, nothing, too_slow
from transport.codec import decode, encode
from transport.errors import DeadlineError, MissingRankError
from transport.folders import Buffer
from transport.records import MicroBatch

_POLL_S = 0.2


class MemoryBatches:
    """One channel; make a sender and a receiver for each rank from it."""

    def __init__(self, *, run_id: str) -> None:
        self.run_id = run_id
        self.steps: dict[int, list[Buffer]] = {}
        self.received: dict[int, int] = {}
        self.checkpointed: dict[int, int] = {}
        self.last_step: int | None = None
        self.changed = threading.Condition()

    def unreceived(self) -> list[int]:
        """Steps that some rank has not received."""
        return [s for s, ranks in self.steps.items() if any(self.received.get(r, 0) < s for r in range(len(ranks)))]


class MemoryBatchSender(BatchSender):
    """Encodes as the other backends do, so that what arrives cannot alias what was sent."""

    def __init__(self, channel: MemoryBatches, *, hwm: int = 10, send_timeout_s: float = 1200.0) -> None:
        self._channel, self._hwm, self._send_timeout_s = channel, hwm, send_timeout_s

    def send(self, step: int, ranks: Sequence[Sequence[MicroBatch]]) -> None:
        for rank, batches in enumerate(ranks):
            check_delivery(batches, run_id=self._channel.run_id, step=step, rank=rank)
        channel = self._channel
        with channel.changed:
            if not channel.changed.wait_for(lambda: len(channel.unreceived()) < self._hwm, self._send_timeout_s):
                raise too_slow(self._send_timeout_s, channel.unreceived())
            channel.steps[step] = [encode(batches) for batches in ranks]
            channel.changed.notify_all()

    def finish(self, last_step: int) -> None:
        with self._channel.changed:
            self._channel.last_step = last_step
            self._channel.changed.notify_all()

    def close(self) -> None:
        """Nothing to end."""


class MemoryBatchReceiver(BatchReceiver):
    """Receives for one rank."""

    def __init__(self, channel: MemoryBatches, *, rank: int = 0) -> None:
        self._channel, self._rank = channel, rank

    def receive(
        self, step: int, *, timeout_s: float, check: Callable[[], None] = nothing
    ) -> tuple[MicroBatch, ...] | None:
        channel, deadline = self._channel, time.monotonic() + timeout_s
        with channel.changed:
            while step not in channel.steps:
                if channel.last_step is not None and step > channel.last_step:
                    return None
                check()
                channel.changed.wait(min(_POLL_S, max(0.0, deadline - time.monotonic())))
                if time.monotonic() >= deadline and step not in channel.steps:
                    raise DeadlineError(f"waited {timeout_s:g} s for the orchestrator to deliver batch {step}")
            ranks = channel.steps[step]
        if self._rank >= len(ranks):
            raise MissingRankError(step, len(ranks), self._rank)
        batches = decode(ranks[self._rank])
        check_delivery(batches, run_id=channel.run_id, step=step, rank=self._rank)
        with channel.changed:
            channel.received[self._rank] = max(channel.received.get(self._rank, 0), step)
            channel.changed.notify_all()
        return batches

    def checkpointed(self, step: int) -> None:
        channel = self._channel
        with channel.changed:
            channel.checkpointed[self._rank] = step
            num_ranks = max((len(ranks) for ranks in channel.steps.values()), default=1)
            passed = min(channel.checkpointed.get(rank, 0) for rank in range(num_ranks))
            for old in [old for old in channel.steps if old <= passed]:
                del channel.steps[old]

    def resumed(self, step: int) -> None:
        with self._channel.changed:
            self._channel.received[self._rank] = step
        self.checkpointed(step)

    def close(self) -> None:
        """Nothing to end."""

"""Batches over a folder that both programs see, and what every batch channel promises.

- The disk is the truth: a step's batch lies in the run's `batches` folder, whole or not at all, before any trainer can
  have it, and until the trainer has a complete checkpoint of it.
- The receiver asks for the step that it wants, so that a restart of either side repeats nothing and skips nothing.
  Receiving a step twice equals receiving it once.
- A batch that is corrupt, or of another run, is an error.
- A sender that is too far ahead waits; nothing is dropped.
- Every wait has a deadline, and the error names who was waited for.

Over a folder each rank says in a small file which step it has; the sender looks there before it writes more.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import numpy as np
from grpo.transport.batches.store import StepStore, check_belongs
from grpo.transport.codec import encode
from grpo.transport.errors import DeadlineError
from grpo.transport.folders import remove_leftovers
from grpo.transport.records import MicroBatch, require
from numpy.typing import NDArray

_POLL_S = 0.005


def nothing() -> None:
    """Checks nothing."""


class Closing:
    """A context manager that closes itself."""

    def close(self) -> None:
        """Ends threads and sockets."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class BatchSender(Closing):
    """The orchestrator's end; a context manager."""

    def __init__(
        self,
        folder: Path,
        *,
        run_id: str,
        num_ranks: int = 1,
        hwm: int = 10,
        send_timeout_s: float = 1200.0,
        checkpointed: Callable[[], int] = lambda: 0,
    ) -> None:
        """`folder` is the run's `batches` folder. `checkpointed` returns the newest step with a complete checkpoint of
        the trainer; each new batch replaces one up to it. The sender waits for `num_ranks` ranks."""
        self._store, self._num_ranks, self._checkpointed = StepStore(folder, run_id=run_id), num_ranks, checkpointed
        self._hwm, self._send_timeout_s, self._memory = hwm, send_timeout_s, np.empty(0, np.uint8)
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)

    def send(self, step: int, ranks: Sequence[Sequence[MicroBatch]]) -> None:
        """Delivers the micro-batches of `step`, one sequence for each data-parallel rank.

        Returns when they are on disk, not when they were received. Raises `DeadlineError` where `hwm` batches wait
        already and the trainer receives none in time, `StorageError` for the disk, `CorruptError` or `StaleRunError`
        for micro-batches of another step, rank or run.
        """
        for rank, batches in enumerate(ranks):
            require(len(batches) > 0, f"rank {rank} has no micro-batches in step {step}")
            check_belongs(batches[0], self._store.run_id, step, rank)
        self._wait_for_room()
        messages = [lambda batches=batches: (encode(batches, memory=self._memory_of),) for batches in ranks]
        self._store.write(step, messages, checkpointed=self._checkpointed())

    def finish(self, last_step: int) -> None:
        """Says that no step after `last_step` will come."""
        self._store.write_finished(last_step)

    def received(self) -> int:
        """Returns the newest step that every rank has received, 0 for none."""
        return min(self._store.received(rank) for rank in range(self._num_ranks))

    def _memory_of(self, num_bytes: int) -> NDArray[np.uint8]:
        """Returns the memory that every message is encoded into, one at a time: the system clears new memory first, and
        that takes longer than all else."""
        if len(self._memory) < num_bytes:
            self._memory = np.empty(num_bytes, np.uint8)
        return self._memory[:num_bytes]

    def _wait_for_room(self) -> None:
        deadline = time.monotonic() + self._send_timeout_s
        while len(waiting := self._unreceived()) >= self._hwm:
            if time.monotonic() > deadline:
                waited = f"waited {self._send_timeout_s:g} s for the trainer to receive batch {waiting[0]}"
                raise DeadlineError(f"{waited}; {len(waiting)} batches wait for it already")
            time.sleep(_POLL_S)

    def _unreceived(self) -> list[int]:
        received = self.received()
        return [step for step in self._store.steps() if step > received]


class BatchReceiver(Closing, ABC):
    """The end of one data-parallel rank of the trainer; a context manager."""

    @abstractmethod
    def receive(
        self, step: int, *, timeout_s: float, check: Callable[[], None] = nothing
    ) -> tuple[MicroBatch, ...] | None:
        """Returns the rank's micro-batches of `step`, or None where the orchestrator finished before it.

        Raises `DeadlineError` after `timeout_s` seconds, `CorruptError`, and `StaleRunError` for a batch of another
        run. `check` is called several times a second while waiting, and ends the wait by raising.
        """


class FilesystemBatchReceiver(BatchReceiver):
    """Reads from the store, looking for a step until it is there."""

    def __init__(self, folder: Path, *, run_id: str, rank: int = 0, num_ranks: int = 1) -> None:
        """`folder` is the run's `batches` folder."""
        self._store, self._rank, self._num_ranks = StepStore(folder, run_id=run_id), rank, num_ranks

    def receive(
        self, step: int, *, timeout_s: float, check: Callable[[], None] = nothing
    ) -> tuple[MicroBatch, ...] | None:
        deadline = time.monotonic() + timeout_s
        while (batches := self._store.read(step, self._rank, self._num_ranks)) is None:
            if self._store.finished_before(step):
                return None
            if time.monotonic() > deadline:
                waited = f"waited {timeout_s:g} s for the orchestrator to deliver batch {step}"
                raise DeadlineError(f"{waited} in {self._store.folder}")
            check()
            time.sleep(_POLL_S)
        for part in {batch.rank for batch in batches}:
            self._store.write_received(part, step)
        return batches

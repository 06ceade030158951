"""What every batch channel promises.

- The disk is the truth: a step's batch lies in the run's `batches` folder, whole or not at all, before any trainer can
  have it, and until the trainer has a complete checkpoint of it.
- The receiver asks for the step that it wants, so that a restart of either side repeats nothing and skips nothing.
  Receiving a step twice equals receiving it once.
- A batch that is corrupt, or of another run, is an error.
- A sender that is too far ahead waits; nothing is dropped.
- Every wait has a deadline, and the error names who was waited for.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from transport.batches.store import StepStore
from transport.errors import DeadlineError
from transport.records import MicroBatch

POLL_S = 0.005


def nothing() -> None:
    """A check that finds nothing wrong."""


class _Channel(ABC):
    @abstractmethod
    def close(self) -> None:
        """Ends the channel's threads and sockets."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class BatchSender(_Channel):
    """The orchestrator's end; a context manager."""

    durable = True
    """Whether what is sent survives a power cut."""

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
        """`folder` is the run's `batches` folder. `checkpointed` gives the newest step of which the trainer has a
        complete checkpoint; batches up to it are removed, and `num_ranks` ranks are waited for."""
        self._store, self._num_ranks = StepStore(folder, run_id=run_id), num_ranks
        self._hwm, self._send_timeout_s = hwm, send_timeout_s
        self._checkpointed = checkpointed
        self._store.prepare()

    def send(self, step: int, ranks: Sequence[Sequence[MicroBatch]]) -> None:
        """Delivers the micro-batches of `step`, one sequence for each data-parallel rank.

        Returns when the step is on disk, which is not when it was received. Raises `DeadlineError` where `hwm` batches
        wait already and the trainer receives none in time, `StorageError` for the disk.
        """
        messages = self._store.encode(step, ranks)
        self._wait_for_room()
        self._store.write(step, messages, durable=self.durable)
        self._store.remove_up_to(self._checkpointed())

    def finish(self, last_step: int) -> None:
        """Says that no step after `last_step` will come."""
        self._store.write_finished(last_step)

    @abstractmethod
    def received(self) -> int:
        """Returns the newest step that every rank has received, 0 for none."""

    def _wait_for_room(self) -> None:
        deadline = time.monotonic() + self._send_timeout_s
        while len(waiting := self._unreceived()) >= self._hwm:
            if time.monotonic() > deadline:
                waited = f"waited {self._send_timeout_s:g} s for the trainer to receive batch {waiting[0]}"
                raise DeadlineError(f"{waited}; {len(waiting)} batches wait for it already")
            time.sleep(POLL_S)

    def _unreceived(self) -> list[int]:
        received = self.received()
        return [step for step in self._store.steps() if step > received]


class BatchReceiver(_Channel):
    """The end of one data-parallel rank of the trainer; a context manager."""

    @abstractmethod
    def receive(
        self, step: int, *, timeout_s: float, check: Callable[[], None] = nothing
    ) -> tuple[MicroBatch, ...] | None:
        """Returns the rank's micro-batches of `step`, or None where the orchestrator finished before it.

        Raises `DeadlineError` after `timeout_s` seconds, `CorruptError`, and `StaleRunError` for a batch of another
        run. `check` is called several times a second while waiting, and ends the wait by raising.
        """

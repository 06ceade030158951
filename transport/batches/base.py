"""What every batch channel promises.

- A step's batch is received whole or not at all; receiving it twice equals receiving it once.
- The receiver asks for the step it wants next, so a restart of either side repeats nothing and skips nothing: after a
  restart the trainer asks for the step after its last complete checkpoint, and the sender still has it, because a step
  is kept until `checkpointed` has passed it.
- A corrupt batch is set aside under its own name and asked for again; one of another run is refused.
- A sender that is too far ahead is slowed down; nothing is dropped.
- Every wait has a deadline, and the error names who was waited for.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from transport.errors import CorruptError, DeadlineError, StaleRunError
from transport.records import MicroBatch


def nothing() -> None:
    """A check that finds nothing wrong."""


class BatchSender(ABC):
    """The orchestrator's end; a context manager."""

    @abstractmethod
    def send(self, step: int, ranks: Sequence[Sequence[MicroBatch]]) -> None:
        """Delivers the micro-batches of `step`, one sequence for each data-parallel rank.

        Returns when the step is safe (a crash of this process no longer loses it), which is not when it was received.
        Raises `DeadlineError` where the trainer takes too long to make room, `StorageError` for the disk.
        """

    @abstractmethod
    def finish(self, last_step: int) -> None:
        """Says that no step after `last_step` will come."""

    @abstractmethod
    def close(self) -> None:
        """Ends the channel's threads and sockets."""

    def __enter__(self) -> "BatchSender":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class BatchReceiver(ABC):
    """The end of one data-parallel rank of the trainer; a context manager."""

    @abstractmethod
    def receive(
        self, step: int, *, timeout_s: float, check: Callable[[], None] = nothing
    ) -> tuple[MicroBatch, ...] | None:
        """The rank's micro-batches of `step`, or None where the orchestrator finished before it.

        Raises `DeadlineError` after `timeout_s` seconds, and `StaleRunError` for a batch of another run. `check` is
        called several times a second while waiting, and ends the wait by raising.
        """

    @abstractmethod
    def checkpointed(self, step: int) -> None:
        """Says that a complete checkpoint holds `step`: no step up to it will be asked for again."""

    @abstractmethod
    def resumed(self, step: int) -> None:
        """Says that this trainer goes on from the checkpoint of `step`, which may be before what an earlier process
        has received, or has said to be in a checkpoint. A step that the sender has removed comes only if it is sent
        again; a backend with processes warns of that."""

    @abstractmethod
    def close(self) -> None:
        """Ends the channel's threads and sockets."""

    def __enter__(self) -> "BatchReceiver":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_delivery(batches: Sequence[MicroBatch], *, run_id: str, step: int, rank: int) -> None:
    """Raises unless `batches` are all that `rank` trains in `step` of this run."""
    for position, batch in enumerate(batches):
        if batch.run_id != run_id:
            raise StaleRunError(f"micro-batch of run {batch.run_id}, this is run {run_id}; start the programs together")
        received = (batch.step, batch.rank, batch.index, batch.num_micro_batches)
        if received != (step, rank, position, len(batches)):
            raise CorruptError(
                f"micro-batch (step, rank, index, of) = {received}, expected {(step, rank, position, len(batches))}"
            )


def too_slow(timeout_s: float, unreceived: Sequence[int]) -> DeadlineError:
    """The error of a sender that is at its high-water mark for too long."""
    waited = f"waited {timeout_s:g} s for the trainer to receive batch {min(unreceived)}"
    return DeadlineError(f"{waited}; {len(unreceived)} batches wait for it already")

"""What every batch channel promises.

A step's batch is received whole or not at all, in order, and receiving it twice equals receiving it once. The sender
ends the run with `finish`, after which `receive` answers None for every later step.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from transport.errors import CorruptError, StaleRunError
from transport.types import MicroBatch


class BatchSender(ABC):
    """The orchestrator's end."""

    @abstractmethod
    def send(self, step: int, ranks: Sequence[Sequence[MicroBatch]]) -> None:
        """Delivers the micro-batches of `step`, one sequence for each data-parallel rank."""

    @abstractmethod
    def finish(self, last_step: int) -> None:
        """Says that no step after `last_step` will come."""


class BatchReceiver(ABC):
    """The end of one data-parallel rank of the trainer."""

    @abstractmethod
    def receive(self, step: int, *, timeout_s: float) -> tuple[MicroBatch, ...] | None:
        """The rank's micro-batches of `step`, or None where the orchestrator finished before it.

        Raises `DeadlineError` after `timeout_s` seconds, `CorruptError` and `StaleRunError` for a batch that must not
        be trained.
        """


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

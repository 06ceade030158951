"""Batches over a folder that both programs see. Each rank says in a small file, `received/rank_0.json`, which step it
has; the sender looks there before it writes more."""

import time
from collections.abc import Callable
from pathlib import Path

from transport.batches.base import POLL_S, BatchReceiver, BatchSender, nothing
from transport.batches.store import StepStore
from transport.errors import CorruptError, DeadlineError
from transport.folders import write_atomic
from transport.records import MicroBatch, Natural, Record

_RECEIVED = "received"


class Received(Record, frozen=True, kw_only=True):
    """The step that a rank has received last."""

    run_id: str
    step: Natural


class FilesystemBatchSender(BatchSender):
    """Writes into the store, and nothing else."""

    def received(self) -> int:
        return min(self._received_by(rank) for rank in range(self._num_ranks))

    def _received_by(self, rank: int) -> int:
        try:
            said = Received.from_json((self._store.folder / _RECEIVED / f"rank_{rank}.json").read_bytes())
        except (OSError, CorruptError):
            return 0
        return said.step if said.run_id == self._store.run_id else 0

    def close(self) -> None:
        """Does nothing: there are neither threads nor sockets."""


class FilesystemBatchReceiver(BatchReceiver):
    """Reads from the store, looking for a step until it is there."""

    def __init__(self, folder: Path, *, run_id: str, rank: int = 0) -> None:
        """`folder` is the run's `batches` folder."""
        self._store, self._rank = StepStore(folder, run_id=run_id), rank
        self._said = folder / _RECEIVED / f"rank_{rank}.json"
        self._said.parent.mkdir(parents=True, exist_ok=True)

    def receive(
        self, step: int, *, timeout_s: float, check: Callable[[], None] = nothing
    ) -> tuple[MicroBatch, ...] | None:
        deadline = time.monotonic() + timeout_s
        while (batches := self._store.read(step, self._rank)) is None:
            if self._store.finished_before(step):
                return None
            if time.monotonic() > deadline:
                waited = f"waited {timeout_s:g} s for the orchestrator to deliver batch {step}"
                raise DeadlineError(f"{waited} in {self._store.folder}")
            check()
            time.sleep(POLL_S)
        said = Received(run_id=self._store.run_id, step=step)
        write_atomic(self._said, said.to_json(), durable=False)
        return batches

    def close(self) -> None:
        """Does nothing: there are neither threads nor sockets."""

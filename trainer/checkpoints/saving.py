"""When checkpoints are due, and their writing beside the next step."""

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

from configs.train import CheckpointSettings
from trainer.checkpoints.files import Checkpoint, CheckpointStore
from trainer.checkpoints.state import TrainingState
from trainer.parallel import Ranks
from transport.errors import DeadlineError
from transport.status import StatusFile

log = logging.getLogger(__name__)

CLOSE_S = 10.0
"""Seconds that the end waits for a checkpoint that is being written."""
Metrics = Mapping[str, float] | None


class Checkpointing:
    """Writes the main rank's checkpoints one at a time, and tells the batch channel which step a complete one holds.

    All ranks must call `after_step`, `now` and `finish` alike.
    """

    def __init__(
        self,
        settings: CheckpointSettings,
        store: CheckpointStore,
        state: TrainingState,
        *,
        base_model: str,
        run_id: str,
        recorded: Mapping[str, Any],
        ranks: Ranks,
        status: StatusFile,
        timeout_s: float,
    ) -> None:
        """`recorded` are all settings, as JSON. A checkpoint may take `timeout_s` seconds more where it is waited
        for."""
        self._settings, self._store, self._state = settings, store, state
        self._base_model, self._run_id, self._recorded = base_model, run_id, recorded
        self._ranks, self._status, self._timeout_s = ranks, status, timeout_s
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._newest = 0  # step
        self._hold_s = self._write_s = 0.0

    @property
    def times_s(self) -> dict[str, float]:
        """Of the newest checkpoint: what it held up the training, and what its writing beside that took."""
        if self._settings.interval is None:
            return {}
        return {"time/checkpoint_s": self._hold_s, "time/write_checkpoint_s": self._write_s}

    def resumed_at(self, step: int) -> None:
        """The state is that of the checkpoint of `step`, or, with 0, the one that a run begins with."""
        self._newest = step

    def after_step(self, step: int, metrics: Metrics) -> None:
        """Begins a checkpoint where one is due, and tells of one that is complete. Raises `StorageError` where one
        could not be written."""
        if self._settings.interval is None:
            return
        self.check()
        if step % self._settings.interval == 0:
            self._begin(step, metrics)

    def finish(self, step: int, metrics: Metrics) -> None:
        """Returns when everything up to the last step is in complete checkpoints."""
        if self._settings.interval is not None and step != self._newest:
            self._begin(step, metrics)
        self._wait()

    def now(self, step: int, metrics: Metrics) -> None:
        """Returns when the state after `step` is in a complete checkpoint, whether one was due or not."""
        if step != self._newest or step == 0:
            self._begin(step, metrics)
        self._wait()

    def close(self) -> None:
        """Returns when the checkpoint that is being written is complete, or has failed, or after `CLOSE_S` seconds;
        then it is not visible."""
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def check(self) -> None:
        """Raises the error of a checkpoint that could not be written."""
        if self._error is not None:
            raise self._error

    def _begin(self, step: int, metrics: Metrics) -> None:
        started_s = time.perf_counter()
        self._wait()  # so that at most one copy of the state is held
        parts = self._state.parts()
        self._newest = step
        if self._ranks.is_main and step not in self._store.steps():
            checkpoint = Checkpoint(
                run_id=self._run_id,
                step=step,
                base_model=self._base_model,
                settings=self._recorded,
                metrics=metrics,
                parts=parts,
            )
            self._thread = threading.Thread(target=self._write, args=(checkpoint,), name="checkpoint", daemon=True)
            self._thread.start()
        self._hold_s = time.perf_counter() - started_s

    def _write(self, checkpoint: Checkpoint) -> None:
        started_s = time.perf_counter()
        try:
            self._store.write(checkpoint)
            self._store.remove_old(keep_last=self._settings.keep_last, keep_interval=self._settings.keep_interval)
        except Exception as error:  # raised again where the trainer can see it
            self._error = error
        self._write_s = time.perf_counter() - started_s

    def _wait(self) -> None:
        """For the checkpoint that is being written. Raises its error, and `DeadlineError`."""
        if self._thread is not None and self._thread.is_alive():
            folder = self._store.path(self._newest)
            self._status.set("waiting", step=self._newest, waiting_for=f"the checkpoint in {folder}")
            self._thread.join(self._timeout_s)
            if self._thread.is_alive():
                raise DeadlineError(
                    f"waited {self._timeout_s:g} s for the checkpoint to be written to {folder}; see whether its disk "
                    "answers, or raise wait_timeout_s"
                )
            self._status.set("checkpointing", step=self._newest)
        self.check()

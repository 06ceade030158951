"""Batches over a folder that both programs see.

The sender writes one folder a step. Each receiver keeps one small file, `acks/rank_0.json`: which step it received
last, which a checkpoint holds, and which it wants again because what it found was corrupt. The sender's thread reads
those files, writes wanted steps again, and removes steps that every rank has passed.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from transport import faults
from transport.batches.base import BatchReceiver, BatchSender, nothing, too_slow
from transport.batches.serving import Serving
from transport.batches.store import StepStore
from transport.errors import CorruptError, DeadlineError, SchemaVersionError
from transport.folders import Buffer, write_atomic
from transport.records import MicroBatch, parse_json
from transport.watch import FolderWatch

logger = logging.getLogger(__name__)
_ACKS = "acks"
MAX_ATTEMPTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ack:
    """What one rank has said last; step 0 stands for none."""

    run_id: str
    received: int = 0
    checkpointed: int = 0
    wanted: int = 0
    attempt: int = 0

    def write(self, path: Path) -> None:
        fields = {name: getattr(self, name) for name in self.__slots__}
        write_atomic(path, json.dumps(fields).encode(), durable=False)


def _read_ack(path: Path, run_id: str) -> _Ack:
    try:
        fields = parse_json(path.read_bytes(), path.name)
        ack = _Ack(**fields)
    except (FileNotFoundError, TypeError, CorruptError):
        return _Ack(run_id=run_id)
    return ack if ack.run_id == run_id else _Ack(run_id=run_id)


def acks_after(folder: Path, step: int, *, run_id: str) -> list[Path]:
    """The files of ranks that have said something of steps after `step`. Where those are made anew, a sender would
    remove what it sends as what a checkpoint has passed. `folder` is the run's `batches` folder."""
    acks = {path: _read_ack(path, run_id) for path in (folder / _ACKS).glob("rank_*.json")}
    return [path for path, ack in acks.items() if max(ack.received, ack.checkpointed, ack.wanted) > step]


class FilesystemBatchSender(BatchSender):
    """Writes below `folder`, the run's `batches` folder."""

    def __init__(
        self, folder: Path, *, run_id: str, num_ranks: int = 1, hwm: int = 10, send_timeout_s: float = 1200.0
    ) -> None:
        """`num_ranks` says before the first `send` on how many ranks the removal of an earlier sender's steps waits."""
        self._store, self._hwm, self._send_timeout_s = StepStore(folder, run_id=run_id), hwm, send_timeout_s
        self._store.prepare()
        self._acks = folder / _ACKS
        self._acks.mkdir(exist_ok=True)
        self._changed = threading.Condition()
        self._unreceived: dict[int, list[Buffer]] = {}
        self._attempts: dict[int, int] = {}
        self._num_ranks = num_ranks
        self._watch = FolderWatch(self._acks)
        self._serving = Serving(self._serve, name="batch-acks", patience_s=send_timeout_s, changed=self._changed)
        self._serving.start()

    def send(self, step: int, ranks: Sequence[Sequence[MicroBatch]]) -> None:
        messages = self._store.encode(step, ranks)
        with self._changed:
            self._changed.wait_for(
                lambda: self._serving.error is not None or len(self._unreceived) < self._hwm, self._send_timeout_s
            )
            self._serving.check()
            if len(self._unreceived) >= self._hwm:
                raise too_slow(self._send_timeout_s, list(self._unreceived))
            self._store.write(step, messages, attempt=self._attempts.get(step, 0))
            self._unreceived[step] = messages
            self._num_ranks = len(ranks)
        faults.point("batch.sent")

    def finish(self, last_step: int) -> None:
        self._serving.check()
        self._store.write_finished(last_step)

    def close(self) -> None:
        self._serving.close()
        self._watch.close()

    def _serve(self) -> None:
        """Consumes the receivers' acks; waits for changes of their folder, at most a quarter of a second; unblocked by
        them."""
        self._watch.wait(timeout_s=0.25)
        self._read_acks()

    def _read_acks(self) -> None:
        with self._changed:
            paths = [self._acks / f"rank_{rank}.json" for rank in range(self._num_ranks)]
            acks = [_read_ack(path, self._store.run_id) for path in paths]
            for ack in acks:
                self._send_again(ack)
            for step in [step for step in self._unreceived if step <= min(ack.received for ack in acks)]:
                del self._unreceived[step]
            self._changed.notify_all()
            self._store.remove_up_to(min(ack.checkpointed for ack in acks))

    def _send_again(self, ack: _Ack) -> None:
        if ack.attempt <= self._attempts.get(ack.wanted, 0):
            return
        if ack.wanted in self._store.steps():
            pass  # it has come since: readers move aside what is corrupt, and ask then
        elif ack.wanted in self._unreceived:
            self._store.write(ack.wanted, self._unreceived[ack.wanted], attempt=ack.attempt)
            logger.warning("batch %d was corrupt when the trainer read it; sent attempt %d", ack.wanted, ack.attempt)
        else:
            logger.error(
                "batch %d was corrupt when the trainer read it, and is not in this process's memory; end both "
                "programs and resume them: it will be made anew",
                ack.wanted,
            )
        self._attempts[ack.wanted] = ack.attempt


class FilesystemBatchReceiver(BatchReceiver):
    """Reads below `folder`, the run's `batches` folder."""

    def __init__(self, folder: Path, *, run_id: str, rank: int = 0) -> None:
        self._store, self._rank = StepStore(folder, run_id=run_id), rank
        self._path = folder / _ACKS / f"rank_{rank}.json"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._ack = _read_ack(self._path, run_id)
        self._watch = FolderWatch(folder)  # for all steps: ending a watch takes the kernel tens of milliseconds

    def receive(
        self, step: int, *, timeout_s: float, check: Callable[[], None] = nothing
    ) -> tuple[MicroBatch, ...] | None:
        deadline, corrupt, asked = time.monotonic() + timeout_s, "", False
        num_before = self._store.num_quarantined(step)
        while True:
            try:
                batches = self._store.read(step, self._rank)
            except (CorruptError, SchemaVersionError) as error:
                aside = self._store.quarantine(step, error)
                attempt = self._store.num_quarantined(step)
                if attempt - num_before >= MAX_ATTEMPTS:
                    raise CorruptError(f"batch {step} was corrupt {MAX_ATTEMPTS} times, lastly: {error}") from error
                corrupt = f"; what came was corrupt ({error}), lies in {aside}, and was asked for again"
                logger.error("batch %d is corrupt, asking for it again; it lies in %s: %s", step, aside, error)
                self._say(wanted=step, attempt=attempt)
                asked = True
                continue
            if batches is not None:
                faults.point("batch.received")
                self._say(received=step)
                faults.point("batch.acknowledged")
                return batches
            if self._store.finished_before(step):
                return None
            if num_before and not asked:  # by a process that may have ended before it asked again
                self._say(wanted=step, attempt=num_before)
                asked = True
            if (left_s := deadline - time.monotonic()) <= 0:
                waited = f"waited {timeout_s:g} s for the orchestrator to deliver batch {step}"
                raise DeadlineError(f"{waited} in {self._store.folder}{corrupt}")
            check()
            self._watch.wait(left_s)

    def checkpointed(self, step: int) -> None:
        self._say(checkpointed=step)

    def resumed(self, step: int) -> None:
        if (passed := self._ack.checkpointed) > step:
            logger.warning(
                "an earlier process had a checkpoint of step %d, and the sender may have removed the batches up to it; "
                "those after step %d come only if it sends them again",
                *(passed, step),
            )
        self._ack = _Ack(run_id=self._store.run_id)  # a sender would remove what comes again and an ack has passed
        self._say(received=step, checkpointed=step)

    def close(self) -> None:
        self._watch.close()

    def _say(self, *, received: int = 0, checkpointed: int = 0, wanted: int = 0, attempt: int = 0) -> None:
        self._ack = _Ack(
            run_id=self._store.run_id,
            received=max(self._ack.received, received),
            checkpointed=max(self._ack.checkpointed, checkpointed),
            wanted=wanted,
            attempt=attempt,
        )
        self._ack.write(self._path)

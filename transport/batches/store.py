"""Steps on disk: `step_000012/` with `rank_0.msgpack` …, `manifest.json`, `STABLE`."""

import json
import os
import shutil
import uuid
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from transport import faults
from transport.batches.base import check_delivery
from transport.codec import decode, encode
from transport.errors import CorruptError, MissingRankError, StaleRunError, TransportError
from transport.folders import (
    Buffer,
    checksum_entry,
    read_checked,
    read_manifest,
    remove_leftovers,
    step_folder,
    write_atomic,
    write_folder,
)
from transport.records import BatchManifest, MicroBatch, parse_json

_FINISHED = "finished.json"
QUARANTINE = "quarantine"
_MAX_SPARE = 10


class StepStore:
    """The steps of one run below `folder`. One process writes, one reader a rank reads."""

    def __init__(self, folder: Path, *, run_id: str) -> None:
        self.folder, self.run_id = folder, run_id
        self._spare: deque[Path] = deque()
        self._removed_up_to = 0

    def prepare(self) -> None:
        """Makes the folder, and removes what a killed writer left half done. For the writer."""
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.folder)

    def encode(self, step: int, ranks: Sequence[Sequence[MicroBatch]]) -> list[Buffer]:
        """One message a rank; refuses micro-batches of another step, rank or run."""
        for rank, batches in enumerate(ranks):
            check_delivery(batches, run_id=self.run_id, step=step, rank=rank)
        return [encode(batches) for batches in ranks]

    def write(self, step: int, messages: Sequence[Buffer], *, attempt: int = 0, durable: bool = True) -> None:
        """Writes a step whole. A step that is there already is replaced. `durable` also survives a power cut."""
        files = {_file_name(rank): message for rank, message in enumerate(messages)}
        entries = {name: checksum_entry(message) for name, message in files.items()}
        manifest = BatchManifest(run_id=self.run_id, step=step, files=entries)
        over = self._spare.popleft() if self._spare else None
        write_folder(step_folder(self.folder, step), files, manifest.to_json(), durable=durable, over=over)

    def read(self, step: int, rank: int) -> tuple[MicroBatch, ...] | None:
        """One rank's micro-batches, or None where the step is not there. Raises `CorruptError`, `StaleRunError`."""
        message = self.read_message(step, rank)
        if message is None:
            return None
        batches = decode(message)
        check_delivery(batches, run_id=self.run_id, step=step, rank=rank)
        return batches

    def read_message(self, step: int, rank: int) -> bytes | None:
        """One rank's message, checked against the manifest, or None where the step is not there."""
        folder = step_folder(self.folder, step)
        if not folder.exists():
            return None
        manifest = BatchManifest.from_json(read_manifest(folder))
        if manifest.run_id != self.run_id:
            raise StaleRunError(f"{folder} belongs to run {manifest.run_id}, this is run {self.run_id}")
        if manifest.step != step:
            raise CorruptError(f"{folder} holds step {manifest.step}, expected {step}")
        name = _file_name(rank)
        if name not in manifest.files:
            raise MissingRankError(step, len(manifest.files), rank)
        return read_checked(folder, name, manifest.files[name])

    def quarantine(self, step: int, error: TransportError) -> Path:
        """Moves a corrupt step aside, with the error beside it, and says where to."""
        aside = self.folder / QUARANTINE / f"step_{step:06d}.{uuid.uuid4().hex[:8]}"
        aside.parent.mkdir(exist_ok=True)
        try:
            step_folder(self.folder, step).rename(aside)
            (aside / "error.txt").write_text(f"{type(error).__name__}: {error}\n")
        except FileNotFoundError:  # another rank was quicker
            return aside
        faults.point("batch.quarantined")
        return aside

    def num_quarantined(self, step: int) -> int:
        """How often `step` came corrupt."""
        return len(list((self.folder / QUARANTINE).glob(f"step_{step:06d}.*")))

    def steps(self) -> list[int]:
        """The steps that are there, ascending."""
        names = os.listdir(self.folder)  # noqa: PTH208 (called at every checkpoint; a Path for each name is slow)
        return sorted(int(name[5:]) for name in names if name.startswith("step_") and name[5:].isdigit())

    def remove_up_to(self, step: int) -> None:
        """Removes the steps up to `step`; the last ones' files are kept to be overwritten. Asking for the same again
        takes no time, however many steps there are."""
        if step == self._removed_up_to:
            return
        for old in (old for old in self.steps() if old <= step):
            retired = self.folder / f".step_{old:06d}.{uuid.uuid4().hex}.old"
            step_folder(self.folder, old).rename(retired)
            self._spare.append(retired)
            faults.point("batch.removed")
            if len(self._spare) > _MAX_SPARE:
                shutil.rmtree(self._spare.popleft(), ignore_errors=True)
        self._removed_up_to = step

    def remove_finished(self) -> None:
        """Takes back that no more steps will come."""
        (self.folder / _FINISHED).unlink(missing_ok=True)

    def write_finished(self, last_step: int) -> None:
        """Says that no step after `last_step` will come."""
        write_atomic(self.folder / _FINISHED, json.dumps({"run_id": self.run_id, "last_step": last_step}).encode())

    def finished_before(self, step: int) -> bool:
        """Whether the sender has said that `step` will not come."""
        try:
            fields = parse_json((self.folder / _FINISHED).read_bytes(), _FINISHED)
        except FileNotFoundError:
            return False
        last_step = fields.get("last_step")
        return fields.get("run_id") == self.run_id and isinstance(last_step, int) and step > last_step


def _file_name(rank: int) -> str:
    return f"rank_{rank}.msgpack"

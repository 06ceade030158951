"""Batches as one folder a step: `rank_0.msgpack` …, `manifest.json`, `STABLE`."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

from transport.batches.base import BatchReceiver, BatchSender, check_delivery
from transport.codec import decode, encode
from transport.errors import CorruptError, DeadlineError, StaleRunError
from transport.files import file_entry, read_checked, read_manifest, step_folder, write_atomic, write_folder
from transport.types import BatchManifest, MicroBatch, parse_json

_FINISHED = "finished.json"
_POLL_S = 0.01


class FilesystemBatchSender(BatchSender):
    """Writes below `folder`, the run's `batches` folder."""

    def __init__(self, folder: Path, *, run_id: str) -> None:
        self._folder, self._run_id = folder, run_id
        folder.mkdir(parents=True, exist_ok=True)

    def send(self, step: int, ranks: Sequence[Sequence[MicroBatch]]) -> None:
        for rank, batches in enumerate(ranks):
            check_delivery(batches, run_id=self._run_id, step=step, rank=rank)
        files = {f"rank_{rank}.msgpack": encode(batches) for rank, batches in enumerate(ranks)}
        entries = {name: file_entry(data) for name, data in files.items()}
        manifest = BatchManifest(run_id=self._run_id, step=step, attempt=0, files=entries)
        write_folder(step_folder(self._folder, step), files, manifest.to_json())

    def finish(self, last_step: int) -> None:
        fields = {"run_id": self._run_id, "last_step": last_step}
        write_atomic(self._folder / _FINISHED, json.dumps(fields).encode())


class FilesystemBatchReceiver(BatchReceiver):
    """Reads below `folder`, the run's `batches` folder."""

    def __init__(self, folder: Path, *, run_id: str, rank: int = 0) -> None:
        self._folder, self._run_id, self._rank = folder, run_id, rank

    def receive(self, step: int, *, timeout_s: float) -> tuple[MicroBatch, ...] | None:
        folder, deadline = step_folder(self._folder, step), time.monotonic() + timeout_s
        while not folder.exists():
            if self._finished_before(step):
                return None
            if time.monotonic() > deadline:
                raise DeadlineError(f"waited {timeout_s:g} s for the orchestrator to deliver batch {step} in {folder}")
            time.sleep(_POLL_S)
        manifest = BatchManifest.from_json(read_manifest(folder))
        if manifest.run_id != self._run_id:
            raise StaleRunError(f"{folder} belongs to run {manifest.run_id}, this is run {self._run_id}")
        name = f"rank_{self._rank}.msgpack"
        if manifest.step != step or name not in manifest.files:
            listed = ", ".join(sorted(manifest.files))
            raise CorruptError(f"{folder} holds step {manifest.step} with {listed}; expected step {step} with {name}")
        batches = decode(read_checked(folder, name, manifest.files[name]))
        check_delivery(batches, run_id=self._run_id, step=step, rank=self._rank)
        return batches

    def _finished_before(self, step: int) -> bool:
        try:
            fields = parse_json((self._folder / _FINISHED).read_bytes(), _FINISHED)
        except FileNotFoundError:
            return False
        return fields.get("run_id") == self._run_id and step > int(fields["last_step"])

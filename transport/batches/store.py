"""Batches on disk: `step_000012/` with `rank_0.msgpack` …, `manifest.json`."""

from collections.abc import Sequence
from pathlib import Path

from transport.codec import decode, encode
from transport.errors import CorruptError, MissingRankError, StaleRunError, StorageError
from transport.folders import (
    XXH3,
    Buffer,
    check_entry,
    read_checked,
    read_manifest,
    remove_folder,
    remove_leftovers,
    step_folder,
    steps_in,
    write_atomic,
    write_folder,
)
from transport.records import BatchManifest, FileEntry, MicroBatch, Natural, Record, require

_FINISHED = "finished.json"


class Finished(Record, frozen=True, kw_only=True):
    """The sender's word that no more steps come."""

    run_id: str
    last_step: Natural


class StepStore:
    """The steps of one run below `folder`, the run's `batches` folder. One process writes; others read."""

    def __init__(self, folder: Path, *, run_id: str) -> None:
        self.folder, self.run_id = folder, run_id

    def prepare(self) -> None:
        """Makes the folder, and removes what a killed writer left half done. For the writer."""
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.folder)

    def encode(self, step: int, ranks: Sequence[Sequence[MicroBatch]]) -> list[Buffer]:
        """Returns one message a rank. Raises `CorruptError` or `StaleRunError` for micro-batches of another step, rank
        or run."""
        for rank, batches in enumerate(ranks):
            _check(batches, self.run_id, step, rank)
        return [encode(batches) for batches in ranks]

    def write(self, step: int, messages: Sequence[Buffer], *, durable: bool = True) -> None:
        """Writes a step whole. Raises `StorageError` for the disk, and where another batch of this step is there."""
        folder, files = step_folder(self.folder, step), {_file_name(rank): m for rank, m in enumerate(messages)}
        if folder.exists():
            self._check_same(step, messages)
            return

        def manifest(entries: dict[str, FileEntry]) -> bytes:
            return BatchManifest(run_id=self.run_id, step=step, files=entries).to_json()

        write_folder(folder, files, manifest, durable=durable, kind=XXH3, marker=None)

    def _check_same(self, step: int, messages: Sequence[Buffer]) -> None:
        manifest = self._manifest(step)
        try:
            for rank, message in enumerate(messages):
                check_entry(f"batch {step}", message, manifest.files[_file_name(rank)])
        except (CorruptError, KeyError) as error:
            raise StorageError(f"{step_folder(self.folder, step)} holds another batch {step} already") from error

    def read(self, step: int, rank: int) -> tuple[MicroBatch, ...] | None:
        """Returns one rank's micro-batches, or None where the step is not there. Raises `CorruptError`,
        `StaleRunError`, `MissingRankError`."""
        found = self.read_message(step, rank)
        return None if found is None else decode_checked(found[0], run_id=self.run_id, step=step, rank=rank)

    def read_message(self, step: int, rank: int) -> tuple[bytes, FileEntry] | None:
        """Returns one rank's message, checked, and its entry in the manifest; None where the step is not there."""
        folder, name = step_folder(self.folder, step), _file_name(rank)
        if not folder.exists():
            return None
        try:
            files = self._manifest(step).files
            if name not in files:
                raise MissingRankError(step, len(files), rank)
            return read_checked(folder, name, files[name]), files[name]
        except CorruptError as error:
            raise CorruptError(
                f"batch {step} is corrupt: {error}; end the programs, remove {folder}, and start them again: "
                "the orchestrator makes it anew"
            ) from error

    def _manifest(self, step: int) -> BatchManifest:
        folder = step_folder(self.folder, step)
        manifest = BatchManifest.from_json(read_manifest(folder, marked=False))
        if manifest.run_id != self.run_id:
            raise StaleRunError(f"{folder} belongs to run {manifest.run_id}, this is run {self.run_id}")
        if manifest.step != step:
            raise CorruptError(f"{folder} holds step {manifest.step}, expected {step}")
        return manifest

    def steps(self) -> list[int]:
        """Returns the steps that are there, ascending."""
        return steps_in(self.folder)

    def remove_up_to(self, step: int) -> None:
        """Removes the steps up to `step`."""
        for old in self.steps():
            if old <= step:
                remove_folder(step_folder(self.folder, old))

    def write_finished(self, last_step: int) -> None:
        """Says that no step after `last_step` will come."""
        write_atomic(self.folder / _FINISHED, Finished(run_id=self.run_id, last_step=last_step).to_json())

    def remove_finished(self) -> None:
        """Takes back that no more steps will come."""
        (self.folder / _FINISHED).unlink(missing_ok=True)

    def finished_before(self, step: int) -> bool:
        """Returns whether the sender has said that `step` will not come."""
        try:
            finished = Finished.from_json((self.folder / _FINISHED).read_bytes())
        except FileNotFoundError:
            return False
        return finished.run_id == self.run_id and step > finished.last_step


def decode_checked(message: Buffer, *, run_id: str, step: int, rank: int) -> tuple[MicroBatch, ...]:
    """Returns the micro-batches of a message. Raises `CorruptError`, and `StaleRunError` for another run's."""
    batches = decode(message)
    _check(batches, run_id, step, rank)
    return batches


def _check(batches: Sequence[MicroBatch], run_id: str, step: int, rank: int) -> None:
    require(len(batches) > 0, f"rank {rank} has no micro-batches in step {step}")
    first = batches[0]  # all others are like it, or could not be encoded
    if first.run_id != run_id:
        raise StaleRunError(f"batch {step} is of run {first.run_id}, this is run {run_id}")
    if (first.step, first.rank) != (step, rank):
        raise CorruptError(f"a batch is of step {first.step}, rank {first.rank}, expected step {step}, rank {rank}")


def _file_name(rank: int) -> str:
    return f"rank_{rank}.msgpack"

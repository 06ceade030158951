"""Batches on disk: `step_000012/` with `rank_0.msgpack` … and `manifest.json`; who has received what; the end."""

from collections.abc import Callable, Sequence
from pathlib import Path

from grpo.transport.codec import decode
from grpo.transport.errors import CorruptError, MissingRankError, StaleRunError, TransportError
from grpo.transport.folders import (
    Buffer,
    Content,
    check_file,
    read_checked,
    read_manifest,
    read_number,
    step_folder,
    steps_in,
    write_folder,
    write_number,
)
from grpo.transport.records import BatchManifest, FileEntry, MicroBatch, require

_FINISHED, _RECEIVED = "finished", "received"
REMEDY = "end the programs and start them again: the orchestrator sets the batch aside and makes another"


class StepStore:
    """The steps of one run below `folder`, the run's `batches` folder. One process writes steps; others read."""

    def __init__(self, folder: Path, *, run_id: str) -> None:
        self.folder, self.run_id = folder, run_id

    def write(self, step: int, messages: Sequence[Content], *, checkpointed: int = 0) -> None:
        """Writes a step whole, a message for each rank, over the oldest step if that is not after `checkpointed`.
        Raises `StorageError` for the disk, and where the step is there already.

        It outlives this process, however that ends. It is not synced: a step that a power cut has damaged is not
        there for readers, and the orchestrator makes it again.
        """

        def manifest(entries: dict[str, FileEntry]) -> bytes:
            return BatchManifest(run_id=self.run_id, step=step, files=entries).to_json()

        files = {_file_name(rank): message for rank, message in enumerate(messages)}
        old = next((step_folder(self.folder, one) for one in self.steps() if one <= checkpointed), None)
        write_folder(step_folder(self.folder, step), files, manifest, durable=False, reuse=old)

    def read(self, step: int, rank: int, num_ranks: int) -> tuple[MicroBatch, ...] | None:
        """Returns the micro-batches of one of `num_ranks` ranks, or None where the step is not there. Raises
        `CorruptError`, `StaleRunError`, `MissingRankError`."""
        found = self.messages(step, rank, num_ranks, read=read_checked)
        if found is None:
            return None
        messages = [message for message, _ in found]
        return decode_checked(messages, run_id=self.run_id, step=step, rank=rank, num_ranks=num_ranks)

    def messages(
        self, step: int, rank: int, num_ranks: int, *, read: Callable[[Path, str, FileEntry], Buffer]
    ) -> list[tuple[Buffer, FileEntry]] | None:
        """Returns the messages of one of `num_ranks` ranks, as `read` gives them, and their entries in the manifest;
        None where the step is not there."""
        folder = step_folder(self.folder, step)
        if not folder.exists():
            return None
        try:
            files = self._manifest(step).files
            names = [_file_name(part) for part in parts_of(step, len(files), rank, num_ranks)]
            return [(read(folder, name, files[name]), files[name]) for name in names]
        except CorruptError as error:
            raise CorruptError(f"batch {step} is corrupt: {error}; {REMEDY}") from error

    def is_whole(self, step: int) -> bool:
        """Returns whether the step is there with all that its manifest lists."""
        try:
            for name, entry in self._manifest(step).files.items():
                check_file(step_folder(self.folder, step), name, entry)
        except (OSError, TransportError):
            return False
        return True

    def _manifest(self, step: int) -> BatchManifest:
        folder = step_folder(self.folder, step)
        manifest = BatchManifest.from_json(read_manifest(folder))
        if manifest.run_id != self.run_id:
            raise StaleRunError(f"{folder} belongs to run {manifest.run_id}, this is run {self.run_id}")
        require(manifest.step == step, f"{folder} holds step {manifest.step}, expected {step}")
        return manifest

    def steps(self) -> list[int]:
        """Returns the steps that are there, ascending."""
        return steps_in(self.folder)

    def write_received(self, rank: int, step: int) -> None:
        """Says that a rank has received `step`, for a sender that looks here."""
        write_number(self.folder / _RECEIVED / f"rank_{rank}", step)

    def received(self, rank: int) -> int:
        """Returns the step that a rank has received last, 0 for none."""
        return read_number(self.folder / _RECEIVED / f"rank_{rank}") or 0

    def write_finished(self, last_step: int) -> None:
        """Says that no step after `last_step` will come."""
        write_number(self.folder / _FINISHED, last_step)

    def remove_finished(self) -> None:
        """Takes back that no more steps will come."""
        (self.folder / _FINISHED).unlink(missing_ok=True)

    def finished_before(self, step: int) -> bool:
        """Returns whether the sender has said that `step` will not come."""
        last_step = read_number(self.folder / _FINISHED)
        return last_step is not None and step > last_step


def parts_of(step: int, num_parts: int, rank: int, num_ranks: int) -> range:
    """Returns which parts of a step that was split over `num_parts` ranks are for one of the `num_ranks` ranks that
    there are: where a machine is gone, the others have its parts too. Raises `MissingRankError` where they are too
    few."""
    if num_ranks > num_parts:
        raise MissingRankError(step, num_parts, num_ranks)
    return range(rank, num_parts, num_ranks)


def decode_checked(
    messages: Sequence[Buffer], *, run_id: str, step: int, rank: int, num_ranks: int
) -> tuple[MicroBatch, ...]:
    """Returns the micro-batches of a rank's messages. Raises `CorruptError`, and `StaleRunError` for another run's."""
    decoded = [decode(message) for message in messages]
    for number, batches in enumerate(decoded):
        check_belongs(batches[0], run_id, step, rank + number * num_ranks)
    return tuple(batch for batches in decoded for batch in batches)


def check_belongs(batch: MicroBatch, run_id: str, step: int, rank: int) -> None:
    """Raises `StaleRunError` or `CorruptError` unless a message, whose first micro-batch this is, is of this run, step
    and rank."""
    if batch.run_id != run_id:
        raise StaleRunError(f"batch {step} is of run {batch.run_id}, this is run {run_id}")
    if (batch.step, batch.rank) != (step, rank):
        raise CorruptError(f"a batch is of step {batch.step}, rank {batch.rank}, expected step {step}, rank {rank}")


def _file_name(rank: int) -> str:
    return f"rank_{rank}.msgpack"

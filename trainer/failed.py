"""What is kept of a step that is not finite: `failed/step_000012/rank_0.msgpack`, each rank's micro-batches as they
came, and `WHY.txt`, why the step was refused."""

from collections.abc import Sequence
from pathlib import Path

from trainer.distributed import Ranks
from transport.codec import encode
from transport.folders import fsync, step_folder, write_atomic
from transport.records import MicroBatch
from transport.run import RunFolder


def keep_batch(run: RunFolder, ranks: Ranks, batches: Sequence[MicroBatch], *, why: str) -> Path:
    """Writes this rank's micro-batches of a step, and, on the main rank, `why` it was refused. Returns the folder.
    Raises `StorageError`."""
    folder = step_folder(run.path / "failed", batches[0].step)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / f"rank_{ranks.rank}.msgpack", encode(batches))
    if ranks.is_main:
        write_atomic(folder / "WHY.txt", f"{why}\n".encode())
    fsync(folder.parent)
    return folder

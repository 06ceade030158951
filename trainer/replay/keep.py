"""What is kept of a step that is not finite: `failed/step_000012/rank_0.msgpack`, each rank's micro-batches as they
came, and `REPLAY.txt`, why the step was refused and the command that looks at it."""

import shlex
from collections.abc import Sequence

from trainer.parallel import Ranks
from transport.codec import encode
from transport.folders import fsync_folder, step_folder, write_atomic
from transport.records import MicroBatch
from transport.run import RunFolder

FAILED = "failed"
REPLAY_FILE = "REPLAY.txt"


def keep_batch(run: RunFolder, ranks: Ranks, batches: Sequence[MicroBatch], *, why: str) -> str:
    """Writes this rank's micro-batches of a step, and, on the main rank, `why` it was refused. Gives the command that
    replays the step, all its ranks: any of them may be at fault. Raises `StorageError`."""
    folder = step_folder(run.path / FAILED, batches[0].step)
    folder.mkdir(parents=True, exist_ok=True)
    command = f"grpo-train --replay {shlex.quote(str(folder))}"
    write_atomic(folder / f"rank_{ranks.rank}.msgpack", encode(batches))
    if ranks.is_main:
        write_atomic(folder / REPLAY_FILE, f"{why}.\n\nTo see where it comes from:\n\n    {command}\n".encode())
    fsync_folder(folder.parent)
    return command

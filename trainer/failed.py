"""What is kept of a step that is not finite: `failed/step_000012/rank_0.msgpack`, each rank's micro-batches as they
came, and `WHY.txt`, why the step was refused."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from trainer.objective import Objective
from trainer.parallel import Ranks
from transport.codec import encode
from transport.folders import fsync, step_folder, write_atomic
from transport.records import MicroBatch
from transport.run import RunFolder

FAILED = "failed"
WHY_FILE = "WHY.txt"


def keep_batch(run: RunFolder, ranks: Ranks, batches: Sequence[MicroBatch], *, why: str) -> Path:
    """Writes this rank's micro-batches of a step, and, on the main rank, `why` it was refused. Returns the folder.
    Raises `StorageError`."""
    folder = step_folder(run.path / FAILED, batches[0].step)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / f"rank_{ranks.rank}.msgpack", encode(batches))
    if ranks.is_main:
        write_atomic(folder / WHY_FILE, f"{why}\n".encode())
    fsync(folder.parent)
    return folder


def first_not_finite(objective: Objective, batches: Sequence[MicroBatch]) -> str | None:
    """The first sample whose policy loss or gradient is not finite by itself; None where each is finite. For a trainer
    of one rank, whose passes wait for nobody. Leaves no gradients."""
    for batch in batches:
        for sample, rollout_id in enumerate(batch.rollout_ids):
            one = _sample(batch, sample)
            if one.loss_mask.any() and not objective.is_finite([one]):
                return f"sample {sample} of micro-batch {batch.index} (rollout {rollout_id})"
    return None


def _sample(batch: MicroBatch, sample: int) -> MicroBatch:
    """One sample of it, without hints and pairs; the normalisers stay the step's."""
    start, length = int(batch.starts[sample]), int(batch.sequence_lengths[sample])
    rows = slice(start, start + length)
    teacher = batch.teacher_logprobs
    return replace(
        batch,
        token_ids=batch.token_ids[rows],
        sequence_lengths=batch.sequence_lengths[sample : sample + 1],
        loss_mask=batch.loss_mask[rows],
        inference_logprobs=batch.inference_logprobs[rows],
        advantages=batch.per_token(batch.advantages)[rows],
        temperatures=batch.per_token(batch.temperatures)[rows],
        version_runs=np.stack([batch.policy_versions[rows], np.ones(length, np.int32)], axis=1),
        teacher_logprobs=None if teacher is None else teacher[rows],
        adapters=None if batch.adapters is None else batch.adapters[sample : sample + 1],
        rollout_ids=batch.rollout_ids[sample : sample + 1],
        hints=(),
        pairs=(),
    )

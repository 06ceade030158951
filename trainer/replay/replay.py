"""`grpo-train --replay PATH`: computes a step again, without applying it, and says which tokens it is not finite from.

PATH is a step's folder, whose ranks are replayed one after the other, or one rank's file in it: a folder that a run
keeps below `failed/` when it refuses a step, or one of the filesystem transport below `batches/`. The state is that of
the run's checkpoint of the step before.
"""

from collections.abc import Sequence
from pathlib import Path

from configs.train import TrainSettings
from trainer.checkpoints.files import Checkpoint
from trainer.checkpoints.resuming import checkpoint_store
from trainer.checkpoints.state import restore_weights
from trainer.errors import ResumeError
from trainer.objective import Objective
from trainer.parallel import ONE
from trainer.replay.diagnosis import Diagnosis
from trainer.startup import device_for, policy_for, set_threads
from transport.codec import decode
from transport.records import MicroBatch
from transport.weights.identity import base_identity, resolve_model

FINITE, NOT_FINITE = 0, 3
"""Exit statuses."""


def replay(path: Path) -> int:
    """Prints what it finds. Returns `FINITE` or `NOT_FINITE`.

    Raises `ResumeError` where there is no checkpoint to replay from, `CorruptError` for a damaged file.
    """
    ranks = [_read(file) for file in _files(path)]
    first = ranks[0][0]
    checkpoint = _checkpoint_before(path, ranks[0])
    diagnosis = _diagnosis(checkpoint)
    head = f"step {first.step} of run {checkpoint.run_id}, rank {{}}, from the checkpoint of step {first.step - 1}"
    is_finite = True
    for batches in ranks:
        print(head.format(batches[0].rank))
        is_finite &= _told(diagnosis, batches)
    if is_finite and len(ranks) > 1:
        print("all ranks together, in one process")
        is_finite = _told(diagnosis, [batch for batches in ranks for batch in batches])
    return FINITE if is_finite else NOT_FINITE


def _told(diagnosis: Diagnosis, batches: Sequence[MicroBatch]) -> bool:
    """Prints what is found in these micro-batches. Returns whether they are finite."""
    outcome = diagnosis.outcome(batches)
    figures = f"loss {outcome.loss:.6g}, gradient norm {outcome.grad_norm:.6g}"
    if outcome.is_finite:
        print(f"finite now: {figures}")
        return True
    for finding in diagnosis.findings(batches):
        print(finding)
    print(f"not finite: {figures}")
    return False


def _files(path: Path) -> list[Path]:
    """A step's files by rank, or the one file that `path` is. Raises `ResumeError` for a folder without one."""
    if not path.is_dir():
        return [path]
    numbers = {file: file.stem.removeprefix("rank_") for file in path.glob("rank_*.msgpack")}
    if files := sorted((file for file, rank in numbers.items() if rank.isdigit()), key=lambda file: int(numbers[file])):
        return files
    raise ResumeError(f"--replay {path}: has no rank_0.msgpack; give a step's folder below RUN/failed")


def _read(file: Path) -> tuple[MicroBatch, ...]:
    try:
        batches = decode(file.read_bytes())
    except OSError as error:
        raise ResumeError(f"--replay {file}: {error.strerror}; give a step's folder below RUN/failed") from error
    if not batches:
        raise ResumeError(f"--replay {file}: holds no micro-batches, expected at least one")
    return batches


def _checkpoint_before(path: Path, batches: Sequence[MicroBatch]) -> Checkpoint:
    """Of the run in whose folder `path` is."""
    folder, step = path.absolute() if path.is_dir() else path.absolute().parent, batches[0].step
    run = folder.parent.parent
    store = checkpoint_store(run, batches[0].run_id)
    if step - 1 not in store.steps():
        raise ResumeError(
            f"--replay {path}: needs the checkpoint of step {step - 1}, and {run} has those of the steps "
            f"{store.steps()}; a run that refuses a step writes the one before it"
        )
    return store.read(step - 1)


def _diagnosis(checkpoint: Checkpoint) -> Diagnosis:
    """With the policy in the state of the checkpoint."""
    settings = TrainSettings.model_validate(checkpoint.settings)
    set_threads(settings.num_threads)
    folder = resolve_model(settings.model)
    if (identity := base_identity(folder)) != checkpoint.base_model:
        raise ResumeError(f"model: {folder} is the base {identity}, the checkpoint's is {checkpoint.base_model}")
    policy = policy_for(settings, folder, device_for(settings.device), ONE)
    restore_weights(policy, checkpoint.parts["weights"])
    objective = Objective(policy, settings.loss, ONE, sequence_len=settings.sequence_len)
    if objective.average is not None:
        objective.average.load(checkpoint.parts["average"])
    return Diagnosis(policy, objective, settings.loss)

"""From which checkpoint a run goes on."""

import logging
from collections.abc import Set as AbstractSet
from pathlib import Path

from configs.train import TrainSettings
from trainer.checkpoints.files import Checkpoint, CheckpointStore
from trainer.errors import ResumeError
from transport.checkpoints import Checkpoints
from transport.run import RunFolder

log = logging.getLogger(__name__)
CHECKPOINTS = "checkpoints"
_OTHER_WEIGHTS = frozenset({"learning_rate", "lr_scheduler_type", "decay_steps", "warmup_steps", "gpus"})
"""Settings that may change, and give steps that are trained again other weights than are published, or batches other
ranks."""


def checkpoint_store(folder: Path, run_id: str) -> CheckpointStore:
    """The checkpoints of the run in `folder`."""
    return CheckpointStore(folder / CHECKPOINTS, run_id=run_id)


def checkpoint_to_resume(settings: TrainSettings, run: RunFolder, changed: AbstractSet[str]) -> Checkpoint | None:
    """The newest checkpoint, or the one that `ckpt.resume_step` names; None where there is none yet: the seed
    determines the state that the run began with. `changed` are the keys of settings that differ from the earlier start.

    What came after the checkpoint is set aside where the run goes back to it, or where the settings train it otherwise.
    Raises `ResumeError` where there is no such checkpoint, and `RunFolderError` where the orchestrator is at work on
    what came after it.
    """
    store, asked = checkpoint_store(run.path, run.run_id), settings.ckpt.resume_step
    store.remove_leftovers()
    steps = store.steps()
    if asked is not None and asked not in (-1, *steps):
        raise ResumeError(
            f"ckpt.resume_step is {asked}, and the run in {run.path} has checkpoints of "
            f"{f'the steps {steps}' if steps else 'no step'}; name one of those, or -1 for the newest"
        )
    step = max(steps, default=0) if asked is None or asked == -1 else asked
    checkpoint = store.read(step) if step in steps else None
    if checkpoint is not None:
        _check_ranks(checkpoint, settings)
    by_length = "max_steps" in changed and settings.lr_scheduler_type != "constant"
    anew = by_length or bool(changed & _OTHER_WEIGHTS)
    if step == asked or anew:
        Checkpoints(run).go_back_to(step, role="train", anew=anew)
    if changed:
        log.info("goes on with other settings than before: %s", ", ".join(sorted(changed)))
    return checkpoint


def _check_ranks(checkpoint: Checkpoint, settings: TrainSettings) -> None:
    """An optimizer may keep codes of its own for each rank."""
    names = {name for key in checkpoint.parts.get("optimizer", ()) for name in key.split("/")}
    by_rank = {name for name in names if name.startswith("rank_")}
    if by_rank and len(by_rank) != settings.gpus:
        raise ResumeError(
            f"gpus is {settings.gpus}, and the checkpoint of step {checkpoint.step} has the optimizer's 8-bit state of "
            f"{len(by_rank)} ranks, which cannot be divided anew; set gpus: {len(by_rank)}"
        )

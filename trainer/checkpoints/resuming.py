"""Which checkpoint a run is resumed from, and whether it may be."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.train import TrainSettings
from trainer.checkpoints.files import Checkpoint, CheckpointStore, deciding
from trainer.errors import ResumeError
from transport.checkpoints import Checkpoints
from transport.run import RunFolder, current_run_id, recorded_base_model, recorded_settings

log = logging.getLogger(__name__)
CHECKPOINTS = "checkpoints"


def checkpoint_store(folder: Path, run_id: str) -> CheckpointStore:
    """The checkpoints of the run in `folder`."""
    return CheckpointStore(folder / CHECKPOINTS, run_id=run_id)


def run_to_resume(settings: TrainSettings) -> str:
    """The id of the run in `output_dir`. Raises `ResumeError` where there is none."""
    run_id = current_run_id(settings.output_dir)
    if run_id is None:
        raise ResumeError(
            f"ckpt.resume_step is {settings.ckpt.resume_step}, and {settings.output_dir} holds no run; give the "
            "output_dir of the run to resume, or set ckpt.resume_step: null to begin a new one"
        )
    return run_id


def checkpoint_to_resume(settings: TrainSettings, run_id: str, base_model: str) -> Checkpoint | None:
    """What `ckpt.resume_step` asks for from the run in `output_dir`; None where it is -1 and the run ended before its
    first checkpoint: the seed determines the state that it began with. `base_model` is the base's identity.

    What came after it is set aside. Raises `ResumeError` where there is no such checkpoint, and where the base model or
    a setting that decides the result is another than it was.
    """
    folder, asked = Path(settings.output_dir), settings.ckpt.resume_step
    store, now = checkpoint_store(folder, run_id), settings.model_dump(mode="json")
    steps = store.steps()
    if asked == -1 and not steps:
        log.warning("the run in %s has no checkpoint yet: it begins again with version 0", folder)
        _check_settings(recorded_settings(folder, "train") or now, now, "the run was started with")
        _check_base_model(settings, base_model, recorded_base_model(folder, "train") or base_model)
        return None
    if asked not in (-1, *steps):
        raise ResumeError(
            f"ckpt.resume_step is {asked}, and the run in {folder} has checkpoints of "
            f"{f'the steps {steps}' if steps else 'no step'}; name one of those, or -1 for the newest"
        )
    checkpoint = store.read(steps[-1] if asked == -1 else int(asked or 0))
    _check_settings(checkpoint.settings, now, f"the checkpoint of step {checkpoint.step} has")
    _check_base_model(settings, base_model, checkpoint.base_model)
    store.remove_leftovers()
    Checkpoints(RunFolder(path=folder, run_id=run_id)).go_back_to(checkpoint.step, role="train")
    return checkpoint


def _check_base_model(settings: TrainSettings, now: str, before: str) -> None:
    if now != before:
        raise ResumeError(
            f"model: {settings.model} is the base {now}, and the run in {settings.output_dir} trains {before}; give "
            "the model that it was started with"
        )


def _check_settings(before: Mapping[str, Any], now: Mapping[str, Any], who: str) -> None:
    """Raises `ResumeError` that names every setting that decides the result and differs."""
    old, new = deciding(before), deciding(now)
    absent = "nothing"
    if changed := sorted(key for key in old.keys() | new.keys() if old.get(key, absent) != new.get(key, absent)):
        listed = "; ".join(f"{key} is {new.get(key, absent)!r}, {who} {old.get(key, absent)!r}" for key in changed)
        raise ResumeError(f"a resumed run keeps the settings that decide its result: {listed}; set them as they were")
    if before["max_steps"] != now["max_steps"]:
        longer = f"max_steps is {now['max_steps']}, {who} {before['max_steps']}"
        if now["lr_scheduler_type"] != "constant":
            log.warning("%s: the learning rate of the steps to come falls accordingly", longer)
        if now["noise_scheduler"]["enabled"]:
            log.warning("%s: the noise of the versions to come falls accordingly", longer)

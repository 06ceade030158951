"""Writes checkpoints, `checkpoints/step_000012/trainer/` with the state after step 12, beside the next step, and finds
the one that a run resumes from.

One safetensors file for each part of the state, `manifest.json` with everything else, and `STABLE`, written last, with
the manifest's digest. The folder appears whole or not at all, and is never written twice. Tensors are whole, so that
any number of ranks can resume from them.
"""

import logging
import shutil
import time
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from functools import partial
from pathlib import Path
from typing import Any

import torch
from grpo.configs.train import TrainSettings
from grpo.trainer.distributed import Ranks, host_copies, local_tensor, shard_like
from grpo.trainer.ema import MovingAverage
from grpo.trainer.errors import ResumeError
from grpo.trainer.model import Policy
from grpo.trainer.optim import Optimizer
from grpo.transport.background import Background
from grpo.transport.checkpoints import TRAINER, Checkpoints
from grpo.transport.errors import CorruptError, StaleRunError
from grpo.transport.folders import (
    Content,
    check_file,
    fsync,
    read_manifest,
    removable,
    remove_folder,
    step_folder,
    steps_in,
    write_folder,
)
from grpo.transport.records import FileEntry, Manifest
from grpo.transport.run import RunFolder, library_versions
from grpo.transport.status import StatusFile
from safetensors.torch import load_file, save

log = logging.getLogger(__name__)

_SUFFIX = ".safetensors"
_OTHER_WEIGHTS = frozenset({"learning_rate", "lr_scheduler_type", "decay_steps", "warmup_steps", "gpus", "nodes"})
"""Settings that may change, but make steps that are trained again differ from the versions already published, or divide
batches among other ranks."""
Parts = Mapping[str, Mapping[str, torch.Tensor]]
"""Tensors in main memory, by the name of their part: `weights`, `optimizer`, `average`."""


class Checkpoint(Manifest, frozen=True, kw_only=True):
    """The content of a checkpoint's manifest. Example: ``Checkpoint(run_id="5f0c", step=12, base_model="9a1…",
    settings={"seed": 42}, metrics=None, written="…", versions={"torch": "2.13.0"}, files={})``"""

    run_id: str
    step: int
    """The last step that it contains; the next batch is that of `step` + 1."""
    base_model: str
    """Identity of the base model."""
    settings: dict[str, Any]
    """All settings of the trainer, as JSON."""
    metrics: dict[str, float] | None
    """Metrics of the step; None for step 0."""
    written: str
    """When it was written, as in ISO 8601."""
    versions: dict[str, str]
    """Versions of libraries."""
    files: dict[str, FileEntry]


Resumed = tuple[Checkpoint, Parts]
"""A checkpoint that was read."""


def state_parts(
    policy: Policy, optimizer: Optimizer, average: MovingAverage | None, ranks: Ranks
) -> dict[str, dict[str, torch.Tensor]]:
    """Returns copies in main memory of everything that training needs to continue bit for bit; empty on ranks other
    than the main one. Collective."""
    return {
        "weights": host_copies(policy.named_parameters, ranks),
        "optimizer": optimizer.state_tensors(),
        "average": {} if average is None else host_copies(average.averages, ranks),
    }


def restore(parts: Parts, policy: Policy, optimizer: Optimizer, average: MovingAverage | None) -> None:
    """Restores what `state_parts` returned on the main rank of any number of ranks. Raises `ResumeError`, before
    anything is changed, if those are other weights, and afterwards if the optimizer does not have its state."""
    _check_same(policy, parts["weights"], "other weights")
    if average is not None:
        _check_same(policy, parts.get("average", {}), "a moving average of other weights")
        _copy_into(average.averages, parts["average"])
    optimizer.load_state_tensors(state := parts.get("optimizer", {}))
    if (restored := optimizer.num_steps()) != (saved := optimizer.num_steps(state)):
        raise ResumeError(
            f"the optimizer counts {restored} steps of its parameters after it was restored, and {saved} in the "
            "checkpoint; resume with the optimizer and the libraries with which it was written"
        )
    _copy_into(policy.named_parameters, parts["weights"])
    policy.reshard()


@torch.no_grad()
def _copy_into(held: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in held.items():
        local_tensor(tensor).copy_(local_tensor(shard_like(saved[name], tensor)))


def _check_same(policy: Policy, tensors: Mapping[str, torch.Tensor], what: str) -> None:
    own = {name: tuple(parameter.shape) for name, parameter in policy.named_parameters.items()}
    saved = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if different := sorted(name for name in own.keys() | saved.keys() if own.get(name) != saved.get(name)):
        name = different[0]
        raise ResumeError(
            f"the checkpoint has {what} than are trained here: {name} is {saved.get(name, 'missing')} in it and "
            f"{own.get(name, 'missing')} here (and {len(different) - 1} more differ); use the release of grpo and of "
            "its libraries with which it was written"
        )


class CheckpointStore:
    """The checkpoints of one run. One process writes; others may read."""

    def __init__(self, run: RunFolder) -> None:
        self._folder, self._run_id = run.checkpoints, run.run_id

    def path(self, step: int) -> Path:
        """Returns where the checkpoint of `step` is, or would be."""
        return step_folder(self._folder, step) / TRAINER

    def steps(self) -> list[int]:
        """Returns the steps that have a checkpoint, ascending."""
        return steps_in(self._folder, part=TRAINER)

    def write(self, step: int, parts: Parts, **fields: Any) -> None:
        """Makes the state after `step` visible, whole or not at all, with those `fields` of `Checkpoint` that only the
        trainer knows. Raises `StorageError`."""
        files = {f"{part}{_SUFFIX}": _file(tensors) for part, tensors in parts.items() if tensors}
        fields |= {"run_id": self._run_id, "step": step, "versions": library_versions()}
        fields["written"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        write_folder(self.path(step), files, lambda entries: Checkpoint(**fields, files=entries).to_json())
        fsync(self._folder)

    def read(self, step: int) -> Resumed:
        """Returns the checkpoint of `step`, checked. Raises `CorruptError`, `SchemaVersionError` or `StaleRunError`."""
        try:
            return self._read(step)
        except CorruptError as error:
            older = [other for other in self.steps() if other < step]
            mend = f"go back with resume_step: {older[-1]}" if older else "begin again at the start with resume_step: 0"
            raise CorruptError(f"{error}; {mend}") from None

    def _read(self, step: int) -> Resumed:
        folder = self.path(step)
        checkpoint = Checkpoint.from_json(read_manifest(folder))
        if checkpoint.run_id != self._run_id:
            raise StaleRunError(f"{folder} belongs to run {checkpoint.run_id}, this is run {self._run_id}")
        if checkpoint.step != step:
            raise CorruptError(f"{folder} holds step {checkpoint.step}, expected {step}")
        for name, entry in checkpoint.files.items():
            check_file(folder, name, entry)
        return checkpoint, {name.removesuffix(_SUFFIX): load_file(folder / name) for name in checkpoint.files}

    def remove_old(self, *, keep_last: int | None, keep_interval: int | None) -> None:
        """Removes checkpoints that need not be kept. Logs a warning if one cannot be removed."""
        try:
            for step in removable(self.steps(), keep_last=keep_last, keep_interval=keep_interval):
                remove_folder(step_folder(self._folder, step))
        except OSError as error:
            log.warning("old checkpoints stay: %s", error)

    def remove_leftovers(self) -> None:
        """Removes half-written folders of a writer that was killed."""
        for leftover in (*self._folder.glob(f"step_*/.{TRAINER}.*.tmp"), *self._folder.glob(".step_*.tmp")):
            shutil.rmtree(leftover)


def _file(tensors: Mapping[str, torch.Tensor]) -> Content:
    """Returns a file's content, made when it is written, so that no two are in memory at once."""
    return lambda: (save(dict(sorted(tensors.items()))),)


def checkpoint_to_resume(settings: TrainSettings, run: RunFolder, changed: AbstractSet[str]) -> Resumed | None:
    """Returns the newest checkpoint, or the one that `ckpt.resume_step` names; None if there is none yet, because the
    seed determines the state that the run began with. `changed` are the keys of settings that differ from the earlier
    start.

    What came after the checkpoint is set aside if the run goes back to it, or if the settings now train it differently.
    Raises `RunFolderError` if there is no such checkpoint, or if the orchestrator is at work on what came after it.
    """
    store, asked = CheckpointStore(run), settings.ckpt.resume_step
    store.remove_leftovers()
    steps = store.steps()
    step = max(steps, default=0) if asked is None or asked == -1 else asked
    found = store.read(step) if step in steps else None
    if found is not None:
        _check_ranks(step, found[1], settings)
    by_length = "max_steps" in changed and settings.lr_scheduler_type != "constant"
    other_loss = any(one.startswith("code ") for one in changed)
    anew = by_length or other_loss or bool(changed & _OTHER_WEIGHTS)
    if step == asked or anew:
        Checkpoints(run).go_back_to(step, role="train", anew=anew)
    if changed:
        log.info("goes on with other settings than before: %s", ", ".join(sorted(changed)))
    return found


def _check_ranks(step: int, parts: Parts, settings: TrainSettings) -> None:
    """Raises `ResumeError` for 8-bit state of another number of ranks: it has codes of its own for each rank's
    shard."""
    by_rank = {key.split("/")[1] for key in parts.get("optimizer", ()) if key.startswith("adamw_8bit/")}
    if by_rank and len(by_rank) != settings.num_ranks:
        raise ResumeError(
            f"the trainer has {settings.num_ranks} ranks, and the checkpoint of step {step} has the optimizer's 8-bit "
            f"state of {len(by_rank)} ranks, which cannot be divided anew; set gpus and nodes so"
        )


class Checkpointing:
    """Decides when checkpoints are due and has the main rank write them, one at a time, beside the next step.

    All ranks must call `after_step`, `now` and `finish` alike.
    """

    def __init__(
        self,
        settings: TrainSettings,
        run: RunFolder,
        *,
        state: tuple[Policy, Optimizer, MovingAverage | None],
        base_model: str,
        ranks: Ranks,
        status: StatusFile,
        times_s: dict[str, float],
    ) -> None:
        """Waits for a checkpoint at most `wait_timeout_s` seconds. Notes in `times_s` for how long the newest one held
        up the training, and how long writing one took beside it."""
        self._settings, self._ckpt, self._store = settings, settings.ckpt, CheckpointStore(run)
        self._state, self._base_model = state, base_model
        self._ranks, self._status, self._times_s = ranks, status, times_s
        if self._ckpt.interval is not None:
            times_s |= {"time/checkpoint_s": 0.0, "time/write_checkpoint_s": 0.0}
        waits_for = "a checkpoint to be written; see whether its disk answers, or raise wait_timeout_s"
        self._writer = Background("checkpoint", timeout_s=settings.wait_timeout_s, waits_for=waits_for)
        self.newest = 0
        """Newest step whose state is in a checkpoint; 0 for the state that the run began with."""

    def after_step(self, step: int, metrics: Mapping[str, float] | None) -> None:
        """Begins a checkpoint if one is due. Raises `StorageError` if an earlier one could not be written."""
        self.check()
        if self._ckpt.interval is not None and step % self._ckpt.interval == 0:
            self._begin(step, metrics)

    def finish(self, step: int, metrics: Mapping[str, float] | None) -> None:
        """Returns when everything up to the last step is in complete checkpoints."""
        if self._ckpt.interval is not None and step != self.newest:
            self._begin(step, metrics)
        self._wait()

    def now(self, step: int, metrics: Mapping[str, float] | None) -> None:
        """Returns when the state after `step` is in a complete checkpoint, whether one was due or not."""
        if step != self.newest or step == 0:
            self._begin(step, metrics)
        self._wait()

    def close(self) -> None:
        """Returns when the checkpoint that is being written is complete or has failed, or after some seconds; in the
        last case it is not visible."""
        self._writer.close()

    def check(self) -> None:
        """Raises the error of a checkpoint that could not be written."""
        self._writer.check()

    def _begin(self, step: int, metrics: Mapping[str, float] | None) -> None:
        started_s = time.perf_counter()
        self._wait()  # so that at most one copy of the state is held
        parts = state_parts(*self._state, self._ranks)
        self.newest = step
        if self._ranks.is_main and step not in self._store.steps():
            fields = {"settings": self._settings.model_dump(mode="json"), "metrics": metrics}
            self._writer.submit(partial(self._write, step, parts, fields))
        self._times_s["time/checkpoint_s"] = time.perf_counter() - started_s

    def _write(self, step: int, parts: Parts, fields: Mapping[str, Any]) -> None:
        started_s = time.perf_counter()
        self._store.write(step, parts, base_model=self._base_model, **fields)
        self._store.remove_old(keep_last=self._ckpt.keep_last, keep_interval=self._ckpt.keep_interval)
        self._times_s["time/write_checkpoint_s"] = time.perf_counter() - started_s

    def _wait(self) -> None:
        """Waits for the checkpoint that is being written. Raises its error, and `DeadlineError`."""
        self._status.set("waiting", step=self.newest, waiting_for=f"the checkpoint in {self._store.path(self.newest)}")
        self._writer.flush()
        self._status.set("checkpointing", step=self.newest)

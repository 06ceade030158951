"""A run's checkpoints as both programs see them: `checkpoints/step_000012/` with `trainer/`, `orchestrator/` and
`COMPLETE`.

Each program writes its own part, whole or not at all. `COMPLETE` is the one manifest that ties them together: it names
the run and the step, and holds the digests of the trainer's manifest and of the orchestrator's one file. The trainer's
part comes first and decides whether there is a checkpoint: what the orchestrator needs for its part is durable before
the trainer can have the batch.
"""

import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transport.batches.store import StepStore
from transport.errors import CorruptError, RunFolderError, SchemaVersionError, StaleRunError, StorageError
from transport.folders import file_entry, read_manifest, step_folder, steps_in, write_atomic
from transport.records import Manifest, Natural, parse_json
from transport.run import Role, RunFolder, is_at_work

log = logging.getLogger(__name__)

TRAINER, ORCHESTRATOR = "trainer", "orchestrator"
COMPLETE = "COMPLETE"
STATE_FILE = "state.json"


class Completion(Manifest, frozen=True, kw_only=True):
    """What `COMPLETE` says. Example: ``Completion(run_id="5f0c", step=12, written="2026-11-22T10:31:00+0000",
    digests={"trainer": "sha256:9a…", …})``"""

    run_id: str
    step: Natural
    written: str
    """When."""
    digests: dict[str, str]
    """Of the trainer's manifest, and of the orchestrator's state."""


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self.completed: frozenset[int] = frozenset()
        """Steps whose checkpoints had all parts when `complete` was last called."""

    def part(self, step: int, name: str) -> Path:
        """The folder of one program's part."""
        return step_folder(self._run.checkpoints, step) / name

    def steps(self, part: str = TRAINER) -> list[int]:
        """Steps that have `part`, ascending."""
        return steps_in(self._run.checkpoints, part=part)

    # --- the orchestrator's part ---

    def complete(self, state_after: Callable[[int], Mapping[str, Any] | None]) -> None:
        """Adds the orchestrator's part, `state_after` the step, and `COMPLETE` to what the trainer has written; removes
        both where the trainer has removed its part. What cannot be written is tried again by the next call."""
        steps = frozenset(self.steps())
        if steps == self.completed:
            return
        try:
            for step in steps - self.completed:
                if self.completion(step) is None and (state := state_after(step)) is not None:
                    self._write(step, state)
            for step in set(self.steps(ORCHESTRATOR)) - set(self.steps()):
                shutil.rmtree(step_folder(self._run.checkpoints, step), ignore_errors=True)
        except (OSError, CorruptError) as error:  # the trainer may remove its part meanwhile
            log.warning("checkpoints stay without the orchestrator's part: %s", error)
        else:
            self.completed = steps

    def _write(self, step: int, state: Mapping[str, Any]) -> None:
        path = self.part(step, ORCHESTRATOR) / STATE_FILE
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, json.dumps(state).encode())
        completion = Completion(run_id=self._run.run_id, step=step, written=_now(), digests=self._digests(step))
        write_atomic(step_folder(self._run.checkpoints, step) / COMPLETE, completion.to_json())

    def _digests(self, step: int) -> dict[str, str]:
        contents = {
            TRAINER: read_manifest(self.part(step, TRAINER)),
            ORCHESTRATOR: (self.part(step, ORCHESTRATOR) / STATE_FILE).read_bytes(),
        }
        return {name: file_entry(content).digest for name, content in contents.items()}

    def completion(self, step: int) -> Completion | None:
        """What ties the parts of `step` together; None where it is not there, or one of the parts is not the one that
        it names: another one would be written anew. Raises `StaleRunError` for another run's."""
        path = step_folder(self._run.checkpoints, step) / COMPLETE
        try:
            completion = Completion.from_json(path.read_bytes())
            same = completion.step == step and completion.digests == self._digests(step)
        except (FileNotFoundError, CorruptError, SchemaVersionError):
            return None
        if completion.run_id != self._run.run_id:
            raise StaleRunError(f"{path} belongs to run {completion.run_id}, this is run {self._run.run_id}")
        return completion if same else None

    def state(self, step: int) -> Mapping[str, Any] | None:
        """The orchestrator's state after `step`; None where the checkpoint is not complete, or damaged."""
        if self.completion(step) is None:
            return None
        path = self.part(step, ORCHESTRATOR) / STATE_FILE
        return parse_json(path.read_bytes(), str(path))

    # --- going back ---

    def go_back_to(self, step: int, *, role: Role | None, anew: bool = False) -> None:
        """Makes `step`, 0 or that of a checkpoint, the newest: later checkpoints, and the batches and versions
        after it, go to `superseded/`; nothing where it is the newest checkpoint
        already, unless what follows it is to be made `anew`. `role` is the program that asks, None: a launcher.

        Raises `RunFolderError` where there is no such checkpoint, or another program is at work.
        """
        with self._run.locked():
            steps = self.steps()
            if step not in (0, *steps):
                have = f"the steps {steps}" if steps else "no step"
                raise RunFolderError(
                    f"ckpt.resume_step is {step}, and the run in {self._run.path} has checkpoints of {have}; name one "
                    "of those, or -1 for the newest"
                )
            folders = (self._run.batches, self._run.broadcasts, self._run.checkpoints)
            newest = max(max(steps_in(folder), default=0) for folder in folders)
            if (step == max(steps, default=0) and not anew) or newest <= step:
                return
            others: list[Role] = ["orch", "train"]
            for other in (other for other in others if other != role):
                if is_at_work(self._run.path, other):
                    raise RunFolderError(
                        f"cannot go back to step {step} of {self._run.path} while grpo-{other} is at work on what came "
                        "after it; end it, and start grpo-train first"
                    )
            # The checkpoints last: by them one sees that something is still to be done.
            self._set_aside_after(step, *folders)

    def newest_batch(self) -> int:
        """The newest batch that the trainer has or can have: the last of those that follow its newest checkpoint one by
        one, and are whole."""
        step, batches = max(self.steps(), default=0), StepStore(self._run.batches, run_id=self._run.run_id)
        while batches.is_whole(step + 1):
            step += 1
        return step

    def settle(self, *, role: Role = "orch") -> int:
        """The newest batch. Batches after a hole, and versions that such batches gave, go to `superseded/`; `role` is
        the program that asks, before it works on any.

        Raises `RunFolderError` where a trainer is at work on them.
        """
        with self._run.locked():
            step = self.newest_batch()
            batches, versions = (steps_in(folder) for folder in (self._run.batches, self._run.broadcasts))
            newest = max(versions, default=0)
            if newest > step and role == "orch" and is_at_work(self._run.path, "train"):
                raise RunFolderError(
                    f"grpo-train has trained step {newest} of {self._run.path}, and batch {step + 1} is not there any "
                    "more; end it, and start both programs again"
                )
            if max(newest, *batches, 0) > step:
                self._set_aside_after(step, self._run.batches, self._run.broadcasts)
            return step

    def _set_aside_after(self, step: int, *folders: Path) -> None:
        aside = self._run.superseded / f"{time.strftime('%Y%m%dT%H%M%S')}_{time.time_ns() % 1_000_000:06d}"
        try:
            for folder in folders:
                _move_after(folder, step, aside / folder.name)
        except OSError as error:
            raise StorageError(f"cannot go back to step {step} of {self._run.path}: {error}") from error
        log.warning("the run goes back to step %d; what came after it is in %s", step, aside)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _move_after(folder: Path, step: int, aside: Path) -> None:
    """The newest first, so that what is left has no holes."""
    for later in reversed(steps_in(folder)):
        if later > step:
            aside.mkdir(parents=True, exist_ok=True)
            step_folder(folder, later).rename(step_folder(aside, later))

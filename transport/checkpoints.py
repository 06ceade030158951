"""A run's checkpoints as all programs see them: `checkpoints/step_000012/trainer/`, written whole or not at all.

They decide where a run goes on. The orchestrator's state after the same step is in its ledger, durable before the
trainer can have the batch.
"""

import logging
import time
from pathlib import Path
from typing import get_args

from grpo.transport.batches.store import StepStore
from grpo.transport.errors import RunFolderError, StorageError
from grpo.transport.folders import step_folder, steps_in
from grpo.transport.run import Role, RunFolder, is_at_work

log = logging.getLogger(__name__)

TRAINER = "trainer"


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run

    def steps(self) -> list[int]:
        """Returns the steps that have a checkpoint, ascending."""
        return steps_in(self._run.checkpoints, part=TRAINER)

    def go_back_to(self, step: int, *, role: Role | None, anew: bool = False) -> None:
        """Makes `step`, 0 or that of a checkpoint, the newest: later checkpoints, and the batches and versions
        after it, go to `superseded/`. Where it is the newest checkpoint already, nothing happens, unless the batches
        and versions after it are to go too (`anew`). `role` is the calling program, None: a launcher.

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
            for other in get_args(Role):
                if other != role and is_at_work(self._run.path, other):
                    raise RunFolderError(
                        f"cannot go back to step {step} of {self._run.path} while grpo-{other} is at work on what came "
                        "after it; end it, and start grpo-train first"
                    )
            # The checkpoints last: by them one sees that something is still to be done.
            self._set_aside_after(step, *folders)

    def settle(self, *, role: Role = "orch") -> int:
        """Returns the newest batch that the trainer has or can have: the last of those that follow its newest
        checkpoint one by one, and are whole. Later batches and versions go to `superseded/`. `role` is the calling
        program, which works on none of them yet.

        Raises `RunFolderError` where a trainer is at work on them.
        """
        with self._run.locked():
            step, store = max(self.steps(), default=0), StepStore(self._run.batches, run_id=self._run.run_id)
            while store.is_whole(step + 1):
                step += 1
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
        """Moves the newest first, so that the rest has no holes."""
        aside = self._run.superseded / f"{time.strftime('%Y%m%dT%H%M%S')}_{time.time_ns() % 1_000_000:06d}"
        try:
            for folder in folders:
                for later in [one for one in reversed(steps_in(folder)) if one > step]:
                    (aside / folder.name).mkdir(parents=True, exist_ok=True)
                    step_folder(folder, later).rename(step_folder(aside / folder.name, later))
        except OSError as error:
            raise StorageError(f"cannot go back to step {step} of {self._run.path}: {error}") from error
        log.warning("the run goes back to step %d; what came after it is in %s", step, aside)

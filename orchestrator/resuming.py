"""Resuming: finds out where a run stands.

The channel and the trainer's checkpoints tell what the trainer has or can have: batches are kept until a checkpoint has
passed them. The state that belongs to the newest of these batches was durable in the ledger before the batch was. So a
run goes on after it, and the trainer trains again what lies between its checkpoint and it, from the same files.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo.configs.orch import OrchSettings
from grpo.orchestrator.ledger import Ledger
from grpo.transport.checkpoints import Checkpoints
from grpo.transport.errors import RunFolderError
from grpo.transport.run import RunFolder
from grpo.transport.weights.store import PolicyReader

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run stands."""

    step: int = 0
    """The newest batch that has left."""
    num_groups: int = 0
    """How many groups have been issued, which is the next one's number."""
    state: Mapping[str, Any] | None = None
    """The state that the ledger keeps with that batch; None before the first."""
    pools: Mapping[str, str] = field(default_factory=dict)
    """The pool of each example that was easy or hard after it, by key."""
    newest_state: Mapping[str, Any] | None = None
    """The state of the newest batch ever shipped: going back to a checkpoint refunds no costs. None where there is
    none."""
    first_version: int = 0
    """The version to begin with."""
    metrics: Mapping[int, Mapping[str, float]] | None = None
    """The metrics of batches whose version may not have been written down yet. None: a new run."""

    @property
    def resumed(self) -> bool:
        """Whether an earlier process has begun the run."""
        return self.metrics is not None


def resume(settings: OrchSettings, run: RunFolder, ledger: Ledger) -> Progress:
    """Makes the run's folder and the ledger what they were after the newest batch that the trainer has or can have. A
    ledger without rollouts is that of a new run.

    Raises `RunFolderError` where what belongs to that batch is lost, a trainer has gone beyond it, or the run has more
    steps already than `max_steps`.
    """
    checkpoints = Checkpoints(run)
    step = checkpoints.settle()
    if step == 0 and ledger.is_empty():
        return Progress()
    if settings.max_steps is not None and step > settings.max_steps:
        raise RunFolderError(
            f"max_steps is {settings.max_steps}, and the run in {run.path} goes on after batch {step}; raise it, or go "
            f"back to an earlier checkpoint with ckpt.resume_step: {checkpoints.steps()}"
        )
    state, newest = ledger.state_after(step), ledger.newest_state()
    if state is None and step > 0:
        raise RunFolderError(
            f"the run in {run.path} goes on after batch {step}, and {ledger.path.name} has no state after it: put back "
            "the file that this run has written, with its -wal and -shm, or give a new run another output_dir"
        )
    version = PolicyReader(run.broadcasts, run_id=run.run_id).latest() or 0
    first_version = max(version, max(checkpoints.steps(), default=0))
    num_groups = ledger.resume(step, count=not settings.ckpt.skip_progress)
    log.info("goes on after batch %d, with version %d and group %d", step, first_version, num_groups)
    return Progress(
        step=step,
        num_groups=num_groups,
        state=state,
        pools=ledger.pools(),
        newest_state=newest,
        first_version=first_version,
        metrics=ledger.metrics(),
    )

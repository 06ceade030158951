"""What an orchestrator that goes on with a run begins with.

The channel and the trainer's checkpoints tell what the trainer has or can have: batches are kept until a checkpoint has
passed them. The state that belongs to the newest of these batches was durable before the batch was. So a run goes on
after it, and the trainer trains again what lies between its checkpoint and it, from the same files.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from configs.orch import OrchSettings
from orchestrator.ledger import Ledger
from transport.checkpoints import Checkpoints
from transport.errors import RunFolderError
from transport.run import RunFolder
from transport.weights.store import PolicyReader

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run stands."""

    step: int = 0
    """The newest batch that has left."""
    num_groups: int = 0
    """Groups that have been issued; the number of the next one."""
    buffer: Mapping[str, Any] | None = None
    """The buffer's state after that batch; None where there is none, or it shall not be used."""
    artifacts: Mapping[str, Any] | None = None
    """How many draws each artifact store had made after that batch. None: a new run."""
    auxiliary: Mapping[str, Any] | None = None
    """The state of the newest batch that ever left: what teachers have cost is not given back where a run goes back.
    None where there is none."""
    first_version: int = 0
    """The version to begin with."""
    metrics: Mapping[int, Mapping[str, float]] | None = None
    """Of the batches whose version may not have been written down yet. None: a new run."""

    @property
    def resumed(self) -> bool:
        """Whether an earlier process has begun it."""
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
    state, newest = _state(step, checkpoints, ledger), ledger.newest_state()
    version = PolicyReader(run.broadcasts, run_id=run.run_id).latest() or 0
    first_version = max(version, max(checkpoints.steps(), default=0))
    keep_buffer = not settings.ckpt.skip_buffer
    num_groups = ledger.resume(step, count=not settings.ckpt.skip_progress, keep_pools=keep_buffer)
    kept = {number: ledger.state_after(number) for number in range(1, step + 1)}
    log.info("goes on after batch %d, with version %d and group %d", step, first_version, num_groups)
    return Progress(
        step=step,
        num_groups=num_groups,
        buffer=state if keep_buffer else None,
        artifacts={} if state is None else state.get("artifacts", {}),
        auxiliary=newest if newest is not None else state,
        first_version=first_version,
        metrics={number: shipped.metrics for number, shipped in kept.items() if shipped is not None},
    )


def _state(step: int, checkpoints: Checkpoints, ledger: Ledger) -> Mapping[str, Any] | None:
    """The buffer's state after `step`."""
    if step == 0:
        return None
    if (shipped := ledger.state_after(step)) is not None:
        return shipped.state
    if (state := checkpoints.state(step)) is not None:
        return state
    raise RunFolderError(
        f"the run in {ledger.path.parent} goes on after batch {step}, and neither {ledger.path.name} nor "
        f"checkpoints/ has the orchestrator's state after it; resume from an earlier checkpoint: {checkpoints.steps()}"
    )

"""Whether a trainer that has ended had done its work."""

from transport.batches.store import StepStore
from transport.checkpoints import Checkpoints
from transport.errors import TransportError
from transport.run import RunFolder, recorded_settings
from transport.weights.filesystem import FilesystemPolicyReader


def trainer_is_done(folder: RunFolder, max_steps: int | None) -> bool:
    """Whether the trainer had no more to do: all steps are published, or the orchestrator ended the run before."""
    latest = FilesystemPolicyReader(folder.broadcasts, run_id=folder.run_id).latest() or 0
    if max_steps is not None and latest >= max_steps:
        return True
    try:
        return StepStore(folder.batches, run_id=folder.run_id).finished_before(latest + 1)
    except TransportError:
        return False


def trainers_end(folder: RunFolder, max_steps: int | None) -> str | None:
    """What is to be said of a trainer that was killed when it had no more versions to publish; None where it had."""
    if not trainer_is_done(folder, max_steps):
        return None
    settings = recorded_settings(folder.path, "train") or {}
    newest = FilesystemPolicyReader(folder.broadcasts, run_id=folder.run_id).latest()
    if settings.get("ckpt", {}).get("interval") is None or newest in Checkpoints(folder).steps():
        return ""
    return f"; the checkpoint of step {newest} is missing, and --resume_step -1 makes it"

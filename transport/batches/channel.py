"""The batch channel that a run's settings ask for."""

from typing import Any, Literal

from grpo.transport.batches.filesystem import BatchReceiver, BatchSender, FilesystemBatchReceiver
from grpo.transport.batches.zmq import ZmqBatchReceiver, ZmqBatchSender
from grpo.transport.checkpoints import Checkpoints
from grpo.transport.run import RunFolder

Kind = Literal["filesystem", "zmq"]


def open_sender(run: RunFolder, *, type: Kind, key_var: str = "", **options: Any) -> BatchSender:
    """Returns the orchestrator's end with these `options`. `key_var` names an environment variable that may hold the
    sockets' key; without it the run's own key is used."""
    checkpoints = Checkpoints(run)
    options |= {"run_id": run.run_id, "checkpointed": lambda: max(checkpoints.steps(), default=0)}
    if type == "filesystem":
        return BatchSender(run.batches, **options)
    return ZmqBatchSender(run.batches, key=run.key(key_var), **options)


def open_receiver(
    run: RunFolder, *, rank: int, num_ranks: int, type: Kind, key_var: str = "", **address: Any
) -> BatchReceiver:
    """Returns the end of one of the trainer's ranks."""
    place: dict[str, Any] = {"run_id": run.run_id, "rank": rank, "num_ranks": num_ranks}
    if type == "filesystem":
        return FilesystemBatchReceiver(run.batches, **place)
    return ZmqBatchReceiver(key=run.key(key_var), **place, **address)

"""The batch channel that a run's settings ask for."""

from typing import Any, Literal

from transport.batches.filesystem import BatchReceiver, BatchSender, FilesystemBatchReceiver
from transport.batches.zmq import ZmqBatchReceiver, ZmqBatchSender
from transport.checkpoints import Checkpoints
from transport.run import RunFolder

Kind = Literal["filesystem", "zmq"]


def open_sender(run: RunFolder, *, type: Kind, key_var: str = "", **options: Any) -> BatchSender:
    """Returns the orchestrator's end, of which the `options` are. `key_var` names an environment variable that may hold
    the sockets' key; otherwise it is the run's."""
    checkpoints = Checkpoints(run)
    options |= {"run_id": run.run_id, "checkpointed": lambda: max(checkpoints.steps(), default=0)}
    if type == "filesystem":
        return BatchSender(run.batches, **options)
    return ZmqBatchSender(run.batches, key=run.key(key_var), **options)


def open_receiver(run: RunFolder, *, rank: int, type: Kind, key_var: str = "", **address: Any) -> BatchReceiver:
    """Returns the end of one rank of the trainer; the high-water mark is the sender's."""
    if type == "filesystem":
        return FilesystemBatchReceiver(run.batches, run_id=run.run_id, rank=rank)
    return ZmqBatchReceiver(run_id=run.run_id, rank=rank, key=run.key(key_var), **address)

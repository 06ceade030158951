"""The batch channel that a run's settings ask for."""

from typing import Any, Literal

from transport.batches.filesystem import BatchReceiver, BatchSender, FilesystemBatchReceiver
from transport.batches.zmq import ZmqBatchReceiver, ZmqBatchSender
from transport.checkpoints import Checkpoints
from transport.run import RunFolder

Kind = Literal["filesystem", "zmq"]


def open_sender(
    run: RunFolder,
    *,
    num_ranks: int,
    type: Kind,
    hwm: int,
    send_timeout_s: float,
    host: str = "localhost",
    port: int = 5555,
    key_var: str = "",
) -> BatchSender:
    """Returns the orchestrator's end, to `num_ranks` ranks. `key_var` names an environment variable that may hold the
    sockets' key; otherwise it is the run's."""
    checkpoints = Checkpoints(run)
    options: dict[str, Any] = {
        "run_id": run.run_id,
        "num_ranks": num_ranks,
        "hwm": hwm,
        "send_timeout_s": send_timeout_s,
        "checkpointed": lambda: max(checkpoints.steps(), default=0),
    }
    if type == "filesystem":
        return BatchSender(run.batches, **options)
    return ZmqBatchSender(run.batches, host=host, port=port, key=run.key(key_var), **options)


def open_receiver(
    run: RunFolder,
    *,
    rank: int,
    num_ranks: int,
    type: Kind,
    host: str = "localhost",
    port: int = 5555,
    key_var: str = "",
) -> BatchReceiver:
    """Returns the end of one of the trainer's ranks; the high-water mark is the sender's."""
    if type == "filesystem":
        return FilesystemBatchReceiver(run.batches, run_id=run.run_id, rank=rank, num_ranks=num_ranks)
    key = run.key(key_var)
    return ZmqBatchReceiver(run_id=run.run_id, rank=rank, num_ranks=num_ranks, host=host, port=port, key=key)

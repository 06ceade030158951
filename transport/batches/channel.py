"""The batch channel that a run's settings ask for."""

import os
from typing import Literal

from transport.batches.base import BatchReceiver, BatchSender
from transport.batches.filesystem import FilesystemBatchReceiver, FilesystemBatchSender
from transport.batches.zmq import ZmqBatchReceiver, ZmqBatchSender
from transport.curve import SharedKey
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
    """The orchestrator's end, to `num_ranks` ranks. `key_var` names the environment variable with the sockets' key."""
    if type == "filesystem":
        return FilesystemBatchSender(
            run.batches, run_id=run.run_id, num_ranks=num_ranks, hwm=hwm, send_timeout_s=send_timeout_s
        )
    return ZmqBatchSender(
        run.batches,
        run_id=run.run_id,
        num_ranks=num_ranks,
        host=host,
        port=port,
        hwm=hwm,
        send_timeout_s=send_timeout_s,
        key=_key(key_var),
    )


def open_receiver(
    run: RunFolder, *, rank: int, type: Kind, host: str = "localhost", port: int = 5555, key_var: str = ""
) -> BatchReceiver:
    """The end of one rank of the trainer; the high-water mark is the sender's."""
    if type == "filesystem":
        return FilesystemBatchReceiver(run.batches, run_id=run.run_id, rank=rank)
    quarantine = run.batches / "quarantine"
    return ZmqBatchReceiver(quarantine, run_id=run.run_id, rank=rank, host=host, port=port, key=_key(key_var))


def _key(key_var: str) -> SharedKey | None:
    secret = os.environ.get(key_var)
    return None if secret is None else SharedKey(secret)

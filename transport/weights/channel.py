"""The weight channel that a run's settings ask for."""

from typing import Literal

from transport.run import RunFolder
from transport.weights.base import PolicyPublisher
from transport.weights.filesystem import FilesystemPolicyPublisher
from transport.weights.nccl import NcclPolicyPublisher, Rendezvous
from transport.weights.retention import Retention

Kind = Literal["filesystem", "nccl"]


def open_publisher(
    run: RunFolder,
    *,
    type: Kind,
    keep_last: int,
    keep_interval: int | None,
    max_shard_bytes: int = 5_000_000_000,
    host: str = "localhost",
    port: int = 29501,
    timeout: float = 1200.0,
    inference_world_size: int = 1,
) -> PolicyPublisher:
    """Returns the trainer's end."""
    folders = FilesystemPolicyPublisher(
        run.broadcasts,
        run_id=run.run_id,
        retention=Retention(keep_last=keep_last, keep_interval=keep_interval),
        max_shard_bytes=max_shard_bytes,
    )
    if type == "filesystem":
        return folders
    rendezvous = Rendezvous(host=host, port=port, world_size=1 + inference_world_size)
    return NcclPolicyPublisher(folders, rendezvous, timeout_s=timeout)

"""The data-parallel ranks of the trainer. With one rank nothing is communicated.

Between ranks travel tensors, and JSON as bytes in tensors; nothing is pickled. Every method that says so is a
collective: all ranks must call it, in the same order.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from trainer.metrics import State, reduced
from trainer.sharded import whole_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process's place among the ranks; this class is for a single one."""

    rank: int
    size: int

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which alone publishes versions and writes checkpoints and the run's status."""
        return self.rank == 0

    def most(self, number: int) -> int:
        """The largest of what the ranks say. Collective."""
        return number

    def total(self, number: int) -> int:
        """The sum of what the ranks say. Collective."""
        return number

    def from_main(self, value: Any) -> Any:
        """What rank 0 gives: JSON values; that of the others is ignored. Collective."""
        return value

    def merged(self, metrics: Mapping[str, State]) -> dict[str, State]:
        """Returns the states of all ranks' metrics together, the same on every rank. A key that some lack is reduced
        over those that have it. Collective."""
        return dict(metrics)

    def gathered(self, data: bytes) -> list[bytes]:
        """What each rank gives, by rank. Collective."""
        return [data]

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """The whole of a tensor that may be sharded over the ranks, without gradient; one that is not sharded is
        returned as it is. Collective."""
        return whole_of(tensor).detach()


ONE = Ranks(rank=0, size=1)
"""A trainer of a single process."""


class ProcessRanks(Ranks):
    """One of several processes, by torch.distributed's default group; every collective ends at its deadline."""

    __slots__ = ()

    def most(self, number: int) -> int:
        return self._reduced(number, dist.ReduceOp.MAX)

    def total(self, number: int) -> int:
        return self._reduced(number, dist.ReduceOp.SUM)

    def from_main(self, value: Any) -> Any:
        data = json.dumps(value if self.is_main else None).encode()
        size = torch.tensor([len(data)])
        dist.broadcast(size, src=0)
        received = _as_tensor(data) if self.is_main else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(received, src=0)
        return json.loads(received.numpy().tobytes())

    def merged(self, metrics: Mapping[str, State]) -> dict[str, State]:
        return reduced(json.loads(data) for data in self.gathered(json.dumps(metrics).encode()))

    def gathered(self, data: bytes) -> list[bytes]:
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(data)]))
        longest = max(int(size) for size in sizes)
        padded = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(padded, _as_tensor(data.ljust(longest)))
        return [p[: int(size)].numpy().tobytes() for p, size in zip(padded, sizes, strict=True)]

    def _reduced(self, number: int, op: Any) -> int:
        tensor = torch.tensor([number])
        dist.all_reduce(tensor, op=op)
        return int(tensor)


def join_group(device: torch.device, *, timeout_s: float) -> Ranks:
    """Takes part in the group of processes that torchrun's variables describe. Collective.

    CPU tensors travel by gloo, those on a GPU by NCCL (not yet run: needs GPUs). Waiting for another rank ends with an
    error after `timeout_s`.
    """
    dist.init_process_group(_backend(device), timeout=timedelta(seconds=timeout_s))
    return ProcessRanks(rank=dist.get_rank(), size=dist.get_world_size())


def leave_group() -> None:
    """Ends the communication, if there is any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def group_of_one(device: torch.device) -> None:
    """Makes this process a group by itself where there is none yet, for what FSDP2 does besides communicating."""
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(_backend(device), store=store, rank=0, world_size=1)


def _backend(device: torch.device) -> str:
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)

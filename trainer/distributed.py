"""The data-parallel ranks of one trainer: their collectives, tensors that may be sharded, and FSDP2 over the model.

With one rank nothing is communicated. Between ranks travel tensors, and JSON as bytes in tensors; nothing is pickled.
Every function that says "collective" must be called by all ranks, in the same order. NCCL, and FSDP2 on CUDA, are not
yet run: they need GPUs.

Between two steps every rank has its shard of what is trained, and of the optimizer's state. The levels are those of
ZeRO (arXiv:1910.02054), a step being several passes of forward and backward:

| level | weights that are gathered | gradients |
|---|---|---|
| 1 | once a step, and kept to the end of its last pass | whole on every rank, summed in the last pass |
| 2 | likewise | summed in every pass; a rank keeps its shard |
| 3 | layer by layer, in every forward and again in every backward pass | as at level 2 |

An adapter's frozen base is whole on every rank at the levels 1 and 2, and sharded like the adapter at level 3. The
losses have global normalisers already, so that gradients are summed over the ranks and not averaged.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from grpo.trainer.metrics import State, reduced
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

GATHERED_BYTES = 1 << 29
"""Bytes of sharded tensors that the main rank gathers at a time."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place among the ranks, by torch.distributed's default group; every collective has its deadline."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """True on rank 0, which alone publishes versions and writes checkpoints and the run's status."""
        return self.rank == 0

    def all_reduce_max(self, number: int) -> int:
        """Returns the largest of the ranks' numbers. Collective."""
        return self._all_reduce([number], dist.ReduceOp.MAX)[0]

    def all_reduce_sum(self, numbers: Sequence[int]) -> list[int]:
        """Returns the sums of the ranks' numbers, place by place. Collective."""
        return self._all_reduce(numbers, dist.ReduceOp.SUM)

    def _all_reduce(self, numbers: Sequence[int], op: Any) -> list[int]:
        if self.size == 1:
            return list(numbers)
        tensor = torch.tensor(numbers)
        dist.all_reduce(tensor, op=op)
        values: list[int] = tensor.tolist()
        return values

    def broadcast(self, value: Any) -> Any:
        """Returns rank 0's value, which JSON can hold; the others' values are ignored. Collective."""
        return value if self.size == 1 else json.loads(self.all_gather(json.dumps(value).encode())[0])

    def merged(self, metrics: Mapping[str, State]) -> dict[str, State]:
        """Returns the metrics of all ranks reduced together, on every rank. A key that some ranks lack is reduced over
        the ranks that have it. Collective."""
        if self.size == 1:
            return dict(metrics)
        return reduced(json.loads(part) for part in self.all_gather(json.dumps(metrics).encode()))

    def gather(self, data: bytes) -> list[bytes]:
        """Returns each rank's bytes, by rank; none on ranks other than the main one. Collective."""
        if self.size == 1:
            return [data]
        sizes = [int(size) for size in self.all_gather(str(len(data)).encode())]
        parts = [bytearray() for _ in sizes] if self.is_main else []
        step = max(1, GATHERED_BYTES // self.size)
        for start in range(0, max(sizes), step):
            count = min(step, max(sizes) - start)
            own = torch.frombuffer(bytearray(data[start : start + count].ljust(count)), dtype=torch.uint8)
            received = [torch.empty_like(own) for _ in sizes] if self.is_main else None
            dist.gather(own, received)
            for part, piece in zip(parts, received or (), strict=True):
                part += piece.numpy().tobytes()
        return [bytes(part[:size]) for part, size in zip(parts, sizes[: len(parts)], strict=True)]

    def all_gather(self, data: bytes) -> list[bytes]:
        """Returns each rank's bytes, by rank. Collective."""
        if self.size == 1:
            return [data]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(data)]))
        longest = max(int(size) for size in sizes)
        padded = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(padded, torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8))
        return [part[: int(size)].numpy().tobytes() for part, size in zip(padded, sizes, strict=True)]


ONE = Ranks()
"""A trainer of a single process."""


def join_group(device: torch.device, *, timeout_s: float) -> Ranks:
    """Joins the group of processes that torchrun's variables describe. Collective.

    CPU tensors travel by gloo, those on a GPU by NCCL. Waiting for another rank ends with an error after `timeout_s`.
    """
    dist.init_process_group(_backend(device), timeout=timedelta(seconds=timeout_s))
    return Ranks(dist.get_rank(), dist.get_world_size())


def leave_group() -> None:
    """Ends the communication, if there is any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def is_communication(error: BaseException) -> bool:
    """Returns whether the error says that another rank is gone or late. gloo's errors can be told apart only by their
    message."""
    phrases = ("gloo", "timed out", "wait timeout", "connection closed", "nccl")
    return isinstance(error, dist.DistError) or (
        type(error) is RuntimeError and any(word in str(error).lower() for word in phrases)
    )


def _backend(device: torch.device) -> str:
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"


# --- tensors that may be sharded ---


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the whole tensor, without gradient; a tensor that is not sharded is returned as it is. Collective."""
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's shard, without gradient, in the same memory."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def shard_like(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns a tensor that every rank has whole on the device of `like`, and sharded as that is; nothing is
    communicated."""
    placed = whole.to(like.device)
    if not isinstance(like, DTensor):
        return placed
    sharded = distribute_tensor(placed, like.device_mesh, like.placements, src_data_rank=None)
    local = sharded.to_local().to(like.device)  # which is main memory where it is offloaded
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=whole.shape, stride=sharded.stride()
    )


def own_rows(tensor: DTensor) -> slice:
    """Returns the rows of a tensor that FSDP2 has sharded which are this rank's, as `torch.chunk` divides them."""
    assert tensor.placements == (Shard(0),), tensor.placements
    each = -(-len(tensor) // tensor.device_mesh.size())
    start = min(len(tensor), each * tensor.device_mesh.get_local_rank())
    return slice(start, min(len(tensor), start + each))


def with_rows(tensor: DTensor, own: torch.Tensor) -> DTensor:
    """Returns a tensor that is sharded like `tensor` and whose rows of this rank are `own`."""
    sharded: DTensor = DTensor.from_local(
        own, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return sharded


def host_copies(
    tensors: Mapping[str, torch.Tensor], ranks: Ranks, *, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Returns copies of the whole tensors in main memory, which the next step leaves alone, in `dtype` or their own
    types; empty on ranks other than the main one. Collective.

    Shards go to the main rank alone, at most `GATHERED_BYTES` of all ranks at a time: beside the copies, that is all
    the memory it takes, and the other ranks take a slice of their own shard. What lies on a GPU is copied to pinned
    memory, so that hundreds of small copies do not each wait for the device; not yet run on a GPU.
    """
    copies: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        kind, local = dtype or tensor.dtype, local_tensor(tensor)
        if ranks.is_main:
            copies[name] = torch.empty(tensor.shape, dtype=kind, pin_memory=local.is_cuda)
        if isinstance(tensor, DTensor) and ranks.size > 1:
            assert tensor.placements == (Shard(0),), tensor.placements
            _gather_rows(local, len(tensor), ranks, copies.get(name), kind)
        elif ranks.is_main:
            copies[name].copy_(local, non_blocking=True)
    if any(tensor.is_pinned() for tensor in copies.values()):
        torch.cuda.synchronize()
    return copies


def _gather_rows(
    local: torch.Tensor, num_rows: int, ranks: Ranks, whole: torch.Tensor | None, dtype: torch.dtype
) -> None:
    """Fills `whole`, which the main rank has, with the ranks' shards of a tensor of `num_rows`, slice by slice. All but
    the last shards have equal numbers of rows, as `torch.chunk` divides them. Collective."""
    each = -(-num_rows // ranks.size)
    step = max(1, GATHERED_BYTES // (ranks.size * dtype.itemsize * max(1, math.prod(local.shape[1:]))))
    for start in range(0, each, step):
        count = min(step, each - start)
        rows = local[start : start + count].to(dtype).contiguous()
        if len(rows) < count:  # all ranks must send equally much
            rows = torch.cat([rows, rows.new_zeros(count - len(rows), *rows.shape[1:])])
        parts = None if whole is None else [torch.empty_like(rows) for _ in range(ranks.size)]
        dist.gather(rows, parts)
        for rank, part in enumerate(parts or ()):
            assert whole is not None
            begin = rank * each + start
            target = whole[begin : min(begin + count, (rank + 1) * each)]
            target.copy_(part[: len(target)], non_blocking=True)


# --- FSDP2 ---


class Shards:
    """A model whose parameters are sharded over the ranks."""

    def __init__(self, model: torch.nn.Module, *, level: int) -> None:
        """Takes a `model` to which `shard` has been applied."""
        self._parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._level = level
        for part in self._parts:
            # With a factor of 1, and sums only, nothing is ever divided.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)

    def sync_gradients(self, *, last: bool) -> None:
        """Must be called before each backward pass. Gradients are reduce-scattered in the step's last one (from ZeRO 2
        on in each), after which each parameter's `grad` is its shard of the sum over all passes of all ranks."""
        for part in self._parts:
            part.set_requires_gradient_sync(last or self._level > 1, recurse=False)
            part.set_reshard_after_backward(last or self._level > 2, recurse=False)

    def reshard(self) -> None:
        """Frees the gathered weights, so that the next pass gathers them again. Gradients stay."""
        for part in self._parts:
            part.reshard()


def shard(
    model: torch.nn.Module,
    layers: Sequence[torch.nn.Module],
    *,
    in_float32: torch.nn.Module,
    level: int,
    device: torch.device,
    computation: torch.dtype | None,
    offload: bool = False,
) -> Shards:
    """Shards the parameters of `model` over the processes of the default group, those of each of its `layers` in one
    message. A single process makes a group of one. `in_float32` is a part whose parameters are never gathered in fewer
    bits.

    With `computation` all parameters are float32 and trained, and are gathered in that type; their gradients are summed
    in float32. Without, each keeps its type, and only float32 ones are trained: the levels 1 and 2 leave the frozen
    ones alone. With `offload` the shards, their gradients and the optimizer's state stay in main memory, where the
    optimizer steps them, and what is gathered is on the device. Not yet run on a GPU.
    """
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(_backend(device), store=store, rank=0, world_size=1)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=computation, reduce_dtype=torch.float32, cast_forward_inputs=False)
    where = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": where}
    frozen = {p for p in model.parameters() if not p.requires_grad} if level < 3 else set()
    if not frozen:
        for layer in layers:
            fully_shard(layer, reshard_after_forward=level == 3, **options)
    if computation not in (None, torch.float32):
        exact = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        fully_shard(in_float32, reshard_after_forward=False, **options | {"mp_policy": exact})
    # Not after the forward pass: the LM head is needed in the losses too, as is the witness.
    fully_shard(model, reshard_after_forward=False, ignored_params=frozen, **options)
    return Shards(model, level=level)

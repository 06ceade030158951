"""Tensors that FSDP may have sharded over the ranks, and plain ones, by the same functions."""

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or what all ranks together hold of it, on each of them; then it is a collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it, without gradient, in the same memory."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def sharded_like(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor that every rank has whole, on the device of `like` and sharded as that is; nothing is communicated."""
    placed = whole.to(like.device)
    if not isinstance(like, DTensor):
        return placed
    return distribute_tensor(placed, like.device_mesh, like.placements, src_data_rank=None)

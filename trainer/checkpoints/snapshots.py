"""Copies of tensors in main memory, which the next step leaves alone."""

from collections.abc import Mapping

import torch

from trainer.parallel import Ranks


def copies(
    tensors: Mapping[str, torch.Tensor], ranks: Ranks, *, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Each tensor whole, by its name, in `dtype` or its own type, contiguous; on other ranks than the main one nothing.
    Collective, and every rank must give the same names in the same order."""
    kept = {}
    for name, tensor in tensors.items():
        whole = ranks.whole(tensor.detach())  # one after the other: a GPU need not hold all of them whole
        if ranks.is_main:
            kept[name] = whole.to("cpu", dtype, copy=True).contiguous()
    return kept

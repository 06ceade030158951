"""A matrix a few rows at a time, so that what is computed from it on the way takes little memory."""

import torch

ROWS = 128
_ELEMENTS_AT_ONCE = 1 << 20


def in_parts(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views of consecutive rows of [out, in], all but the last with a multiple of `ROWS`."""
    parts: tuple[torch.Tensor, ...] = weight.split(max(1, _ELEMENTS_AT_ONCE // (ROWS * weight.shape[1])) * ROWS)
    return parts

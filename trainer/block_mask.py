"""Flex attention's mask of packed samples, made block by block and not token by token.

Legend: `S` samples, `T` packed tokens, `N` blocks of 128 of them.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Flex attention's own size."""


def block_mask_of(boundaries: torch.Tensor) -> BlockMask:
    """The causal mask within samples, on the device of their `boundaries` [S + 1], the cumulative lengths from 0."""
    ends = boundaries.cpu().numpy().astype(np.int64)
    partial, full = needed_blocks(ends)
    device, num_tokens = boundaries.device, int(ends[-1])
    sample_of = torch.from_numpy(np.repeat(np.arange(len(ends) - 1), np.diff(ends))).to(device)

    def may_attend(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (query >= key) & (sample_of[query] == sample_of[key])

    return BlockMask.from_kv_blocks(
        *_listed(partial, device),
        *_listed(full, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=may_attend,
        seq_lengths=(num_tokens, num_tokens),
    )


def needed_blocks(ends: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """[N, N] (queries by keys) the blocks of which some pairs may attend, and those of which all may.

    A block of queries needs the keys from the start of its first token's sample to itself. All pairs attend where the
    keys come before the queries and all tokens of both are of one sample.
    """
    num_tokens = int(ends[-1])
    blocks = np.arange(-(-num_tokens // BLOCK))
    first_sample = np.searchsorted(ends, blocks * BLOCK, side="right") - 1
    last_sample = np.searchsorted(ends, np.minimum((blocks + 1) * BLOCK, num_tokens) - 1, side="right") - 1
    first_needed = ends[first_sample] // BLOCK
    keys, queries = blocks[None, :], blocks[:, None]
    needed = (keys >= first_needed[:, None]) & (keys <= queries)
    whole = (blocks + 1) * BLOCK <= num_tokens
    full = needed & (keys < queries) & (first_sample[None, :] == last_sample[:, None]) & whole[:, None]
    return needed & ~full, full


def _listed(blocks: NDArray[np.bool_], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """[1, 1, N] number of marked blocks in each row, [1, 1, N, N] their columns first."""
    order = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    counts = blocks.sum(axis=1).astype(np.int32)
    return torch.from_numpy(counts).to(device)[None, None], torch.from_numpy(order).to(device)[None, None]

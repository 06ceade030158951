"""A micro-batch as tensors on the device, checked against what this trainer can train.

Legend: `T` packed tokens, `U` of them that are computed (prompts in common once), `S` samples, `K` tokens that carry
loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.attention import Layout, layout_of
from trainer.errors import BatchError
from trainer.prefixes import shared_prefixes
from transport.types import Bool, Float32, Int32, MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTokens:
    """What the forward pass needs."""

    token_ids: torch.Tensor
    """[U] i64"""
    position_ids: torch.Tensor
    """[U] i64 from 0 in each sample."""
    layout: Layout
    """Boundaries of the samples, and what they have in common."""
    before_targets: torch.Tensor
    """[K] i64 indices into U of the tokens before the targets."""
    targets: torch.Tensor
    """[K] i64 ids of the tokens whose log-probability is wanted."""
    temperatures: torch.Tensor
    """[K] f32"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossStreams:
    """What the policy loss needs besides the trainer's log-probabilities."""

    inference_logprobs: torch.Tensor
    """[K] f32"""
    advantages: torch.Tensor
    """[K] f32"""
    sample_ids: torch.Tensor
    """[K] i64, 0…S-1"""
    num_samples: int
    lags: torch.Tensor
    """[K] i64 versions between sampling and training."""
    num_loss_tokens: int
    """Of the whole step."""


def packed_tokens(batch: MicroBatch, device: torch.device) -> PackedTokens:
    """The inputs of the forward pass."""
    return pack(
        batch.token_ids,
        batch.sequence_lengths,
        loss_mask=batch.loss_mask,
        position_ids=batch.position_ids,
        temperatures=batch.per_token(batch.temperatures),
        device=device,
    )


def pack(
    token_ids: Int32,
    lengths: Int32,
    *,
    loss_mask: Bool,
    position_ids: Int32,
    temperatures: Float32,
    device: torch.device,
) -> PackedTokens:
    """Samples of `lengths` [S] one after the other; the streams are [T]. No sample's first token may carry loss."""
    kept, source = shared_prefixes(token_ids, lengths, loss_mask)
    targets = np.flatnonzero(loss_mask)

    def to_device(array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return PackedTokens(
        token_ids=to_device(token_ids[kept].astype(np.int64)),
        position_ids=to_device(position_ids[kept].astype(np.int64)),
        layout=layout_of(lengths, device, kept=kept, source=source),
        before_targets=to_device(source[targets - 1]),
        targets=to_device(token_ids[targets].astype(np.int64)),
        temperatures=to_device(temperatures[targets]),
    )


def loss_streams(batch: MicroBatch, device: torch.device) -> LossStreams:
    """The inputs of the policy loss. A token's lag is (step - 1) - version."""
    targets = np.flatnonzero(batch.loss_mask)
    sample_ids = np.repeat(np.arange(len(batch.sequence_lengths)), batch.sequence_lengths)
    lags = batch.step - 1 - batch.policy_versions[targets].astype(np.int64)
    return LossStreams(
        inference_logprobs=torch.from_numpy(batch.inference_logprobs[targets]).to(device),
        advantages=torch.from_numpy(batch.per_token(batch.advantages)[targets]).to(device),
        sample_ids=torch.from_numpy(sample_ids[targets]).to(device),
        num_samples=len(batch.sequence_lengths),
        lags=torch.from_numpy(lags).to(device),
        num_loss_tokens=batch.num_loss_tokens,
    )


def check_step(batches: Sequence[MicroBatch], *, sequence_len: int, vocab_size: int) -> None:
    """Raises `BatchError` where a step's micro-batches are not what one rank of this trainer can train."""
    if not batches:
        raise BatchError("the step has no micro-batches, expected at least one")
    for batch in batches:
        _check(batch, f"step {batch.step}, micro-batch {batch.index}", sequence_len, vocab_size)
    delivered = sum(int(batch.loss_mask.sum()) for batch in batches)
    stated = {batch.num_loss_tokens for batch in batches}
    if stated != {delivered} or delivered == 0:
        raise BatchError(
            f"step {batches[0].step}: num_loss_tokens is {sorted(stated)}, and the loss masks hold {delivered} tokens; "
            "both must be the same number, at least 1"
        )


def _check(batch: MicroBatch, where: str, sequence_len: int, vocab_size: int) -> None:
    length = len(batch.token_ids)
    if length > sequence_len:
        raise BatchError(
            f"{where} has {length} tokens, the trainer's sequence_len is {sequence_len}; "
            "give sequence_len (train.yaml) and seq_len (orch.yaml) the same value"
        )
    if (largest := int(batch.token_ids.max())) >= vocab_size:
        raise BatchError(
            f"{where} has token id {largest}, the model's vocabulary is 0…{vocab_size - 1}; "
            "server and trainer must load the same base model"
        )
    if (newest := int(batch.version_runs[:, 0].max())) >= batch.step:
        raise BatchError(f"{where} was sampled under version {newest}, which step {batch.step} is yet to make")

"""A micro-batch as tensors on the device, checked against what this trainer can train.

Legend: `T` packed tokens, `U` of them that are computed (prompts in common once), `S` samples, `K` tokens that carry
loss.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from configs.loss import LossSettings
from trainer.errors import BatchError
from trainer.layout import Layout, layout_of, to_device
from trainer.prefixes import shared_prefixes
from transport.records import Bool, Float32, Hint, Int32, MicroBatch, PreferencePair


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTokens:
    """What the forward pass needs."""

    token_ids: torch.Tensor
    """[U] i64"""
    position_ids: torch.Tensor
    """[U] i64 from 0 in each sample."""
    adapters: torch.Tensor | None
    """[U] i64 the adapter of each token; None where all are of the first."""
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
    present_lags: tuple[int, ...]
    """The lags that occur, ascending."""
    teacher_logprobs: torch.Tensor | None
    """[K] f32, absent without a teacher."""
    num_loss_tokens: int
    """Of the whole step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """What the micro-batches of a step hold for each stream: its normaliser, once summed over the ranks."""

    loss_tokens: int
    hint_tokens: int
    pairs: int

    def summed(self, total: Callable[[int], int]) -> "StepCounts":
        """Over all ranks, by what sums one number up."""
        return StepCounts(
            loss_tokens=total(self.loss_tokens), hint_tokens=total(self.hint_tokens), pairs=total(self.pairs)
        )


def packed_tokens(batch: MicroBatch, device: torch.device) -> PackedTokens:
    """The inputs of the forward pass."""
    return pack(
        batch.token_ids,
        batch.sequence_lengths,
        loss_mask=batch.loss_mask,
        position_ids=batch.position_ids,
        temperatures=batch.per_token(batch.temperatures),
        adapters=batch.adapters,
        device=device,
    )


def pack(
    token_ids: Int32,
    lengths: Int32,
    *,
    loss_mask: Bool,
    position_ids: Int32,
    temperatures: Float32,
    adapters: Int32 | None = None,
    device: torch.device,
) -> PackedTokens:
    """Samples of `lengths` [S] one after the other; the streams are [T], but for `adapters` [S] (None: the first). No
    sample's first token may carry loss."""
    kept, source = shared_prefixes(token_ids, lengths, loss_mask, adapters)
    targets = np.flatnonzero(loss_mask)

    return PackedTokens(
        token_ids=to_device(token_ids[kept].astype(np.int64), device),
        position_ids=to_device(position_ids[kept].astype(np.int64), device),
        adapters=None if adapters is None else to_device(np.repeat(adapters, lengths)[kept].astype(np.int64), device),
        layout=layout_of(lengths, device, kept=kept, source=source),
        before_targets=to_device(source[targets - 1], device),
        targets=to_device(token_ids[targets].astype(np.int64), device),
        temperatures=to_device(temperatures[targets], device),
    )


def loss_streams(batch: MicroBatch, device: torch.device) -> LossStreams:
    """The inputs of the policy loss. A token's lag is (step - 1) - version."""
    targets = np.flatnonzero(batch.loss_mask)
    sample_ids = np.repeat(np.arange(len(batch.sequence_lengths)), batch.sequence_lengths)
    lags = batch.step - 1 - batch.policy_versions[targets].astype(np.int64)
    teacher = batch.teacher_logprobs
    return LossStreams(
        inference_logprobs=to_device(batch.inference_logprobs[targets], device),
        advantages=to_device(batch.per_token(batch.advantages)[targets], device),
        sample_ids=to_device(sample_ids[targets], device),
        num_samples=len(batch.sequence_lengths),
        lags=to_device(lags, device),
        present_lags=tuple(np.unique(lags).tolist()),
        teacher_logprobs=None if teacher is None else to_device(teacher[targets], device),
        num_loss_tokens=batch.num_loss_tokens,
    )


def check_step(
    batches: Sequence[MicroBatch],
    *,
    sequence_len: int,
    vocab_size: int,
    settings: LossSettings,
    num_adapters: int = 1,
) -> StepCounts:
    """What one rank's micro-batches of a step hold. Raises `BatchError` where this trainer cannot train them."""
    if not batches:
        raise BatchError("the step has no micro-batches, expected at least one")
    for batch in batches:
        where = f"step {batch.step}, micro-batch {batch.index}"
        _check_samples(batch, where, sequence_len, vocab_size)
        _check_streams(batch, where, settings)
        _check_adapters(batch, where, num_adapters)
        for sample, hint in batch.hints:
            name = f"{where}, hint of sample {batch.rollout_ids[sample]}"
            _check_hint(hint, batch.token_ids[batch.starts[sample] :], name, sequence_len, vocab_size)
        for pair in batch.pairs:
            _check_pair(pair, f"{where}, preference pair of {pair.source!r}", sequence_len, vocab_size)
    return StepCounts(
        loss_tokens=sum(int(batch.loss_mask.sum()) for batch in batches),
        hint_tokens=sum(len(hint.student_index) for batch in batches for _, hint in batch.hints),
        pairs=sum(len(batch.pairs) for batch in batches),
    )


def check_totals(batches: Sequence[MicroBatch], totals: StepCounts, settings: LossSettings) -> None:
    """Raises `BatchError` where what the step's micro-batches say of all ranks together is not what these hold
    together, `totals`: the sum over the ranks of what `check_step` returns. Or where there are no loss tokens, hints or
    pairs at all, and tokens have a weight. Where hints or pairs alone have one, a step without any changes nothing: who
    writes hints, and teachers, may have been away."""
    for name in ("loss_tokens", "hint_tokens", "pairs"):
        stated, delivered = {getattr(batch, f"num_{name}") for batch in batches}, getattr(totals, name)
        if stated != {delivered}:
            raise BatchError(
                f"step {batches[0].step}: num_{name} is {sorted(stated)} in its micro-batches, and all ranks together "
                f"got {delivered}; each must state the number of the whole step"
            )
    if settings.trains_policy and not (totals.loss_tokens or totals.hint_tokens or totals.pairs):
        raise BatchError(
            f"step {batches[0].step} has 0 loss tokens, no hints and no pairs, and would train nothing with "
            f"loss.adv_tau {settings.adv_tau}, teacher_tau {settings.teacher_tau}, kl_tau {settings.kl_tau}, "
            f"alpha_sdpo {settings.alpha_sdpo}, beta_replay {settings.beta_replay}; expected loss tokens"
        )


def _check_samples(batch: MicroBatch, where: str, sequence_len: int, vocab_size: int) -> None:
    length = len(batch.token_ids)
    if length > sequence_len:
        raise BatchError(
            f"{where} has {length} tokens, the trainer's sequence_len is {sequence_len}; "
            "give sequence_len (train.yaml) and seq_len (orch.yaml) the same value"
        )
    _check_vocabulary(where, batch.token_ids, vocab_size)
    if (newest := int(batch.version_runs[:, 0].max())) >= batch.step:
        raise BatchError(f"{where} was sampled under version {newest}, which step {batch.step} is yet to make")


def _check_streams(batch: MicroBatch, where: str, settings: LossSettings) -> None:
    """Data without a weight would be ignored silently, and a teacher's weight without its data have no effect. Hints
    and pairs may be missing: not every step has any."""
    if batch.hints and not settings.alpha_sdpo:
        raise BatchError(
            f"{where} brings {len(batch.hints)} hints, and loss.alpha_sdpo is 0; set it above 0 (train.yaml), or let "
            "the orchestrator send no hints"
        )
    if batch.pairs and not settings.beta_replay:
        raise BatchError(
            f"{where} brings {len(batch.pairs)} preference pairs, and loss.beta_replay is 0; set it above 0 "
            "(train.yaml), or let the orchestrator send no pairs"
        )
    if batch.teacher_logprobs is not None and not settings.teacher_tau:
        raise BatchError(
            f"{where} brings the teacher's log-probabilities, and loss.teacher_tau is 0; set it above 0 (train.yaml), "
            "or let the orchestrator ask no teacher"
        )
    if batch.teacher_logprobs is None and settings.teacher_tau:
        raise BatchError(
            f"{where} lacks the teacher's log-probabilities, and loss.teacher_tau is {settings.teacher_tau}; give the "
            "orchestrator a teacher (orch.yaml), or set loss.teacher_tau to 0"
        )


def _check_adapters(batch: MicroBatch, where: str, num_adapters: int) -> None:
    of_samples = 0 if batch.adapters is None else int(batch.adapters.max())
    last = max([of_samples, *(pair.adapter for pair in batch.pairs)])
    if last >= num_adapters:
        raise BatchError(
            f"{where} is for adapter {last}, counted from 0, and the trainer has {num_adapters}; give lora_adapters "
            "(train.yaml) and model.lora_adapters (orch.yaml) the same names"
        )


def tokens_by_adapter(batches: Sequence[MicroBatch], *, num_adapters: int, settings: LossSettings) -> list[int]:
    """How many tokens of these micro-batches train each adapter: loss tokens, aligned tokens of hints and tokens of
    pairs' continuations, of the streams whose weight is not 0."""
    counts = np.zeros(num_adapters, np.int64)
    for batch in batches:
        of_samples = np.zeros_like(batch.sequence_lengths) if batch.adapters is None else batch.adapters
        if settings.trains_policy:
            of_tokens = np.repeat(of_samples, batch.sequence_lengths)[batch.loss_mask]
            counts += np.bincount(of_tokens, minlength=num_adapters)
        for sample, hint in batch.hints if settings.alpha_sdpo else ():
            counts[of_samples[sample]] += len(hint.student_index)
        for pair in batch.pairs if settings.beta_replay else ():
            counts[pair.adapter] += len(pair.chosen_ids) + len(pair.rejected_ids)
    return counts.tolist()


def _check_hint(hint: Hint, sample_ids: Int32, where: str, sequence_len: int, vocab_size: int) -> None:
    """`sample_ids` begin with the tokens of the hint's sample."""
    _check_vocabulary(where, hint.teacher_token_ids, vocab_size)
    differ = sample_ids[hint.student_index] != hint.teacher_token_ids[hint.teacher_index]
    if differ.any():
        first = int(np.argmax(differ))
        raise BatchError(
            f"{where} aligns the sample's token {hint.student_index[first]} with token {hint.teacher_index[first]} of "
            f"its context, and they are different ones ({differ.sum()} of {len(differ)} are); both indices must name "
            "the same tokens, in order"
        )
    if (length := int(hint.teacher_index[-1]) + 1) > sequence_len:
        raise BatchError(
            f"{where} has a context of {length} tokens up to its last aligned one, the trainer's sequence_len is "
            f"{sequence_len}; raise sequence_len, or let the orchestrator give hints to shorter samples"
        )


def _check_pair(pair: PreferencePair, where: str, sequence_len: int, vocab_size: int) -> None:
    for ids in (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids):
        _check_vocabulary(where, ids, vocab_size)
    if (length := len(pair.prompt_ids) + len(pair.chosen_ids) + len(pair.rejected_ids)) > sequence_len:
        raise BatchError(
            f"{where} has {length} tokens with its prompt once, the trainer's sequence_len is {sequence_len}; raise "
            "sequence_len, or let the orchestrator send shorter pairs"
        )


def _check_vocabulary(where: str, token_ids: Int32, vocab_size: int) -> None:
    if (largest := int(token_ids.max())) >= vocab_size:
        raise BatchError(
            f"{where} has token id {largest}, the model's vocabulary is 0…{vocab_size - 1}; "
            "server and trainer must load the same base model"
        )

"""Checks a step's micro-batches against what this trainer can train, and counts what they hold."""

from collections.abc import Iterator, Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np
from grpo.configs.loss import LossSettings
from grpo.trainer.errors import BatchError
from grpo.trainer.packing import first_fit
from grpo.transport.prefixes import tree_order
from grpo.transport.records import Bool, MicroBatch
from msgspec.structs import replace

_GOLDEN = (5**0.5 - 1) / 2
"""Multiples of it, modulo 1, fall evenly between 0 and 1."""


class StepCounts(NamedTuple):
    """Counts of what micro-batches hold for each loss term. Summed over the ranks they are the losses' normalisers."""

    loss_tokens: int
    samples: int
    """Samples with loss tokens."""
    hint_tokens: int
    pairs: int


def counts_of(batches: Sequence[MicroBatch]) -> StepCounts:
    """Returns what these micro-batches hold."""
    return StepCounts(
        loss_tokens=sum(int(batch.loss_mask.sum()) for batch in batches),
        samples=sum(int(np.logical_or.reduceat(batch.loss_mask, batch.starts).sum()) for batch in batches),
        hint_tokens=sum(len(hint.student_index) for batch in batches for _, hint in batch.hints),
        pairs=sum(len(batch.pairs) for batch in batches),
    )


def num_signal_tokens(batches: Sequence[MicroBatch], settings: LossSettings) -> int:
    """Returns how many loss tokens of these micro-batches have anything to teach: an advantage other than 0, or any
    where another term of the objective moves the policy."""
    if settings.alpha_sdpo or settings.beta_replay:
        return counts_of(batches).loss_tokens
    return sum(int(_has_signal(batch, settings).sum()) for batch in batches)


class BySignal(NamedTuple):
    """Micro-batches of one optimizer step, split by whether the policy loss may have a gradient from a sample."""

    teaching: list[MicroBatch]
    silent: list[MicroBatch]
    """Samples with loss tokens whose coefficients are all exactly 0: the share of them that is computed."""
    silent_weight: float
    """Loss tokens of all silent samples for each one that is computed."""
    skipped: list[MicroBatch]
    """The silent samples that are not computed."""


def by_signal(batches: Sequence[MicroBatch], settings: LossSettings) -> BySignal:
    """Returns the samples from which the policy loss may have a gradient, and `silent_share` of the others with loss
    tokens, at least one of them, evenly over the step and at other places in other steps. A micro-batch without silent
    samples stays as it is."""
    teaching, others = list[MicroBatch](), list[tuple[MicroBatch, Bool]]()
    for batch in batches:
        has_loss, has_signal = (
            np.logical_or.reduceat(tokens, batch.starts) for tokens in (batch.loss_mask, _has_signal(batch, settings))
        )
        if (silent := has_loss & ~has_signal).any():
            others.append((batch, silent))
            teaching += _only(batch, has_signal)
        elif has_loss.any():
            teaching.append(batch)
    if not others:
        return BySignal(teaching, [], 1.0, [])
    numbers = [int(silent.sum()) for _, silent in others]
    computed = np.split(_evenly(sum(numbers), settings.silent_share, batches[0].step), np.cumsum(numbers)[:-1])
    chosen, skipped, num_tokens = list[MicroBatch](), list[MicroBatch](), 0
    for (batch, silent), places in zip(others, computed, strict=True):
        num_tokens += int(batch.loss_mask[np.repeat(silent, batch.sequence_lengths)].sum())
        is_computed = silent.copy()
        is_computed[silent] = places
        chosen += _only(batch, is_computed)
        skipped += _only(batch, silent & ~is_computed)
    return BySignal(teaching, chosen, num_tokens / sum(int(batch.loss_mask.sum()) for batch in chosen), skipped)


def _evenly(number: int, share: float, step: int) -> Bool:
    """Returns [number] True at a share of the places, at least at one, in equal distances from one that is the step's
    own: over many steps each place is as likely."""
    phase = step * _GOLDEN % 1
    chosen: Bool = np.diff(np.floor(share * np.arange(number + 1) + phase)) > 0
    if not chosen.any():
        chosen[int(phase * number)] = True
    return chosen


def _has_signal(batch: MicroBatch, settings: LossSettings) -> Bool:
    """Returns [T] which tokens may have a coefficient other than 0 in the policy loss. An advantage that is not a
    number is one of them."""
    if settings.teacher_tau or settings.kl_tau or settings.entropy_tau or settings.import_path:
        return batch.loss_mask
    has_advantage: Bool = batch.per_token(batch.advantages) != 0
    return batch.loss_mask & has_advantage


def in_rows(batches: Sequence[MicroBatch], *, capacity: int) -> list[MicroBatch]:
    """Returns the samples as micro-batches of at most `capacity` tokens, for a model that shares none among them;
    without hints and pairs where one is divided."""
    found = list[MicroBatch]()
    for batch in batches:
        if len(batch.token_ids) <= capacity:
            found.append(batch)
            continue
        for chosen in first_fit(batch.sequence_lengths.tolist(), capacity=capacity):
            found += _only(batch, np.isin(np.arange(len(batch.sequence_lengths)), chosen))
    return found


def _only(batch: MicroBatch, chosen: Bool) -> list[MicroBatch]:
    """Returns the samples of `chosen` [S] as one micro-batch, or none, without hints and pairs."""
    if not chosen.any():
        return []
    tokens = np.repeat(chosen, batch.sequence_lengths)
    versions = batch.policy_versions[tokens]
    streams = {
        name: getattr(batch, name)[tokens if len(getattr(batch, name)) == len(tokens) else chosen]
        for name in ("token_ids", "loss_mask", "inference_logprobs", "advantages", "temperatures")
    }
    part = replace(
        batch,
        **streams,
        sequence_lengths=batch.sequence_lengths[chosen],
        version_runs=np.stack([versions, np.ones_like(versions)], axis=1),
        rollout_ids=tuple(compress(batch.rollout_ids, chosen)),
        teacher_logprobs=None if batch.teacher_logprobs is None else batch.teacher_logprobs[tokens],
        adapters=None if batch.adapters is None else batch.adapters[chosen],
        envs=tuple(compress(batch.envs, chosen)),
        servers=tuple(compress(batch.servers, chosen)),
        hints=(),
        pairs=(),
    )
    return [part]


def check_step(
    batches: Sequence[MicroBatch],
    *,
    sequence_len: int,
    pack_tokens: int,
    vocab_size: int,
    settings: LossSettings,
    num_adapters: int = 1,
) -> None:
    """Raises `BatchError` if this trainer cannot train one rank's micro-batches of a step."""
    for batch in batches:
        for problem in (
            *_size_problems(batch, sequence_len, pack_tokens, vocab_size, num_adapters),
            *_term_problems(batch, settings),
        ):
            raise BatchError(f"step {batch.step}, micro-batch {batch.index} {problem}")


def tokens_by_adapter(batches: Sequence[MicroBatch], *, num_adapters: int, settings: LossSettings) -> list[int]:
    """Returns how many tokens of these micro-batches train each adapter: loss tokens, aligned tokens of hints and
    tokens of pairs' continuations, of the loss terms whose weight is not 0."""
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


def _size_problems(
    batch: MicroBatch, sequence_len: int, pack_tokens: int, vocab_size: int, num_adapters: int
) -> Iterator[str]:
    pairs = [np.concatenate([pair.prompt_ids, pair.chosen_ids, pair.rejected_ids]) for pair in batch.pairs]
    contexts = [hint.teacher_token_ids[: hint.teacher_index[-1] + 1] for _, hint in batch.hints]
    longest = max(map(len, (*pairs, *contexts)), default=0)
    if (longest := max(longest, int(batch.sequence_lengths.max()))) > sequence_len:
        yield (
            f"has a sample of {longest} tokens, or a preference pair, its prompt once, or a hint's context; the "
            f"trainer's sequence_len is {sequence_len}; give sequence_len (train.yaml) and seq_len (orch.yaml) the "
            "same value"
        )
    if len(batch.token_ids) > pack_tokens and (computed := num_computed(batch)) > pack_tokens:
        yield (
            f"has {computed} tokens, those once that samples share; the trainer's micro_batch_tokens is {pack_tokens}; "
            "give micro_batch_tokens the same value in train.yaml and orch.yaml"
        )
    for ids in (batch.token_ids, *pairs, *contexts):
        if (largest := int(ids.max())) >= vocab_size:
            yield (
                f"has token id {largest}, the model's vocabulary is 0…{vocab_size - 1}; server and trainer must load "
                "the same base model"
            )
    of_samples = 0 if batch.adapters is None else int(batch.adapters.max())
    if (last := max([of_samples, *(pair.adapter for pair in batch.pairs)])) >= num_adapters:
        yield (
            f"is for adapter {last}, counted from 0, and the trainer has {num_adapters}; give lora_adapters "
            "(train.yaml) and model.lora_adapters (orch.yaml) the same names"
        )


def num_computed(batch: MicroBatch) -> int:
    """Returns how many tokens of a micro-batch are computed: those once that samples begin with together."""
    of_samples = None if batch.adapters is None else batch.adapters.tolist()
    _, shared = tree_order(np.split(batch.token_ids, batch.starts[1:]), of_samples)
    return len(batch.token_ids) - sum(shared)


def _term_problems(batch: MicroBatch, settings: LossSettings) -> Iterator[str]:
    """Returns what does not fit between data and weights: data without a weight would be ignored silently, and a
    teacher's weight without its data would have no effect. Hints and pairs may be missing, because not every step has
    any."""
    teacher = batch.teacher_logprobs is not None
    brought = (
        ("alpha_sdpo", len(batch.hints), f"{len(batch.hints)} hints"),
        ("beta_replay", len(batch.pairs), f"{len(batch.pairs)} preference pairs"),
        ("teacher_tau", teacher, "the teacher's log-probabilities"),
    )
    for key, there, what in brought:
        if there and not getattr(settings, key):
            yield f"brings {what}, and loss.{key} is 0; set it above 0 (train.yaml), or let the orchestrator send none"
    if settings.teacher_tau and not teacher:
        yield (
            f"lacks the teacher's log-probabilities, and loss.teacher_tau is {settings.teacher_tau}; give the "
            "orchestrator a teacher (orch.yaml), or set loss.teacher_tau to 0"
        )

"""What a step's micro-batches hold, checked against what this trainer can train."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from configs.loss import LossSettings
from trainer.errors import BatchError
from transport.records import Int32, MicroBatch


class StepCounts(NamedTuple):
    """What micro-batches hold for each loss term: its normaliser, once summed over the ranks."""

    loss_tokens: int
    hint_tokens: int
    pairs: int


def counts_of(batches: Sequence[MicroBatch], reduce: Callable[[int], int] = int) -> StepCounts:
    """Returns what these micro-batches hold; `reduce` sums a number over the ranks."""
    return StepCounts(
        loss_tokens=reduce(sum(int(batch.loss_mask.sum()) for batch in batches)),
        hint_tokens=reduce(sum(len(hint.student_index) for batch in batches for _, hint in batch.hints)),
        pairs=reduce(sum(len(batch.pairs) for batch in batches)),
    )


def check_step(
    batches: Sequence[MicroBatch],
    *,
    sequence_len: int,
    vocab_size: int,
    settings: LossSettings,
    num_adapters: int = 1,
) -> None:
    """Raises `BatchError` where this trainer cannot train one rank's micro-batches of a step."""
    if not batches:
        raise BatchError("the step has no micro-batches, expected at least one")
    for batch in batches:
        where = f"step {batch.step}, micro-batch {batch.index}"
        for problem in (
            *_size_problems(batch, sequence_len, vocab_size, num_adapters),
            *_term_problems(batch, settings),
            *_hint_problems(batch),
        ):
            raise BatchError(f"{where} {problem}")


def check_totals(batches: Sequence[MicroBatch], totals: StepCounts, settings: LossSettings) -> None:
    """Raises `BatchError` where what the step's micro-batches say of all ranks together is not what these hold
    together, `totals`. Or where there are no loss tokens, hints or pairs at all, and tokens have a weight. Where hints
    or pairs alone have one, a step without any changes nothing: who writes hints, and teachers, may have been away."""
    for name, delivered in totals._asdict().items():
        stated = {getattr(batch, f"num_{name}") for batch in batches}
        if stated != {delivered}:
            raise BatchError(
                f"step {batches[0].step}: num_{name} is {sorted(stated)} in its micro-batches, and all ranks together "
                f"got {delivered}; each must state the number of the whole step"
            )
    if settings.trains_policy and not any(totals):
        raise BatchError(
            f"step {batches[0].step} has 0 loss tokens, no hints and no pairs, and would train nothing with "
            f"loss.adv_tau {settings.adv_tau}, teacher_tau {settings.teacher_tau}, kl_tau {settings.kl_tau}, "
            f"alpha_sdpo {settings.alpha_sdpo}, beta_replay {settings.beta_replay}; expected loss tokens"
        )


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


def _size_problems(batch: MicroBatch, sequence_len: int, vocab_size: int, num_adapters: int) -> Iterator[str]:
    pairs = [np.concatenate([pair.prompt_ids, pair.chosen_ids, pair.rejected_ids]) for pair in batch.pairs]
    contexts = [hint.teacher_token_ids[: hint.teacher_index[-1] + 1] for _, hint in batch.hints]
    sequences: dict[str, Sequence[Int32]] = {
        "": [batch.token_ids],
        " in a preference pair, its prompt once": pairs,
        " in a hint's context up to its last aligned one": contexts,
    }
    for what, all_ids in sequences.items():
        if (longest := max(map(len, all_ids), default=0)) > sequence_len:
            yield (
                f"has {longest} tokens{what}, the trainer's sequence_len is {sequence_len}; "
                "give sequence_len (train.yaml) and seq_len (orch.yaml) the same value"
            )
        if (largest := max((int(ids.max()) for ids in all_ids), default=0)) >= vocab_size:
            yield (
                f"has token id {largest}{what}, the model's vocabulary is 0…{vocab_size - 1}; server and trainer must "
                "load the same base model"
            )
    if (newest := int(batch.version_runs[:, 0].max())) >= batch.step:
        yield f"was sampled under version {newest}, which step {batch.step} is yet to make"
    of_samples = 0 if batch.adapters is None else int(batch.adapters.max())
    if (last := max([of_samples, *(pair.adapter for pair in batch.pairs)])) >= num_adapters:
        yield (
            f"is for adapter {last}, counted from 0, and the trainer has {num_adapters}; give lora_adapters "
            "(train.yaml) and model.lora_adapters (orch.yaml) the same names"
        )


def _term_problems(batch: MicroBatch, settings: LossSettings) -> Iterator[str]:
    """Data without a weight would be ignored silently, and a teacher's weight without its data have no effect. Hints
    and pairs may be missing: not every step has any."""
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


def _hint_problems(batch: MicroBatch) -> Iterator[str]:
    for sample, hint in batch.hints:
        own = batch.token_ids[batch.starts[sample] :][hint.student_index]
        differ = own != hint.teacher_token_ids[hint.teacher_index]
        if differ.any():
            first = int(np.argmax(differ))
            yield (
                f"aligns token {hint.student_index[first]} of sample {batch.rollout_ids[sample]} with token "
                f"{hint.teacher_index[first]} of its hint's context, and they are different ones ({differ.sum()} of "
                f"{len(differ)} are); both indices must name the same tokens, in order"
            )

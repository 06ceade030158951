"""Where a step that is not finite comes from: micro-batch, sample, token and term.

Each part of the step is computed alone: a sample, a hint, a preference pair; and of one that is not finite alone, its
tokens. Nothing is applied.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from configs.loss import LossSettings
from trainer.batch import PackedTokens, packed_tokens
from trainer.model import Policy
from trainer.objective import Objective, gradient_norm
from trainer.packs import pair_pack
from trainer.parallel import ONE
from trainer.streams import PolicyStream
from transport.records import MicroBatch

_LARGEST = float(torch.finfo(torch.float32).max)
_MAX_TOKENS = 5
"""So many of a part's tokens are named; of the others their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a step, or a part of one, comes to."""

    loss: float
    grad_norm: float

    @property
    def is_finite(self) -> bool:
        """Whether the step could be applied."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A part of a step that is not finite.

    Example: ``Finding(micro_batch=1, part="sample 3 (rollout 17/2)", term="policy", why="token 57 (id 12): its
    log-probability is nan")``
    """

    micro_batch: int
    part: str
    term: str
    """`policy`, `sdpo` or `dpo`, as in the metrics' names."""
    why: str

    def __str__(self) -> str:
        return f"micro-batch {self.micro_batch}, {self.part}, {self.term}: {self.why}"


class Diagnosis:
    """Computes parts of a step of one rank, in a process without other ranks."""

    def __init__(self, policy: Policy, objective: Objective, settings: LossSettings) -> None:
        self._policy, self._objective, self._settings = policy, objective, settings

    def outcome(self, batches: Sequence[MicroBatch]) -> Outcome:
        """Loss and gradient norm of these micro-batches. Leaves no gradients."""
        for parameter in self._policy.parameters:
            parameter.grad = None
        metrics = self._objective.accumulate(batches)
        norm = gradient_norm(self._policy.parameters, ONE)
        for parameter in self._policy.parameters:
            parameter.grad = None
        return Outcome(loss=metrics["loss/total"], grad_norm=norm)

    def findings(self, batches: Sequence[MicroBatch]) -> Iterator[Finding]:
        """The parts that are not finite; at least one, for a step that is not."""
        found = False
        for batch in batches:
            if self.outcome([batch]).is_finite:
                continue
            found = True
            of_batch = [*self._of_samples(batch), *self._of_hints(batch), *self._of_pairs(batch)]
            yield from of_batch
            if not of_batch:
                yield _of(batch, "all parts together", "total", "each part is finite, and together they are not")
        if not found:
            largest = max(batches, key=lambda batch: self.outcome([batch]).grad_norm)
            yield _of(
                largest, "all parts", "total", "each micro-batch is finite alone; this one's gradient is the largest"
            )

    def _of_samples(self, batch: MicroBatch) -> Iterator[Finding]:
        for sample, rollout_id in enumerate(batch.rollout_ids):
            one = _sample(batch, sample)
            if one.loss_mask.any() and not self.outcome([one]).is_finite:
                yield _of(batch, f"sample {sample} (rollout {rollout_id})", "policy", self._why_policy(one))

    def _of_hints(self, batch: MicroBatch) -> Iterator[Finding]:
        for sample, hint in batch.hints:
            part = f"hint of sample {sample} (rollout {batch.rollout_ids[sample]})"
            one = replace(_silent(_sample(batch, sample)), hints=((0, hint),))
            if not self.outcome([one]).is_finite:
                yield _of(batch, part, "sdpo", self._why_hint(one))

    def _of_pairs(self, batch: MicroBatch) -> Iterator[Finding]:
        for index, pair in enumerate(batch.pairs):
            one = replace(_silent(_sample(batch, 0)), pairs=(pair,))
            if not self.outcome([one]).is_finite:
                yield _of(batch, f"pair {index} (of {pair.source})", "dpo", self._why_pair(one))

    def _why_policy(self, one: MicroBatch) -> str:
        """Of a micro-batch with one sample: log-probabilities, else coefficients, else the gradient behind them."""
        tokens, places = packed_tokens(one, self._policy.device), np.flatnonzero(one.loss_mask)
        with torch.no_grad():
            logprobs = self._policy.logprobs(tokens)
        names = [f"token {place} of {len(one.token_ids)} (id {one.token_ids[place]})" for place in places]
        if bad := _not_finite(logprobs):
            return _tokens([f"{names[k]}: its log-probability is {float(logprobs[k])}" for k in bad])
        coefficients = -self._slopes(one, logprobs) * one.num_loss_tokens
        advantages = one.per_token(one.advantages)[places]
        ratios = logprobs.cpu().numpy() - one.inference_logprobs[places]
        about = [f"advantage {a:.4g}, log-ratio {r:.4g}" for a, r in zip(advantages, ratios, strict=True)]
        if bad := _not_finite(coefficients):
            return _tokens([f"{names[k]}: its coefficient is {float(coefficients[k])} ({about[k]})" for k in bad])
        terms = coefficients.double() * logprobs.double()
        if bad := [k for k, term in enumerate(terms.tolist()) if abs(term) > _LARGEST]:
            return _tokens([f"{names[k]}: its term, {float(terms[k]):.4g}, overflows ({about[k]})" for k in bad])
        bad = self._guilty(range(len(names)), lambda some: _only_tokens(one, places[list(some)]))
        return _tokens([f"{names[k]}: its gradient ({about[k]})" for k in bad])

    def _guilty(self, items: Sequence[int], part: Callable[[Sequence[int]], MicroBatch]) -> list[int]:
        """Some of the items that are not finite alone, found by halving what is not."""
        if self.outcome([part(items)]).is_finite:
            return []
        if len(items) == 1:
            return list(items)
        half = len(items) // 2
        found = self._guilty(items[:half], part)
        return found if len(found) > _MAX_TOKENS else found + self._guilty(items[half:], part)

    def _slopes(self, one: MicroBatch, logprobs: torch.Tensor) -> torch.Tensor:
        """[K] derivative of the policy loss by each log-probability."""
        given = _Given(logprobs)
        stream = PolicyStream(cast(Policy, given), self._settings)
        for compute in stream.passes([one]):
            compute()[0].backward()
        slopes = given.leaf.grad
        return torch.zeros_like(given.leaf) if slopes is None else slopes

    def _why_hint(self, one: MicroBatch) -> str:
        """Of a micro-batch with one hint and nothing else."""
        _, hint = one.hints[0]
        bad = self._guilty(range(len(hint.student_index)), lambda some: _only_aligned(one, list(some)))
        places = [(hint.student_index[k], hint.teacher_index[k]) for k in bad]
        return _tokens(
            [f"token {s} (id {one.token_ids[s]}), token {t} with the hint: its divergence" for s, t in places]
        )

    def _why_pair(self, one: MicroBatch) -> str:
        """Of a micro-batch with one pair and nothing else."""
        (pair,) = one.pairs
        with torch.no_grad():
            logprobs = self._policy.logprobs(pair_pack([pair], device=self._policy.device).tokens)
        names = [f"chosen token {k} (id {token})" for k, token in enumerate(pair.chosen_ids)]
        names += [f"rejected token {k} (id {token})" for k, token in enumerate(pair.rejected_ids)]
        if bad := _not_finite(logprobs):
            return _tokens([f"{names[k]}: its log-probability is {float(logprobs[k])}" for k in bad])
        references = f"{pair.chosen_ref_logprob:.4g} and {pair.rejected_ref_logprob:.4g}"
        return f"its log-probabilities are finite, its loss or gradient is not (references {references})"


class _Given:
    """Stands for a policy whose log-probabilities are known."""

    def __init__(self, logprobs: torch.Tensor) -> None:
        self.device = logprobs.device
        self.leaf = logprobs.detach().clone().requires_grad_()

    def logprobs(self, _: PackedTokens) -> torch.Tensor:
        """[K]"""
        return self.leaf

    def logprobs_and_entropy(self, _: PackedTokens, **__: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """[K], [K]"""
        return self.leaf, torch.zeros_like(self.leaf)


def _of(batch: MicroBatch, part: str, term: str, why: str) -> Finding:
    return Finding(micro_batch=batch.index, part=part, term=term, why=why)


def _tokens(found: Sequence[str]) -> str:
    if not found:
        return "each of its tokens is finite alone, and together they are not"
    return "; ".join(found[:_MAX_TOKENS]) + ("; and more tokens" if len(found) > _MAX_TOKENS else "")


def _not_finite(values: torch.Tensor) -> list[int]:
    return [int(k) for k in torch.nonzero(~torch.isfinite(values)).flatten()]


def _sample(batch: MicroBatch, sample: int) -> MicroBatch:
    """One sample of it, without hints and pairs; the normalisers stay the step's."""
    start, length = int(batch.starts[sample]), int(batch.sequence_lengths[sample])
    rows = slice(start, start + length)
    teacher = batch.teacher_logprobs
    return replace(
        batch,
        token_ids=batch.token_ids[rows],
        sequence_lengths=batch.sequence_lengths[sample : sample + 1],
        loss_mask=batch.loss_mask[rows],
        inference_logprobs=batch.inference_logprobs[rows],
        advantages=batch.per_token(batch.advantages)[rows],
        temperatures=batch.per_token(batch.temperatures)[rows],
        version_runs=np.stack([batch.policy_versions[rows], np.ones(length, np.int32)], axis=1),
        teacher_logprobs=None if teacher is None else teacher[rows],
        adapters=None if batch.adapters is None else batch.adapters[sample : sample + 1],
        rollout_ids=batch.rollout_ids[sample : sample + 1],
        hints=(),
        pairs=(),
    )


def _silent(batch: MicroBatch) -> MicroBatch:
    """Without loss tokens."""
    return replace(batch, loss_mask=np.zeros_like(batch.loss_mask))


def _only_tokens(one: MicroBatch, places: NDArray[np.int64]) -> MicroBatch:
    """With loss at these places only."""
    mask = np.zeros_like(one.loss_mask)
    mask[places] = True
    return replace(one, loss_mask=mask)


def _only_aligned(one: MicroBatch, some: list[int]) -> MicroBatch:
    """Of a micro-batch with one hint: with these of its aligned tokens only."""
    sample, hint = one.hints[0]
    fewer = replace(hint, student_index=hint.student_index[some], teacher_index=hint.teacher_index[some])
    return replace(one, hints=((sample, fewer),))

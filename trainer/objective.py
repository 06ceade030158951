"""Computes one optimizer step's objective over its micro-batches: policy + alpha_sdpo · sdpo + beta_replay · dpo.

Leaves the gradients in the parameters; knows nothing of optimizers, versions or transports. A pass is one forward (for
self-distillation two, one of them without gradient) and the backward of its loss. Samples that teach nothing, such as
those of a group with equal rewards, have no backward; a share of them is computed, without gradient, for the metrics.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from grpo.configs.loss import DpoSettings, LossSettings, SdpoSettings
from grpo.trainer.batch import StepCounts, by_signal, counts_of, in_rows, tokens_by_adapter
from grpo.trainer.custom_loss import custom_loss, loss_function
from grpo.trainer.distributed import Ranks, full_tensor
from grpo.trainer.divergence import generalized_jsd
from grpo.trainer.ema import MovingAverage
from grpo.trainer.loss import Loss, PolicyTokens, coefficients, dpo_loss, policy_loss, sdpo_loss, token_weights
from grpo.trainer.metrics import Mean, Metric, State, Sum, reduced, states_of
from grpo.trainer.model import Policy
from grpo.trainer.packing import PackedTokens, first_fit, pack_rows, packed_tokens, to_device
from grpo.trainer.witness import WHOLE, Shares, Witnessing
from grpo.transport.records import Hint, Int32, MicroBatch, PreferencePair
from grpo.transport.witness import hint_id, pair_id, ramped, signs

Pass = Callable[[], Loss]


@dataclass(frozen=True, slots=True)
class LossTerm:
    """One term of the objective."""

    name: str
    """Its loss is the metric `loss/NAME`."""
    weight: float
    """Its factor in the total, after the warm-up."""
    warmup_steps: int
    """Steps over which the weight rises from 0."""
    decay_steps: int | None
    """Steps over which the weight then falls to 0; None if it stays."""
    prepare: Callable[[Sequence[MicroBatch], StepCounts], list[Pass]]
    """Returns the passes of these micro-batches, whose losses add up to the term's. Copies of their tensors to the
    device have begun when it returns, so that no pass waits for one."""
    dummy: Callable[[], torch.Tensor]
    """Returns what a rank without data differentiates while others compute a pass: it uses the same modules in the same
    order, and its gradients are zero."""

    def weight_at(self, step: int) -> float:
        """Returns its factor at a step, from 1."""
        return ramped(self.weight, step, self.warmup_steps, self.decay_steps)


class Hinted(NamedTuple):
    """A sample up to the last token that is compared, with its hint."""

    token_ids: Int32
    hint: Hint
    adapter: int
    rollout_id: str


class Objective:
    """The sum of the loss terms whose weight is not 0. The others cost nothing."""

    def __init__(self, policy: Policy, settings: LossSettings, ranks: Ranks, *, pack_tokens: int) -> None:
        """Raises `LossError` if `settings.import_path` names no function."""
        self._policy, self._ranks = policy, ranks
        self._parameters = (*policy.parameters, policy.witness.zeros)
        self._witness = Witnessing(policy.device)
        self._slope = torch.zeros(2, dtype=torch.float64, device=policy.device)
        """What `_watch_slope` has added up."""
        self._all_steps, self._settings = settings, settings
        """The settings, and those of the step that is computed."""
        self._pack_tokens, self._device = pack_tokens, policy.device
        self._loss_of = policy_loss
        if settings.import_path is not None:
            self._loss_of = partial(custom_loss, loss_function(settings.import_path))
        self.trained: Callable[[MicroBatch, PolicyTokens], None] = lambda *_: None
        """Called with the samples of each pass of the policy loss, and with their loss tokens."""
        self.average: MovingAverage | None = None
        """The average of the trained weights, which is the self-distillation's teacher; None if that is the current
        policy."""
        if settings.alpha_sdpo and settings.sdpo.teacher == "ema":
            self.average = MovingAverage(policy.named_parameters, decay=settings.sdpo.ema_decay)
        terms = (
            LossTerm("policy", float(settings.trains_policy), 0, None, self._policy_passes, self._dummy_logprobs),
            LossTerm("sdpo", settings.alpha_sdpo, *_steps(settings.sdpo), self._hint_passes, self._dummy_divergence),
            LossTerm("dpo", settings.beta_replay, *_steps(settings.dpo), self._pair_passes, self._dummy_logprobs),
        )
        self._terms = [term for term in terms if term.weight]

    def accumulate(self, batches: Sequence[MicroBatch], *, step: int, shares: Shares = WHOLE) -> dict[str, State]:
        """Computes the gradients of one optimizer step's micro-batches into the parameters' `grad`, which must be clear
        before. `step` is the step of their batch, `shares` are this optimizer step's in the batch's witness.

        Returns the metrics of all ranks: `loss/total` is the value that was differentiated; if several terms are on,
        each one's gradient norm before clipping and its share of their sum are among them. Collective: each rank has
        its own micro-batches, if any. An adapter for which no rank has tokens is left without gradients.
        """
        counts = StepCounts(*self._ranks.all_reduce_sum(counts_of(batches)))
        self._witness.shares, self._settings = shares, self._all_steps.at_step(step)
        work = [(term, term.prepare(batches, counts) if term.weight_at(step) else []) for term in self._terms]
        num_passes = [self._ranks.all_reduce_max(len(passes)) for _, passes in work]
        totals: dict[torch.nn.Parameter, torch.Tensor] = {}
        norms: dict[str, float] = {}
        silent, silent_weight = self._measure_silent(batches, counts)
        parts = list[dict[str, Metric]]()
        self._slope.zero_()
        for (term, passes), number in zip(work, num_passes, strict=True):
            if term.name == "policy" and counts.loss_tokens:
                number = max(number, 1)  # gradients of 0, by which the optimizer steps, if no sample teaches anything
            parts += self._backward(term, passes, number, step)
            if len(self._terms) > 1:
                norms[term.name] = gradient_norm(self._policy.parameters) if number else 0.0
            for parameter in self._parameters:
                if (gradient := parameter.grad) is not None:
                    earlier = totals.get(parameter)
                    totals[parameter] = gradient if earlier is None else earlier.add_(gradient)
                    parameter.grad = None
        for parameter in self._parameters:
            parameter.grad = totals.get(parameter)
        if self._settings.trains_policy and self._settings.import_path is None:
            parts.append({"policy/slope": Mean(self._slope[0], self._slope[1])})
        states = states_of([*parts, *silent])
        states[len(parts) :] = [_weighted(one, silent_weight) for one in states[len(parts) :]]
        own = reduced(states) | (_token_counts(batches) if self._settings.trains_policy else {})
        metrics = self._ranks.merged(own)
        losses = {key: value for key, (_, value, _) in metrics.items() if key.startswith("loss/")}
        losses["loss/total"] = sum(term.weight_at(step) * losses.get(f"loss/{term.name}", 0.0) for term in self._terms)
        metrics |= mean_over_steps(losses | _shares(norms))
        return metrics | (self._leave_out(batches) if self._policy.adapters else {})

    def after_step(self) -> None:
        """Updates the average of the weights. Must be called after each optimizer step."""
        if self.average is not None:
            self.average.update()

    def _leave_out(self, batches: Sequence[MicroBatch]) -> dict[str, State]:
        """Leaves adapters out of the step for which no rank has tokens. Returns each one's tokens as metrics."""
        names = self._policy.adapters
        counts = tokens_by_adapter(batches, num_adapters=len(names), settings=self._settings)
        totals = self._ranks.all_reduce_sum(counts)
        self._policy.leave_out(adapter for adapter, total in enumerate(totals) if not total)
        return {
            f"policy/adapter_tokens_{name}": ("sum", float(total), 0.0)
            for name, total in zip(names, totals, strict=True)
        }

    def _backward(self, term: LossTerm, passes: Sequence[Pass], number: int, step: int) -> list[dict[str, Metric]]:
        """Computes `number` passes: this rank's own, then dummy ones. Returns the metrics of its own."""
        metrics = []
        for index in range(number):
            self._policy.sync_gradients(last=index == number - 1)
            if index < len(passes):
                loss, measured = passes[index]()
                loss = term.weight_at(step) * loss
                metrics.append(measured)
            else:
                loss = term.dummy()
            (loss + self._policy.witness(self._witness.take())).backward()
        return metrics

    def _dummy_tokens(self) -> PackedTokens:
        """Returns the shortest sequence that has a target."""
        return pack_rows([(np.ones(2, np.int32), np.array([1]))], [0], self._device)

    def _dummy_logprobs(self) -> torch.Tensor:
        logprobs, _ = self._policy.logprobs_and_entropy(self._dummy_tokens())
        return 0.0 * logprobs.sum()

    # --- the policy gradient: one pass a micro-batch ---

    def _policy_passes(self, batches: Sequence[MicroBatch], counts: StepCounts) -> list[Pass]:
        return self._passes_over(by_signal(batches, self._settings).teaching, counts)

    def _passes_over(self, batches: Sequence[MicroBatch], counts: StepCounts) -> list[Pass]:
        if not self._policy.can_join:
            batches = in_rows(batches, capacity=self._pack_tokens)
        return [
            partial(
                self._policy_loss,
                batch,
                packed_tokens(batch, self._device),
                policy_inputs(batch, self._device),
                to_device(signs(batch.rollout_ids), self._device),
                counts,
            )
            for batch in batches
        ]

    @torch.no_grad()
    def _measure_silent(
        self, batches: Sequence[MicroBatch], counts: StepCounts
    ) -> tuple[list[dict[str, Metric]], float]:
        """Returns the metrics of a share of the samples that teach nothing, and the weight of each of their tokens.
        Computes dummy passes while other ranks have more of them, since sharded weights are gathered by all ranks
        together. Collective."""
        if not self._settings.trains_policy:
            return [], 1.0
        _, silent, weight, skipped = by_signal(batches, self._settings)
        for batch in skipped:
            self._witness.add_silent(batch, counts, self._settings)
        passes = self._passes_over(silent, counts)
        number = self._ranks.all_reduce_max(len(passes))
        metrics = [one()[1] for one in passes]
        for _ in range(number - len(passes)):
            self._dummy_logprobs()
        return metrics, weight

    def _policy_loss(
        self,
        batch: MicroBatch,
        packed: PackedTokens,
        inputs: Mapping[str, Any],
        of_samples: torch.Tensor,
        counts: StepCounts,
    ) -> Loss:
        differentiable = self._settings.entropy_tau > 0
        logprobs, entropies = self._policy.logprobs_and_entropy(packed, differentiable=differentiable)
        tokens = PolicyTokens(logprobs=logprobs, entropies=entropies, **inputs)
        self.trained(batch, tokens)
        in_loss = token_weights(tokens, counts, self._settings)
        weights = in_loss.double() * self._witness.shares.policy
        self._witness.add(packed, tokens.sample_ids, of_samples, weights, weights * tokens.advantages)
        if logprobs.requires_grad:
            self._watch_slope(tokens, in_loss)
        return self._loss_of(tokens, self._settings, counts)

    def _watch_slope(self, tokens: PolicyTokens, weights: torch.Tensor) -> None:
        """Has the loss's gradient by a pass's log-probabilities looked at once it is there. Each must be minus weight
        [K] times coefficient, or 0 where a mask drops the token. Adds the products of both and the squares of those
        expected, so that the one sum over the other is 1."""
        expected = (-weights * coefficients(tokens, self._settings)[0]).double()

        def see(found: torch.Tensor) -> None:
            wanted = torch.where(found == 0, 0.0, expected)
            self._slope += torch.stack([(wanted * found.double()).sum(), (wanted * wanted).sum()])

        tokens.logprobs.register_hook(see)

    # --- self-distillation: the policy on a sample learns from itself on the sample with a hint ---

    def _hint_passes(self, batches: Sequence[MicroBatch], counts: StepCounts) -> list[Pass]:
        """Returns passes on packs of at most `pack_tokens` tokens of samples, and of contexts, each up to the last
        token that is compared."""
        passes: list[Pass] = []
        for batch in batches:
            hinted = []
            for sample, hint in batch.hints:
                start, end = int(batch.starts[sample]), int(hint.student_index[-1]) + 1
                adapter = 0 if batch.adapters is None else int(batch.adapters[sample])
                rollout = batch.rollout_ids[sample]
                hinted.append(Hinted(batch.token_ids[start : start + end], hint, adapter, rollout))
            sizes = [max(len(one.token_ids), int(one.hint.teacher_index[-1]) + 1) for one in hinted]
            for chosen in first_fit(sizes, capacity=self._pack_tokens):
                pack = self._hint_pack([hinted[index] for index in chosen])
                passes.append(partial(self._hint_loss, *pack, counts.hint_tokens))
        return passes

    def _hint_pack(
        self, hinted: Sequence[Hinted]
    ) -> tuple[PackedTokens, PackedTokens, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the same tokens as the student sees them and in the teacher's context, [K] f32 their weights, [K] i64
        which hint each is of, and [S, 64] the hints' signs."""
        adapters, hints = [one.adapter for one in hinted], [one.hint for one in hinted]
        students = [(one.token_ids, one.hint.student_index) for one in hinted]
        contexts = [(hint.teacher_token_ids[: hint.teacher_index[-1] + 1], hint.teacher_index) for hint in hints]
        counts = [len(hint.student_index) for hint in hints]
        weights = np.repeat(np.array([hint.weight for hint in hints], np.float32), counts)
        student, teacher = (pack_rows(rows, adapters, self._device) for rows in (students, contexts))
        of_hints = signs([hint_id(one.rollout_id) for one in hinted])
        arrays = weights, np.repeat(np.arange(len(counts)), counts), of_hints
        return student, teacher, *(to_device(array, self._device) for array in arrays)  # type: ignore[return-value]

    def _hint_loss(
        self,
        student: PackedTokens,
        teacher: PackedTokens,
        weights: torch.Tensor,
        hint_ids: torch.Tensor,
        of_hints: torch.Tensor,
        num_hint_tokens: int,
    ) -> Loss:
        divergences, clipped = self._divergences(student, teacher)
        shares = weights.double() / num_hint_tokens * self._witness.shares.hints
        self._witness.add(student, hint_ids, of_hints, shares, shares)
        self._witness.add(teacher, hint_ids, of_hints, torch.zeros_like(shares), shares)
        return sdpo_loss(divergences, clipped, weights=weights, num_hint_tokens=num_hint_tokens)

    def _dummy_divergence(self) -> torch.Tensor:
        tokens = self._dummy_tokens()
        return 0.0 * self._divergences(tokens, tokens)[0].sum()

    def _divergences(self, student: PackedTokens, teacher: PackedTokens) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns [K] divergences with gradient to the student, and [K] bool where they are clipped. The teacher is
        computed first: its weights may be the average, which must not replace the current ones between a forward and
        its backward pass."""
        teacher_hidden, teacher_head = self._teacher(teacher)
        hidden, settings = self._policy.hidden(student), self._settings.sdpo
        return generalized_jsd(hidden, teacher_hidden, self._policy.head, settings, teacher_weight=teacher_head)

    @torch.no_grad()
    def _teacher(self, tokens: PackedTokens) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns [K, H] the teacher's hidden states, and [V, H] its LM head if that is not the student's."""
        if self.average is None:
            return self._policy.hidden(tokens), None
        with self.average.in_place():
            self._policy.reshard()
            hidden, head = self._policy.hidden(tokens), self._policy.head
            teacher = hidden, head.clone() if head.requires_grad else None
        self._policy.reshard()
        return teacher

    # --- direct preference optimization on pairs of continuations ---

    def _pair_passes(self, batches: Sequence[MicroBatch], counts: StepCounts) -> list[Pass]:
        """Returns passes on packs of pairs. A prompt counts once in the size of a pack, because it is computed once."""
        passes: list[Pass] = []
        for batch in batches:
            sizes = [len(pair.prompt_ids) + len(pair.chosen_ids) + len(pair.rejected_ids) for pair in batch.pairs]
            for chosen in first_fit(sizes, capacity=self._pack_tokens):
                pack = self._pair_pack([batch.pairs[index] for index in chosen])
                passes.append(partial(self._pair_loss, *pack, counts.pairs))
        return passes

    def _pair_pack(
        self, pairs: Sequence[PreferencePair]
    ) -> tuple[PackedTokens, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns prompt and chosen, then prompt and rejected continuation of each of P pairs; [K] i64 the continuation
        of each target, 2p for the chosen one of pair p and 2p + 1 for the rejected one; [P, 3] f32 the reference's sums
        and the score gap; [P, 64] the pairs' signs."""
        rows, counts = [], []
        for pair in pairs:
            for continuation in (pair.chosen_ids, pair.rejected_ids):
                ids = np.concatenate([pair.prompt_ids, continuation])
                rows.append((ids, np.arange(len(pair.prompt_ids), len(ids))))
                counts.append(len(continuation))
        tokens = pack_rows(rows, [pair.adapter for pair in pairs for _ in range(2)], self._device)
        known = [(pair.chosen_ref_logprob, pair.rejected_ref_logprob, pair.score_gap) for pair in pairs]
        continuations = np.repeat(np.arange(len(counts)), counts)
        arrays = continuations, np.array(known, np.float32), signs([pair_id(pair) for pair in pairs])
        return tokens, *(to_device(array, self._device) for array in arrays)  # type: ignore[return-value]

    def _pair_loss(
        self,
        tokens: PackedTokens,
        continuations: torch.Tensor,
        known: torch.Tensor,
        of_pairs: torch.Tensor,
        num_pairs: int,
    ) -> Loss:
        logprobs, chosen = self._policy.logprobs(tokens), self._settings.dpo
        shares = torch.full_like(logprobs, self._witness.shares.pairs, dtype=torch.float64, requires_grad=False)
        shares = shares / num_pairs
        self._witness.add(tokens, continuations // 2, of_pairs, shares, shares * (1 - 2 * (continuations % 2)))
        sums = logprobs.new_zeros(2 * len(known)).index_add(0, continuations, logprobs)
        loss, metrics = dpo_loss(
            sums[0::2],
            sums[1::2],
            chosen_ref_logprobs=known[:, 0],
            rejected_ref_logprobs=known[:, 1],
            score_gaps=known[:, 2] if chosen.objective == "regression" else None,
            beta=chosen.beta,
            num_pairs=num_pairs,
        )
        num_tokens = torch.full((), float(len(logprobs)), device=self._device)
        return loss, metrics | {"policy/dpo_tokens": Sum(num_tokens)}


def policy_inputs(batch: MicroBatch, device: torch.device) -> dict[str, Any]:
    """Returns the fields of `PolicyTokens` that the policy does not compute. A lag is (step - 1) - version."""
    targets = np.flatnonzero(batch.loss_mask)
    sample_ids = np.repeat(np.arange(len(batch.sequence_lengths)), batch.sequence_lengths)[targets]
    lags = batch.step - 1 - batch.policy_versions[targets].astype(np.int64)
    envs = sorted(set(batch.envs))
    of_samples = np.array([envs.index(env) for env in batch.envs], np.int64)
    teacher = batch.teacher_logprobs
    return {
        "inference_logprobs": to_device(batch.inference_logprobs[targets], device),
        "advantages": to_device(batch.per_token(batch.advantages)[targets], device),
        "teacher_logprobs": None if teacher is None else to_device(teacher[targets], device),
        "sample_ids": to_device(sample_ids, device),
        "num_samples": len(batch.sequence_lengths),
        "lags": to_device(lags, device),
        "present_lags": tuple(np.unique(lags).tolist()),
        "envs": tuple(envs),
        "env_ids": to_device(of_samples[sample_ids], device) if envs else None,
    }


def gradient_norm(parameters: Sequence[torch.nn.Parameter]) -> float:
    """Returns the Euclidean norm of the gradients of all parameters, over all ranks if they are sharded. Collective."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return float(full_tensor(torch.nn.utils.get_total_norm(gradients)))


def _token_counts(batches: Sequence[MicroBatch]) -> dict[str, State]:
    """Returns the loss tokens of micro-batches, computed or not, and how many are of each lag, as metrics."""
    lags = [batch.step - 1 - batch.policy_versions[batch.loss_mask].astype(np.int64) for batch in batches]
    found, numbers = np.unique(np.concatenate([*lags, np.zeros(0, np.int64)]), return_counts=True)
    counts = {f"policy/tokens_lag{lag}": number for lag, number in zip(found, numbers, strict=True)}
    return {key: ("sum", float(n), 0.0) for key, n in (counts | {"policy/tokens": numbers.sum()}).items()}


def _weighted(states: Mapping[str, State], weight: float) -> dict[str, State]:
    """Returns metrics whose means count `weight` times."""
    return {
        key: (op, weight * value, weight * count) if op == "mean" else (op, value, count)
        for key, (op, value, count) in states.items()
    }


def mean_over_steps(numbers: Mapping[str, float]) -> dict[str, State]:
    """Returns numbers of one optimizer step as metrics that are averaged over a batch's steps."""
    return {key: ("mean", value, 1.0) for key, value in numbers.items()}


def _shares(norms: Mapping[str, float]) -> dict[str, float]:
    """Returns norms and their shares by loss term; nothing if only one term is on."""
    total = sum(norms.values())
    metrics = {f"optim/grad_norm_{name}": norm for name, norm in norms.items()}
    return metrics | {f"optim/grad_share_{name}": norm / total if total else 0.0 for name, norm in norms.items()}


def _steps(chosen: SdpoSettings | DpoSettings) -> tuple[int, int | None]:
    return chosen.warmup_steps, chosen.decay_steps

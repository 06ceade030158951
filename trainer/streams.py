"""The streams of the objective: which passes a step needs for each, and what one pass computes.

A pass is one forward (self-distillation: two, one without gradient) whose loss is differentiated by the caller.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from configs.loss import DpoSettings, LossSettings, SdpoSettings
from trainer.batch import loss_streams, packed_tokens
from trainer.divergence import generalized_jsd
from trainer.ema import MovingAverage
from trainer.loss import dpo_loss, policy_loss, sdpo_loss
from trainer.metrics import Metric, Sum
from trainer.model import Policy
from trainer.packs import HintedSample, HintPack, hint_pack, idle_tokens, pair_pack, plan_hints, plan_pairs
from transport.records import MicroBatch, PreferencePair

Loss = tuple[torch.Tensor, dict[str, Metric]]
"""[] with gradient, and its metrics."""
Pass = Callable[[], Loss]

_POLICY_KEYS = (
    "ratio_type",
    "importance",
    "adv_tau",
    "teacher_tau",
    "kl_tau",
    "entropy_tau",
    "token_mask_low",
    "token_mask_high",
    "geo_mask_low",
    "geo_mask_high",
    "sequence_mask_low",
    "sequence_mask_high",
    "sequence_clip_high",
)


class Stream(Protocol):
    """One term of the objective."""

    name: str
    """Its loss is the metric `loss/NAME`."""
    weight: float
    """Of its loss in the total."""

    def passes(self, batches: Sequence[MicroBatch]) -> list[Pass]:
        """What a step with these micro-batches needs; the losses add up to the stream's. None without data."""

    def idle(self) -> torch.Tensor:
        """[] what a rank without data differentiates while others compute a pass: the same modules, in the same
        order, for gradients of zero."""


class PolicyStream:
    """The policy gradient, one pass a micro-batch."""

    name, weight = "policy", 1.0

    def __init__(self, policy: Policy, settings: LossSettings) -> None:
        self._policy = policy
        self._settings = settings.model_dump(include=set(_POLICY_KEYS))

    def passes(self, batches: Sequence[MicroBatch]) -> list[Pass]:
        return [partial(self._loss, batch) for batch in batches if batch.loss_mask.any()]

    def idle(self) -> torch.Tensor:
        return 0.0 * self._policy.logprobs(idle_tokens(self._policy.device)).sum()

    def _loss(self, batch: MicroBatch) -> Loss:
        streams = loss_streams(batch, self._policy.device)
        tokens = packed_tokens(batch, self._policy.device)
        differentiable = self._settings["entropy_tau"] > 0
        logprobs, entropies = self._policy.logprobs_and_entropy(tokens, differentiable=differentiable)
        return policy_loss(
            logprobs,
            entropies=entropies,
            inference_logprobs=streams.inference_logprobs,
            advantages=streams.advantages,
            teacher_logprobs=streams.teacher_logprobs,
            sample_ids=streams.sample_ids,
            num_samples=streams.num_samples,
            lags=streams.lags,
            present_lags=streams.present_lags,
            num_loss_tokens=streams.num_loss_tokens,
            **self._settings,
        )


class HintStream:
    """Self-distillation: the policy on a sample learns from itself on the sample with a hint."""

    name = "sdpo"

    def __init__(
        self, policy: Policy, settings: SdpoSettings, *, weight: float, sequence_len: int, average: MovingAverage | None
    ) -> None:
        self.weight = weight
        self._policy, self._settings, self._sequence_len, self._average = policy, settings, sequence_len, average

    def passes(self, batches: Sequence[MicroBatch]) -> list[Pass]:
        return [
            partial(self._loss, hinted, batch.num_hint_tokens)
            for batch in batches
            for hinted in plan_hints(batch, sequence_len=self._sequence_len)
        ]

    def idle(self) -> torch.Tensor:
        tokens = idle_tokens(self._policy.device)
        pack = HintPack(student=tokens, teacher=tokens, weights=torch.zeros(1, device=self._policy.device))
        return 0.0 * self._divergences(pack).sum()

    def _loss(self, hinted: Sequence[HintedSample], num_hint_tokens: int) -> Loss:
        pack = hint_pack(hinted, device=self._policy.device)
        divergences = self._divergences(pack)
        token_clip = self._settings.token_clip
        return sdpo_loss(divergences, weights=pack.weights, token_clip=token_clip, num_hint_tokens=num_hint_tokens)

    def _divergences(self, pack: HintPack) -> torch.Tensor:
        """[K] with gradient to the student. The teacher goes first: its weights may be the average in place of the
        current ones, which no forward pass that waits for its backward pass may see."""
        teacher_hidden, teacher_head = self._teacher(pack)
        return generalized_jsd(
            self._policy.hidden(pack.student),
            teacher_hidden,
            self._policy.head,
            teacher_weight=teacher_head,
            beta=self._settings.beta,
            temperature=self._settings.temperature,
            top_k=self._settings.top_k,
        )

    @torch.no_grad()
    def _teacher(self, pack: HintPack) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[K, H] its hidden states, and [V, H] its LM head where that is not the student's."""
        if self._average is None:
            return self._policy.hidden(pack.teacher), None
        with self._average.in_place():
            self._policy.forget_gathered()
            hidden, head = self._policy.hidden(pack.teacher), self._policy.head
            teacher = hidden, head.clone() if head.requires_grad else None
        self._policy.forget_gathered()
        return teacher


class PairStream:
    """Direct preference optimization on pairs of continuations."""

    name = "dpo"

    def __init__(self, policy: Policy, settings: DpoSettings, *, weight: float, sequence_len: int) -> None:
        self.weight = weight
        self._policy, self._settings, self._sequence_len = policy, settings, sequence_len

    def passes(self, batches: Sequence[MicroBatch]) -> list[Pass]:
        return [
            partial(self._loss, pairs, batch.num_pairs)
            for batch in batches
            for pairs in plan_pairs(batch, sequence_len=self._sequence_len)
        ]

    def idle(self) -> torch.Tensor:
        return 0.0 * self._policy.logprobs(idle_tokens(self._policy.device)).sum()

    def _loss(self, pairs: Sequence[PreferencePair], num_pairs: int) -> Loss:
        pack = pair_pack(pairs, device=self._policy.device)
        chosen, rejected = pack.continuation_logprobs(self._policy.logprobs(pack.tokens))
        loss, metrics = dpo_loss(
            chosen,
            rejected,
            chosen_ref_logprobs=pack.chosen_ref_logprobs,
            rejected_ref_logprobs=pack.rejected_ref_logprobs,
            beta=self._settings.beta,
            num_pairs=num_pairs,
        )
        num_tokens = torch.tensor(float(len(pack.tokens.targets)), device=self._policy.device)
        return loss, metrics | {"policy/dpo_tokens": Sum(num_tokens)}

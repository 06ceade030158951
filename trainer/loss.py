"""The three losses of the objective. Pure: tensors and numbers in, tensors out.

Legend: `K` tokens of one micro-batch that carry loss, `S` samples, `P` preference pairs. Tensors are float32 (float64
where the log-probabilities are). Each normaliser is the count of the whole optimizer step over all micro-batches and
ranks, so the losses of the micro-batches add up. What is not a number is never masked or clipped away, so that a step
with it is refused.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch.nn.functional import logsigmoid

from trainer.metrics import Mean, Metric, Sum
from trainer.policy_metrics import by_lag, k3, number_of, policy_metrics, share, teacher_metrics

MAX_LOG_RATIO = 20.0
"""Bound of |log ratio| before exp: exp(20) is 5e8, far beyond any mask, and finite in float32."""


def policy_loss(
    trainer_logprobs: torch.Tensor,
    *,
    entropies: torch.Tensor,
    inference_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    teacher_logprobs: torch.Tensor | None,
    sample_ids: torch.Tensor,
    num_samples: int,
    lags: torch.Tensor,
    present_lags: Sequence[int],
    num_loss_tokens: int,
    ratio_type: Literal["token", "sequence"],
    importance: Literal["mask", "clip"],
    adv_tau: float,
    teacher_tau: float,
    kl_tau: float,
    entropy_tau: float,
    token_mask_low: float,
    token_mask_high: float,
    geo_mask_low: float,
    geo_mask_high: float,
    sequence_mask_low: float,
    sequence_mask_high: float,
    sequence_clip_high: float,
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """AIPO (LlamaRL, arXiv:2505.24034, token by token) with masks, a teacher and a penalty on the log-ratio.

        log_ratio = clamp(trainer_logprobs - inference_logprobs, ±MAX_LOG_RATIO)
        ratio     = exp(log_ratio), with ratio_type "sequence" min(exp(Σ_sample log_ratio), sequence_clip_high)
        teaching  = clamp(teacher_logprobs - trainer_logprobs, ±MAX_LOG_RATIO)
        coeff     = ratio · (adv_tau · advantage + teacher_tau · teaching - kl_tau · log_ratio)       (detached)
        loss      = -(Σ_kept coeff · trainer_logprobs + entropy_tau · Σ_kept entropy) / num_loss_tokens

    A token is kept unless its own ratio, its sample's geometric mean ratio, or its sample's smallest or largest
    token ratio lies outside the bounds of the token, geo or sequence mask; bounds are inclusive, and apply to token
    ratios with either `ratio_type`. With `importance` "clip" no token is dropped for its own ratio: a token's ratio is
    min(exp(log_ratio), token_mask_high), as in the paper, and `token_mask_low` has no effect; a sequence's ratio has
    its own bound already.

    `trainer_logprobs` (with gradient), `entropies` of the trainer's distributions in nats (with gradient where
    `entropy_tau` is not 0), `inference_logprobs`, `advantages`, `teacher_logprobs`, `sample_ids` (0…S-1) and `lags`
    (versions between sampling and training) are [K]; `present_lags` are the lags that occur. Raises ValueError where
    `teacher_tau` is not 0 and there are no `teacher_logprobs`. Returns the loss [] and the metrics of
    `trainer/policy_metrics.py`.
    """
    if teacher_tau and teacher_logprobs is None:
        raise ValueError(f"teacher_tau is {teacher_tau} and teacher_logprobs is None; deliver them, or set it to 0")
    trainer = trainer_logprobs.detach()
    difference = trainer - inference_logprobs
    log_ratio = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    token_ratio = log_ratio.exp()
    log_ratio_sum, mean_log_ratio = _sample_sum_and_mean(log_ratio, sample_ids, num_samples)
    geo_ratio = mean_log_ratio.exp()
    smallest = _sample_extreme(token_ratio, sample_ids, num_samples, "amin")
    largest = _sample_extreme(token_ratio, sample_ids, num_samples, "amax")

    dropped = {
        "geo_low": (geo_ratio < geo_mask_low)[sample_ids],
        "geo_high": (geo_ratio > geo_mask_high)[sample_ids],
        "sequence_low": (smallest < sequence_mask_low)[sample_ids],
        "sequence_high": (largest > sequence_mask_high)[sample_ids],
    }
    if importance == "mask":
        dropped |= {"token_low": token_ratio < token_mask_low, "token_high": token_ratio > token_mask_high}
    keep = ~torch.stack(list(dropped.values())).any(dim=0)

    ratio, bounded = token_ratio, None
    if ratio_type == "sequence":
        sequence_ratio = log_ratio_sum.clamp(max=MAX_LOG_RATIO).exp()[sample_ids]
        ratio, bounded = _at_most(sequence_ratio, sequence_clip_high)
    elif importance == "clip":
        ratio, bounded = _at_most(token_ratio, token_mask_high)

    drive = adv_tau * advantages - kl_tau * log_ratio
    metrics: dict[str, Metric] = {}
    if teacher_logprobs is not None:
        gap = teacher_logprobs - trainer
        teaching = gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        drive = drive + teacher_tau * teaching
        metrics |= teacher_metrics(gap, teaching)
    objective = ratio * drive * trainer_logprobs
    if entropy_tau:
        objective = objective + entropy_tau * entropies
    loss = -torch.where(keep, objective, 0.0).sum() / num_loss_tokens

    metrics |= policy_metrics(
        loss.detach(), entropies.detach(), difference, log_ratio, token_ratio, keep, dropped, bounded
    )
    return loss, metrics | by_lag(difference, k3(log_ratio, token_ratio), lags, present_lags)


def sdpo_loss(
    divergences: torch.Tensor, *, weights: torch.Tensor, token_clip: float | None, num_hint_tokens: int
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """Self-distillation (SDPO, arXiv:2601.20802) on the aligned tokens of hinted turns.

        loss = Σ weight · min(divergence, token_clip) / num_hint_tokens

    `divergences` [K] are in nats, with gradient to the student; a token above `token_clip` (None: no bound) has none.
    `weights` [K] are the hints' weights, each token's own. Returns the loss [] and metrics: `policy/sdpo_divergence` is
    the mean before clipping and weighting, `policy/sdpo_clipped` the share of the tokens that were clipped.
    """
    plain = divergences.detach()
    count = number_of(plain)
    metrics: dict[str, Metric] = {
        "policy/sdpo_tokens": Sum(count),
        "policy/sdpo_divergence": Mean(plain.sum(), count),
    }
    if token_clip is not None:
        above = plain > token_clip
        divergences = torch.where(above, token_clip, divergences)
        metrics["policy/sdpo_clipped"] = share(above, count)
    loss = (weights * divergences).sum() / num_hint_tokens
    return loss, metrics | {"loss/sdpo": Sum(loss.detach())}


def dpo_loss(
    chosen_logprobs: torch.Tensor,
    rejected_logprobs: torch.Tensor,
    *,
    chosen_ref_logprobs: torch.Tensor,
    rejected_ref_logprobs: torch.Tensor,
    beta: float,
    num_pairs: int,
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """Direct preference optimization (arXiv:2305.18290, equation 7) on pairs of continuations of one prompt.

        margin = beta · [(chosen_logprobs - chosen_ref_logprobs) - (rejected_logprobs - rejected_ref_logprobs)]
        loss   = -Σ log σ(margin) / num_pairs

    All tensors are [P], sums over the tokens of a continuation; the first two have gradient, the reference's were
    delivered with the pairs. Returns the loss [] and metrics: `policy/dpo_margin` is the mean margin (the difference
    of implicit rewards), `policy/dpo_accuracy` the share of the pairs whose margin is above 0.
    """
    chosen = chosen_logprobs - chosen_ref_logprobs
    rejected = rejected_logprobs - rejected_ref_logprobs
    margin = beta * (chosen - rejected)
    loss = -logsigmoid(margin).sum() / num_pairs
    plain = margin.detach()
    count = number_of(plain)
    return loss, {
        "loss/dpo": Sum(loss.detach()),
        "policy/dpo_pairs": Sum(count),
        "policy/dpo_accuracy": share(plain > 0, count),
        "policy/dpo_margin": Mean(plain.sum(), count),
    }


def _at_most(ratio: torch.Tensor, bound: float) -> tuple[torch.Tensor, torch.Tensor]:
    """[K], [K] bool: the ratios, none above the bound, and which of them were."""
    return ratio.clamp(max=bound), ratio > bound


def _sample_sum_and_mean(
    values: torch.Tensor, sample_ids: torch.Tensor, num_samples: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """[K] → [S], [S]: sum and mean over each sample's loss tokens; 0 for a sample without any."""
    counts = values.new_zeros(num_samples).index_add_(0, sample_ids, torch.ones_like(values))
    sums = values.new_zeros(num_samples).index_add_(0, sample_ids, values)
    return sums, sums / counts.clamp(min=1)


def _sample_extreme(
    values: torch.Tensor, sample_ids: torch.Tensor, num_samples: int, reduce: Literal["amin", "amax"]
) -> torch.Tensor:
    """[K] → [S]: smallest or largest over each sample's loss tokens; 1, the ratio of equals, for a sample without."""
    start = values.new_ones(num_samples)
    return start.scatter_reduce_(0, sample_ids, values, reduce, include_self=False)

"""The three losses of the objective with their metrics. Pure: tensors and numbers in, tensors out.

Legend: `K` tokens of one micro-batch that carry loss, `S` samples, `P` preference pairs. Tensors are float32 (float64
where the log-probabilities are). Each normaliser is the count of the whole optimizer step over all micro-batches and
ranks, so the losses of the micro-batches add up. What is not a number is never masked or clipped away, so that a step
with it is refused.

Metrics of the policy loss, over the tokens that carry loss whether a mask drops them or not:

    loss/policy                 the loss
    policy/tokens               loss tokens
    policy/entropy, _/ENV       mean entropy of the distributions that the tokens were sampled from, in nats
    policy/kl                   Schulman's k3 estimate of KL(inference ‖ trainer): mean of ratio - 1 - log ratio
    policy/ratio_mean, _min, _max   of the token ratios exp(log ratio)
    policy/masked               share that is dropped
    policy/masked_REASON        share that one mask drops (token_low, geo_high, …); reasons may overlap
    policy/clipped              share whose importance ratio is lowered to its bound; only where ratios have one
    policy/log_ratio_clamped    share whose log ratio is clamped before exp
    policy/teacher_kl           mean of trainer - teacher (k1), which estimates KL(trainer ‖ teacher); of tokens that a
                                teacher knows
    policy/tokens_lagN          loss tokens that were sampled N versions ago
    policy/mismatch_kl_lagN     their k3
    policy/mismatch_max_lagN    their largest |log ratio|
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch.nn.functional import logsigmoid

from trainer.metrics import Max, Mean, Metric, Min, Sum

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
    envs: Sequence[str] = (),
    env_ids: torch.Tensor | None = None,
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

        log_ratio = trainer_logprobs - inference_logprobs
        ratio     = e(log_ratio), with ratio_type "sequence" min(e(Σ_sample log_ratio), sequence_clip_high)
        coeff     = ratio · (adv_tau · advantage + teacher_tau · (teacher_logprobs - trainer_logprobs)
                             - kl_tau · log_ratio)                                                       (detached)
        loss      = -(Σ_kept coeff · trainer_logprobs + entropy_tau · Σ_kept entropy) / num_loss_tokens

    with e(x) = exp(clamp(x, ±MAX_LOG_RATIO)). Only what is exponentiated so is clamped: sums, means, masks and
    penalties are of the raw values, so that one impossible token drops its sample by the geometric mask.

    A token is kept unless its own ratio, its sample's geometric mean ratio, or its sample's smallest or largest
    token ratio lies outside the bounds of the token, geo or sequence mask; bounds are inclusive, and apply to token
    ratios with either `ratio_type`. With `importance` "clip" no token is dropped for its own ratio: a token's ratio is
    min(e(log_ratio), token_mask_high), as in the paper, and `token_mask_low` has no effect; a sequence's ratio has
    its own bound already.

    `trainer_logprobs` (with gradient), `entropies` of the trainer's distributions in nats (with gradient where
    `entropy_tau` is not 0), `inference_logprobs`, `advantages`, `teacher_logprobs`, `sample_ids` (0…S-1), `lags`
    (versions between sampling and training) and `env_ids` (places in `envs`) are [K]; `present_lags` are the lags that
    occur, which the host knows, so that nothing waits for the device. Raises ValueError where `teacher_tau` is not 0
    and there are no `teacher_logprobs`. Returns the loss [] and metrics.
    """
    if teacher_tau and teacher_logprobs is None:
        raise ValueError(f"teacher_tau is {teacher_tau} and teacher_logprobs is None; deliver them, or set it to 0")
    trainer = trainer_logprobs.detach()
    log_ratio = trainer - inference_logprobs
    clamped = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    token_ratio = clamped.exp()
    log_ratio_sum, _ = _sample_sum_and_mean(log_ratio, sample_ids, num_samples)
    dropped = token_masks(
        log_ratio,
        sample_ids,
        num_samples,
        importance=importance,
        token_mask_low=token_mask_low,
        token_mask_high=token_mask_high,
        geo_mask_low=geo_mask_low,
        geo_mask_high=geo_mask_high,
        sequence_mask_low=sequence_mask_low,
        sequence_mask_high=sequence_mask_high,
    )
    keep = ~torch.stack(list(dropped.values())).any(dim=0)

    ratio, bound = token_ratio, None
    if ratio_type == "sequence":
        ratio = log_ratio_sum.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()[sample_ids]
        bound = sequence_clip_high
    elif importance == "clip":
        bound = token_mask_high

    drive = adv_tau * advantages
    if kl_tau:
        drive = drive - kl_tau * log_ratio
    if teacher_logprobs is not None and teacher_tau:
        drive = drive + teacher_tau * torch.where(teacher_logprobs > 0, 0.0, teacher_logprobs - trainer)
    bounded = ratio if bound is None else ratio.clamp(max=bound)
    # Dropped twice, so that neither value nor gradient meets what is infinite in a dropped token.
    objective = torch.where(keep, bounded * drive, 0.0) * trainer_logprobs
    if entropy_tau:
        objective = objective + entropy_tau * entropies
    loss = -torch.where(keep, objective, 0.0).sum() / num_loss_tokens

    count = _number_of(log_ratio)
    estimates = k3(log_ratio, token_ratio)
    metrics: dict[str, Metric] = {
        "loss/policy": Sum(loss.detach()),
        "policy/tokens": Sum(count),
        "policy/entropy": Mean(entropies.detach().sum(), count),
        "policy/kl": Mean(estimates.sum(), count),
        "policy/ratio_mean": Mean(token_ratio.sum(), count),
        "policy/masked": _share(~keep, count),
        "policy/log_ratio_clamped": _share(log_ratio != clamped, count),
    }
    metrics |= {f"policy/masked_{reason}": _share(tokens, count) for reason, tokens in dropped.items()}
    if bound is not None:
        metrics["policy/clipped"] = _share(ratio > bound, count)
    if teacher_logprobs is not None:
        untaught = teacher_logprobs > 0
        gap = torch.where(untaught, 0.0, trainer - teacher_logprobs)
        metrics["policy/teacher_kl"] = Mean(gap.sum(), count - untaught.sum())
    if len(token_ratio):
        metrics |= {"policy/ratio_min": Min(token_ratio.min()), "policy/ratio_max": Max(token_ratio.max())}
    for lag in present_lags:
        chosen = lags == lag
        metrics[f"policy/tokens_lag{lag}"] = Sum(chosen.sum())
        metrics[f"policy/mismatch_kl_lag{lag}"] = Mean(torch.where(chosen, estimates, 0.0).sum(), chosen.sum())
        metrics[f"policy/mismatch_max_lag{lag}"] = Max(torch.where(chosen, log_ratio.abs(), 0.0).max())
    for place, env in enumerate(envs):
        assert env_ids is not None
        chosen = torch.eq(env_ids, place)
        metrics[f"policy/entropy/{env}"] = Mean(torch.where(chosen, entropies.detach(), 0.0).sum(), chosen.sum())
    return loss, metrics


def token_masks(
    log_ratio: torch.Tensor,
    sample_ids: torch.Tensor,
    num_samples: int,
    *,
    importance: Literal["mask", "clip"],
    token_mask_low: float,
    token_mask_high: float,
    geo_mask_low: float,
    geo_mask_high: float,
    sequence_mask_low: float,
    sequence_mask_high: float,
) -> dict[str, torch.Tensor]:
    """Returns for each mask the tokens [K] that it drops, by its name; see `policy_loss`."""
    ratio = log_ratio.exp()  # may be infinite, and is only compared
    geo_ratio = _sample_sum_and_mean(log_ratio, sample_ids, num_samples)[1].exp()
    smallest = _sample_extreme(ratio, sample_ids, num_samples, "amin")
    largest = _sample_extreme(ratio, sample_ids, num_samples, "amax")
    dropped = {
        "geo_low": (geo_ratio < geo_mask_low)[sample_ids],
        "geo_high": (geo_ratio > geo_mask_high)[sample_ids],
        "sequence_low": (smallest < sequence_mask_low)[sample_ids],
        "sequence_high": (largest > sequence_mask_high)[sample_ids],
    }
    if importance == "mask":
        dropped |= {"token_low": ratio < token_mask_low, "token_high": ratio > token_mask_high}
    return dropped


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
    count = _number_of(plain)
    metrics: dict[str, Metric] = {
        "policy/sdpo_tokens": Sum(count),
        "policy/sdpo_divergence": Mean(plain.sum(), count),
    }
    if token_clip is not None:
        above = plain > token_clip
        divergences = torch.where(above, token_clip, divergences)
        metrics["policy/sdpo_clipped"] = _share(above, count)
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
    count = _number_of(plain)
    return loss, {
        "loss/dpo": Sum(loss.detach()),
        "policy/dpo_pairs": Sum(count),
        "policy/dpo_accuracy": _share(plain > 0, count),
        "policy/dpo_margin": Mean(plain.sum(), count),
    }


def k3(log_ratio: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
    """Returns [K] Schulman's k3 per token. expm1 keeps it exact near 0, where it is (log ratio)² / 2."""
    return torch.where(log_ratio.abs() < 1, torch.expm1(log_ratio), ratio - 1) - log_ratio


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


def _number_of(values: torch.Tensor) -> torch.Tensor:
    """[] how many values there are, as a number on their device."""
    return torch.full((), float(len(values)), device=values.device)


def _share(chosen: torch.Tensor, count: torch.Tensor) -> Metric:
    """The share of True in [K] bool, of which there are `count`."""
    return Mean(chosen.sum(), count)

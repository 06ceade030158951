"""The policy loss. Pure: tensors and numbers in, tensors out.

Legend: `K` tokens of one micro-batch that carry loss, `S` samples.
"""

from typing import Literal

import torch

from trainer.metrics import Largest, Mean, Metric, Smallest, Total

MAX_LOG_RATIO = 20.0
"""Bound of |log ratio| before exp: exp(20) is 5e8, far beyond any mask, and finite in float32."""


def policy_loss(
    trainer_logprobs: torch.Tensor,
    *,
    inference_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    sample_ids: torch.Tensor,
    num_samples: int,
    lags: torch.Tensor,
    num_loss_tokens: int,
    ratio_type: Literal["token", "sequence"],
    adv_tau: float,
    kl_tau: float,
    token_mask_low: float,
    token_mask_high: float,
    geo_mask_low: float,
    geo_mask_high: float,
    sequence_mask_low: float,
    sequence_mask_high: float,
    sequence_clip_high: float,
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """AIPO (Llama-RL's token-level objective) with masks, on the tokens that carry loss.

        log_ratio = clamp(trainer_logprobs - inference_logprobs, ±MAX_LOG_RATIO)
        ratio     = exp(log_ratio), or min(exp(Σ_sample log_ratio), sequence_clip_high) with ratio_type "sequence"
        coeff     = ratio · (adv_tau · advantage - kl_tau · log_ratio)                 (detached)
        loss      = -Σ_kept coeff · trainer_logprobs / num_loss_tokens

    A token is kept unless its own ratio, its sample's geometric mean ratio, or its sample's smallest or largest
    token ratio lies outside the bounds of the token, geo or sequence mask; bounds are inclusive, and apply to token
    ratios with either `ratio_type`. A ratio that is not a number is kept, so that the step is refused.

    `trainer_logprobs` (with gradient), `inference_logprobs`, `advantages`, `sample_ids` (0…S-1) and `lags`
    (versions between sampling and training) are [K]. `num_loss_tokens` is the normaliser: the loss tokens of the
    whole optimizer step over all micro-batches and ranks, so the losses of the micro-batches add up.

    Returns the loss [] and metrics. `policy/kl` and `policy/mismatch_kl_lag*` are Schulman's k3 estimate
    mean(ratio - 1 - log_ratio) of KL(inference ‖ trainer), `policy/mismatch_max_lag*` the largest |log ratio|
    before clamping, `policy/masked*` shares of the loss tokens; reasons may overlap.
    """
    difference = (trainer_logprobs.detach() - inference_logprobs).float()
    log_ratio = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    token_ratio = log_ratio.exp()
    log_ratio_sum, mean_log_ratio = _sample_sum_and_mean(log_ratio, sample_ids, num_samples)
    geo_ratio = mean_log_ratio.exp()
    smallest = _sample_extreme(token_ratio, sample_ids, num_samples, "amin")
    largest = _sample_extreme(token_ratio, sample_ids, num_samples, "amax")

    dropped = {
        "token_low": token_ratio < token_mask_low,
        "token_high": token_ratio > token_mask_high,
        "geo_low": (geo_ratio < geo_mask_low)[sample_ids],
        "geo_high": (geo_ratio > geo_mask_high)[sample_ids],
        "sequence_low": (smallest < sequence_mask_low)[sample_ids],
        "sequence_high": (largest > sequence_mask_high)[sample_ids],
    }
    keep = ~torch.stack(list(dropped.values())).any(dim=0)

    if ratio_type == "sequence":
        ratio = log_ratio_sum.clamp(max=MAX_LOG_RATIO).exp().clamp(max=sequence_clip_high)[sample_ids]
    else:
        ratio = token_ratio
    coeff = ratio * (adv_tau * advantages - kl_tau * log_ratio)
    loss = -torch.where(keep, coeff * trainer_logprobs, 0.0).sum() / num_loss_tokens

    metrics = _metrics(loss.detach(), difference, log_ratio, token_ratio, keep, dropped)
    return loss, metrics | _by_lag(difference, _k3(log_ratio, token_ratio), lags)


def _sample_sum_and_mean(
    values: torch.Tensor, sample_ids: torch.Tensor, num_samples: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """[K] → [S], [S]: sum and mean over each sample's loss tokens; 0 for a sample without any."""
    counts = torch.bincount(sample_ids, minlength=num_samples)
    sums = values.new_zeros(num_samples).index_add_(0, sample_ids, values)
    return sums, sums / counts.clamp(min=1)


def _sample_extreme(
    values: torch.Tensor, sample_ids: torch.Tensor, num_samples: int, reduce: Literal["amin", "amax"]
) -> torch.Tensor:
    """[K] → [S]: smallest or largest over each sample's loss tokens; 1, the ratio of equals, for a sample without."""
    start = values.new_ones(num_samples)
    return start.scatter_reduce_(0, sample_ids, values, reduce, include_self=False)


def _k3(log_ratio: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
    """[K] Schulman's k3 per token. expm1 keeps it exact near 0, where it is (log ratio)² / 2."""
    return torch.where(log_ratio.abs() < 1, torch.expm1(log_ratio), ratio - 1) - log_ratio


def _metrics(
    loss: torch.Tensor,
    difference: torch.Tensor,
    log_ratio: torch.Tensor,
    ratio: torch.Tensor,
    keep: torch.Tensor,
    dropped: dict[str, torch.Tensor],
) -> dict[str, Metric]:
    count = torch.tensor(float(len(ratio)), device=ratio.device)
    metrics: dict[str, Metric] = {
        "loss/policy": Total(loss),
        "policy/tokens": Total(count),
        "policy/kl": Mean(_k3(log_ratio, ratio).sum(), count),
        "policy/ratio_mean": Mean(ratio.sum(), count),
        "policy/masked": Mean((~keep).float().sum(), count),
        "policy/log_ratio_clamped": Mean((difference != log_ratio).float().sum(), count),
    }
    for reason, tokens in dropped.items():
        metrics[f"policy/masked_{reason}"] = Mean(tokens.float().sum(), count)
    if len(ratio):
        metrics["policy/ratio_min"] = Smallest(ratio.min())
        metrics["policy/ratio_max"] = Largest(ratio.max())
    return metrics


def _by_lag(difference: torch.Tensor, k3: torch.Tensor, lags: torch.Tensor) -> dict[str, Metric]:
    metrics: dict[str, Metric] = {}
    for lag in torch.unique(lags).tolist():
        of_lag = lags == lag
        metrics[f"policy/tokens_lag{lag}"] = Total(of_lag.float().sum())
        metrics[f"policy/mismatch_kl_lag{lag}"] = Mean(k3[of_lag].sum(), of_lag.float().sum())
        metrics[f"policy/mismatch_max_lag{lag}"] = Largest(difference[of_lag].abs().max())
    return metrics

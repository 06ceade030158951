"""Metrics of the policy loss, over the tokens that carry loss whether a mask drops them or not.

Legend: `K` tokens of one micro-batch that carry loss.

    loss/policy                 the loss
    policy/tokens               loss tokens
    policy/entropy              mean entropy of the distributions that the tokens were sampled from, in nats
    policy/kl                   Schulman's k3 estimate of KL(inference ‖ trainer): mean of ratio - 1 - log ratio
    policy/ratio_mean, _min, _max   of the token ratios exp(log ratio)
    policy/masked               share that is dropped
    policy/masked_REASON        share that one mask drops (token_low, geo_high, …); reasons may overlap
    policy/clipped              share whose importance ratio is lowered to its bound; only where ratios have one
    policy/log_ratio_clamped    share whose log ratio is clamped before exp
    policy/teacher_kl           see `teacher_metrics`; only with a teacher
    policy/teacher_clamped      share whose difference to the teacher is clamped; only with a teacher
    policy/tokens_lagN          loss tokens that were sampled N versions ago
    policy/mismatch_kl_lagN     their k3
    policy/mismatch_max_lagN    their largest |log ratio| before clamping
"""

from collections.abc import Sequence

import torch

from trainer.metrics import Max, Mean, Metric, Min, Sum


def policy_metrics(
    loss: torch.Tensor,
    entropies: torch.Tensor,
    difference: torch.Tensor,
    log_ratio: torch.Tensor,
    ratio: torch.Tensor,
    keep: torch.Tensor,
    dropped: dict[str, torch.Tensor],
    clipped: torch.Tensor | None,
) -> dict[str, Metric]:
    """What every step has.

    `difference` is the log ratio before clamping, `ratio` the token ratio, `dropped` are the tokens that a mask drops
    by reason, `clipped` those whose importance ratio was lowered (None where ratios have no bound), all [K].
    """
    count = number_of(ratio)
    metrics: dict[str, Metric] = {
        "loss/policy": Sum(loss),
        "policy/tokens": Sum(count),
        "policy/entropy": Mean(entropies.sum(), count),
        "policy/kl": Mean(k3(log_ratio, ratio).sum(), count),
        "policy/ratio_mean": Mean(ratio.sum(), count),
        "policy/masked": share(~keep, count),
        "policy/log_ratio_clamped": share(difference != log_ratio, count),
    }
    for reason, tokens in dropped.items():
        metrics[f"policy/masked_{reason}"] = share(tokens, count)
    if clipped is not None:
        metrics["policy/clipped"] = share(clipped, count)
    if len(ratio):
        metrics["policy/ratio_min"] = Min(ratio.min())
        metrics["policy/ratio_max"] = Max(ratio.max())
    return metrics


def teacher_metrics(gap: torch.Tensor, teaching: torch.Tensor) -> dict[str, Metric]:
    """`policy/teacher_kl` from teacher − trainer log-probabilities [K], before and after clamping.

    It estimates KL(trainer ‖ teacher), because the student sampled the tokens; the reverse would need the teacher's
    samples. The estimate is the mean of trainer − teacher (k1): without bias, and the very quantity that the teacher's
    term of the loss brings down. A single token that the teacher finds likely and the student nearly impossible moves
    it by at most the bound of the clamp, whereas the ratio teacher / trainer in k3, which suits the close pair of
    `policy/kl`, would outweigh all others. k1 may be negative where tokens are few.
    """
    count = number_of(teaching)
    return {
        "policy/teacher_kl": Mean(-teaching.sum(), count),
        "policy/teacher_clamped": share(gap != teaching, count),
    }


def by_lag(
    difference: torch.Tensor, estimates: torch.Tensor, lags: torch.Tensor, present: Sequence[int]
) -> dict[str, Metric]:
    """The mismatch by the versions between sampling and training; `estimates` are k3, all [K]. `present` are the lags
    that occur, which the host knows, so that nothing waits for the device."""
    metrics: dict[str, Metric] = {}
    for lag in present:
        of_lag = lags == lag
        count = of_lag.to(difference.dtype).sum()
        metrics[f"policy/tokens_lag{lag}"] = Sum(count)
        metrics[f"policy/mismatch_kl_lag{lag}"] = Mean(torch.where(of_lag, estimates, 0.0).sum(), count)
        metrics[f"policy/mismatch_max_lag{lag}"] = Max(torch.where(of_lag, difference.abs(), 0.0).max())
    return metrics


def k3(log_ratio: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
    """[K] Schulman's k3 per token. expm1 keeps it exact near 0, where it is (log ratio)² / 2."""
    return torch.where(log_ratio.abs() < 1, torch.expm1(log_ratio), ratio - 1) - log_ratio


def number_of(values: torch.Tensor) -> torch.Tensor:
    """[] how many values there are, as a number on their device."""
    return torch.full((), float(len(values)), device=values.device)


def share(chosen: torch.Tensor, count: torch.Tensor) -> Metric:
    """The share of True in [K] bool, of which there are `count`."""
    return Mean(chosen.float().sum(), count)

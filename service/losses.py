"""Computes the protocol's losses, which are sums over tokens, on the trainer's own ratio and bounds.

K targets; everything is float32 [K] (float64 where the log-probabilities are). r is exp(logprobs - sampling_logprobs).

    cross_entropy         Σ -logprobs · weights
    importance_sampling   Σ -r · advantages
    ppo                   Σ -min(r · advantages, clamp(r, low, high) · advantages)
    cispo                 Σ -clamp(r, low, high) · logprobs · advantages, the clamped ratio without gradient
"""

from collections.abc import Mapping
from typing import Any

import torch
from grpo.configs.loss import LossSettings
from grpo.service.errors import Refused
from grpo.trainer.batch import StepCounts
from grpo.trainer.loss import MAX_LOG_RATIO, PolicyTokens, policy_loss

LOW, HIGH = 0.8, 1.2
_SUM = StepCounts(loss_tokens=1, samples=1, hint_tokens=0, pairs=0)
_UNMASKED: dict[str, Any] = {
    "geo_mask_low": 0.0,
    "geo_mask_high": None,
    "sequence_mask_low": 0.0,
    "sequence_mask_high": None,
}


def clip_bounds(config: Mapping[str, float]) -> tuple[float, float]:
    """Returns the bounds of the ratio that `loss_fn_config` sets, 0.8 and 1.2 without. Raises `Refused`."""
    low, high = config.get("clip_low_threshold", LOW), config.get("clip_high_threshold", HIGH)
    if not 0 <= low < high < float("inf"):
        raise Refused(f"clip_low_threshold is {low} and clip_high_threshold {high}, expected 0 <= low < high")
    return low, high


def loss_and_values(
    loss_fn: str, logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor], config: Mapping[str, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what is differentiated [], and the protocol's loss of each token [K], without gradient.

    The two have the same gradient, and not always the same value: the trainer's policy loss is Σ -coefficient ·
    logprobs with a fixed coefficient.
    """
    plain = logprobs.detach()
    if loss_fn == "cross_entropy":
        values = -logprobs * inputs["weights"]
        return values.sum(), values.detach()
    sampled, advantages = inputs["logprobs"], inputs["advantages"]
    ratio = (plain - sampled).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if loss_fn == "importance_sampling":
        return _policy_loss(
            logprobs, sampled, advantages, LossSettings(importance="none", **_UNMASKED)
        ), -ratio * advantages
    low, high = clip_bounds(config)
    bounded = ratio.clamp(low, high)
    if loss_fn == "cispo":
        coefficient = bounded * advantages
        return -(coefficient * logprobs).sum(), -coefficient * plain
    settings = LossSettings(importance="ppo", token_mask_low=low, token_mask_high=high, **_UNMASKED)
    values = -torch.minimum(ratio * advantages, bounded * advantages)
    return _policy_loss(logprobs, sampled, advantages, settings), values


def _policy_loss(
    logprobs: torch.Tensor, sampled: torch.Tensor, advantages: torch.Tensor, settings: LossSettings
) -> torch.Tensor:
    """Returns the trainer's policy loss, summed over the tokens."""
    zeros = torch.zeros(len(logprobs), dtype=torch.int64, device=logprobs.device)
    tokens = PolicyTokens(
        logprobs=logprobs,
        entropies=torch.zeros_like(sampled),
        inference_logprobs=sampled,
        advantages=advantages,
        sample_ids=zeros,
        num_samples=1,
        lags=zeros,
    )
    loss, _ = policy_loss(tokens, settings, _SUM)
    return loss

"""Computes the protocol's losses, which are sums over tokens, on the trainer's own ratio and bounds.

K targets; everything is float32 [K] (float64 where the log-probabilities are). r is exp(logprobs - sampling_logprobs).

    cross_entropy         Σ -logprobs · weights
    importance_sampling   Σ -r · advantages
    ppo                   Σ -min(r · advantages, clamp(r, low, high) · advantages)
    cispo                 Σ -clamp(r, low, high) · logprobs · advantages, the clamped ratio without gradient
    gspo                  as ppo, with s in the place of r: the geometric mean of r over the datum's sampled tokens
    dro                   Σ -(logprobs · advantages - beta / 2 · (logprobs - sampling_logprobs)²) over sampled tokens

gspo's gradient is that of GSPO-token (arXiv:2507.18071, section 4.3): each token's log-probability is weighted by s
times its own advantage. A token was sampled if it has an advantage or a sampling log-probability that is not 0; prompts
have neither.
"""

from collections.abc import Mapping
from typing import Any

import torch
from grpo.configs.loss import LossSettings
from grpo.service.errors import Refused
from grpo.trainer.batch import StepCounts
from grpo.trainer.loss import MAX_LOG_RATIO, PolicyTokens, policy_loss

LOW, HIGH, BETA = 0.8, 1.2, 0.05
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


def check_config(loss_fn: str, config: Mapping[str, float]) -> None:
    """Raises `Refused` for a `loss_fn_config` that the loss cannot take."""
    if loss_fn == "dro" and not 0 <= config.get("beta", BETA) < float("inf"):
        raise Refused(f"beta is {config['beta']}, expected 0 or more")
    clip_bounds(config)


def loss_and_values(
    loss_fn: str,
    logprobs: torch.Tensor,
    inputs: Mapping[str, torch.Tensor],
    config: Mapping[str, float],
    datum_ids: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what is differentiated [], and the protocol's loss of each token [K], without gradient. `datum_ids` [K]
    i64 say which datum each token is of.

    The two have the same gradient, and not always the same value: the trainer's policy loss is Σ -coefficient ·
    logprobs with a fixed coefficient.
    """
    plain = logprobs.detach()
    if loss_fn == "cross_entropy":
        values = -logprobs * inputs["weights"]
        return values.sum(), values.detach()
    sampled, advantages = inputs["logprobs"], inputs["advantages"]
    log_ratio = plain - sampled
    given = (logprobs, sampled, advantages, datum_ids)
    if loss_fn in ("gspo", "dro"):
        chosen = ((advantages != 0) | (sampled != 0)).nonzero()[:, 0]
        given = (*(values[chosen] for values in given),)  # type: ignore[assignment]
        if loss_fn == "dro":
            beta, values = config.get("beta", BETA), torch.zeros_like(plain)
            values[chosen] = (beta / 2 * log_ratio**2 - plain * advantages)[chosen]
            return _policy_loss(
                *given, LossSettings(ratio_type="none", importance="none", kl_tau=beta, **_UNMASKED)
            ), values
        log_ratio = _means(log_ratio, datum_ids, chosen)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if loss_fn == "importance_sampling":
        return _policy_loss(*given, LossSettings(importance="none", **_UNMASKED)), -ratio * advantages
    low, high = clip_bounds(config)
    bounded = ratio.clamp(low, high)
    if loss_fn == "cispo":
        coefficient = bounded * advantages
        return -(coefficient * logprobs).sum(), -coefficient * plain
    kind: Any = {"ratio_type": "geometric"} if loss_fn == "gspo" else {}
    settings = LossSettings(importance="ppo", token_mask_low=low, token_mask_high=high, **kind, **_UNMASKED)
    values = -torch.minimum(ratio * advantages, bounded * advantages)
    return _policy_loss(*given, settings), values


def _means(values: torch.Tensor, datum_ids: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Returns [K] the mean of each token's datum over its chosen tokens, 0 where it has none."""
    number = int(datum_ids.max()) + 1
    counts = values.new_zeros(number).index_add_(0, datum_ids[chosen], torch.ones_like(values)[chosen])
    sums = values.new_zeros(number).index_add_(0, datum_ids[chosen], values[chosen])
    return (sums / counts.clamp(min=1))[datum_ids]


def _policy_loss(
    logprobs: torch.Tensor,
    sampled: torch.Tensor,
    advantages: torch.Tensor,
    datum_ids: torch.Tensor,
    settings: LossSettings,
) -> torch.Tensor:
    """Returns the trainer's policy loss, summed over the tokens."""
    tokens = PolicyTokens(
        logprobs=logprobs,
        entropies=torch.zeros_like(sampled),
        inference_logprobs=sampled,
        advantages=advantages,
        sample_ids=datum_ids,
        num_samples=int(datum_ids.max()) + 1 if len(datum_ids) else 1,
        lags=torch.zeros_like(datum_ids),
    )
    loss, _ = policy_loss(tokens, settings, _SUM)
    return loss

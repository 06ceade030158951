"""Computes the losses of the objective with their metrics, from tensors and settings alone.

The policy loss is made of three choices, each a function here: a *ratio* of trainer to server, a *bound* on it, and a
*normaliser*; docs/losses.md says which published loss is which three.

Legend: `K` tokens of one micro-batch that carry loss, `S` samples, `P` preference pairs. Tensors are float32 (float64
where the log-probabilities are). Each normaliser is a count of the whole optimizer step over all micro-batches and
ranks, so the losses of the micro-batches add up. A value that is not a number is never masked or clipped away, so that
its step is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from grpo.configs.loss import LossSettings
from grpo.trainer.batch import StepCounts
from grpo.trainer.metrics import Max, Mean, Metric, Min, Sum
from torch.nn.functional import logsigmoid

MAX_LOG_RATIO = 20.0
"""Bound of |log ratio| before exp: exp(20) is 5e8, far beyond any mask, and finite in float32."""
Loss = tuple[torch.Tensor, dict[str, Metric]]
"""A loss [] with gradient, and its metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTokens:
    """The loss tokens of one micro-batch: all that a policy loss may depend on."""

    logprobs: torch.Tensor
    """[K] by the trainer, with gradient."""
    entropies: torch.Tensor
    """[K] nats, of the trainer's distributions; with gradient where `entropy_tau` is above 0."""
    inference_logprobs: torch.Tensor
    """[K] by the server that sampled them."""
    advantages: torch.Tensor
    """[K]"""
    teacher_logprobs: torch.Tensor | None = None
    """[K] by the teacher or the reference, `NO_TEACHER_LOGPROB` for tokens that it does not know; None without one."""
    sample_ids: torch.Tensor
    """[K] i64 which sample each belongs to, from 0."""
    num_samples: int
    """S, samples without loss tokens included."""
    lags: torch.Tensor
    """[K] i64 versions between sampling and training."""
    present_lags: Sequence[int] = ()
    """The lags that occur, known to the host, so that nothing waits for the device."""
    envs: Sequence[str] = ()
    """Names of environments."""
    env_ids: torch.Tensor | None = None
    """[K] i64 places in `envs`."""


def policy_loss(tokens: PolicyTokens, settings: LossSettings, counts: StepCounts) -> Loss:
    """Returns the policy gradient's loss on tokens that an older policy has sampled.

        log_ratio = logprobs - inference_logprobs
        coeff     = bound(ratio(log_ratio)) · (adv_tau · advantage + teacher_tau · teacher - kl_tau · log_ratio)
        loss      = -Σ_kept w · (coeff · logprobs + entropy_tau · entropy)

    with `coeff` detached, `importance_ratio`, `bounded` and `token_weights` for ratio, bound and w, and for `teacher`
    the teacher's log-probability minus the trainer's (`teacher_kl` k1), or exp of that - 1 (k3). Where ppo's bound is
    reached, the advantage's part is 0. By default this is AIPO (LlamaRL, arXiv:2505.24034) with masks.

    Only what is exponentiated is clamped, to ±MAX_LOG_RATIO: sums, means, masks and penalties are of the raw values,
    so that one impossible token drops its sample by the geometric mask. Returns the loss [] and the metrics that
    docs/metrics.md lists. Raises ValueError where `teacher_tau` is not 0 and there are no `teacher_logprobs`.
    """
    trainer = tokens.logprobs.detach()
    log_ratio = trainer - tokens.inference_logprobs
    dropped = token_masks(log_ratio, tokens.sample_ids, tokens.num_samples, settings)
    keep = ~torch.stack([*dropped.values(), torch.zeros_like(log_ratio, dtype=torch.bool)]).any(dim=0)
    coeff, reached = coefficients(tokens, settings)
    # Dropped twice, so that neither value nor gradient meets what is infinite in a dropped token.
    objective = torch.where(keep, coeff, 0.0) * tokens.logprobs
    if settings.entropy_tau:
        objective = objective + settings.entropy_tau * tokens.entropies
    weights = token_weights(tokens, counts, settings)
    loss = -(weights * torch.where(keep, objective, 0.0)).sum()
    count = number_of(log_ratio)
    metrics = {"loss/policy": Sum(loss.detach()), "policy/masked": share(~keep, count)}
    metrics |= {f"policy/masked_{reason}": share(chosen, count) for reason, chosen in dropped.items()}
    if settings.importance in ("clip", "ppo") or settings.ratio_type == "sequence":
        metrics["policy/clipped"] = share(reached, count)
    return loss, metrics | mismatch_metrics(tokens)


def coefficients(tokens: PolicyTokens, settings: LossSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns [K] `coeff` of `policy_loss`, whatever masks drop, and [K] bool where a bound is reached."""
    trainer = tokens.logprobs.detach()
    log_ratio = trainer - tokens.inference_logprobs
    ratio, reached = bounded(importance_ratio(log_ratio, tokens, settings), tokens.advantages, settings)
    drive = settings.adv_tau * tokens.advantages
    if settings.importance == "ppo":
        drive = torch.where(reached, 0.0, drive)
    if settings.kl_tau:
        drive = drive - settings.kl_tau * log_ratio
    if settings.teacher_tau:
        drive = drive + settings.teacher_tau * _teacher_term(trainer, tokens.teacher_logprobs, settings)
    return ratio * drive, reached


def importance_ratio(log_ratio: torch.Tensor, tokens: PolicyTokens, settings: LossSettings) -> torch.Tensor:
    """Returns [K] by `ratio_type`, with r = exp(log ratio): `token` each token's r; `sequence` the product of its
    sample's; `geometric` their geometric mean (GSPO, arXiv:2507.18071); `none` 1."""
    if settings.ratio_type == "none":
        return torch.ones_like(log_ratio)
    if settings.ratio_type != "token":
        sums, means = _sample_sum_and_mean(log_ratio, tokens.sample_ids, tokens.num_samples)
        log_ratio = (sums if settings.ratio_type == "sequence" else means)[tokens.sample_ids]
    return _exp(log_ratio)


def bounded(ratio: torch.Tensor, advantages: torch.Tensor, settings: LossSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns [K] the ratio by `importance`, and [K] bool where a bound is reached.

    `clip` lowers it to `token_mask_high`. `ppo` leaves it, and stops where it has gone further than the bounds in the
    advantage's own direction: there min(r A, clip(r) A) is flat. A product over a sequence is lowered to
    `sequence_clip_high`; all else has no bound.
    """
    high = settings.sequence_clip_high if settings.ratio_type == "sequence" else settings.token_mask_high
    if settings.importance == "clip" or settings.ratio_type == "sequence":
        return ratio.clamp(max=high), ratio > high
    if settings.importance == "ppo":
        up, down = (advantages > 0) & (ratio > high), (advantages < 0) & (ratio < settings.token_mask_low)
        return ratio, up | down
    return ratio, torch.zeros_like(ratio, dtype=torch.bool)


def token_weights(tokens: PolicyTokens, counts: StepCounts, settings: LossSettings) -> torch.Tensor:
    """Returns [K] each token's share of the loss by `normaliser`, in an optimizer step with N loss tokens in M samples:
    `token` 1 / N; `sequence` 1 / (M · loss tokens of its sample); `constant` 1 / (M · `constant_tokens`)."""
    ones = torch.ones_like(tokens.inference_logprobs)
    if settings.normaliser == "token":
        return ones / counts.loss_tokens
    if settings.normaliser == "constant":
        return ones / (counts.samples * settings.constant_tokens)
    lengths = ones.new_zeros(tokens.num_samples).index_add_(0, tokens.sample_ids, ones)
    return 1 / (counts.samples * lengths[tokens.sample_ids])


def token_masks(
    log_ratio: torch.Tensor, sample_ids: torch.Tensor, num_samples: int, settings: LossSettings
) -> dict[str, torch.Tensor]:
    """Returns by each mask's name the tokens [K] bool that it drops.

    A token is kept unless its own ratio (with `importance: mask`), its sample's geometric mean ratio, or its sample's
    smallest or largest token ratio lies outside the bounds of the token, geo or sequence mask. Bounds are inclusive,
    and are of token ratios with every `ratio_type`.
    """
    ratio = log_ratio.exp()  # may be infinite, and is only compared
    geo_ratio = _sample_sum_and_mean(log_ratio, sample_ids, num_samples)[1].exp()
    smallest = _sample_extreme(ratio, sample_ids, num_samples, "amin")
    largest = _sample_extreme(ratio, sample_ids, num_samples, "amax")
    dropped = {
        "geo_low": (geo_ratio < settings.geo_mask_low)[sample_ids],
        "sequence_low": (smallest < settings.sequence_mask_low)[sample_ids],
    }
    if settings.geo_mask_high is not None:
        dropped["geo_high"] = (geo_ratio > settings.geo_mask_high)[sample_ids]
    if settings.sequence_mask_high is not None:
        dropped["sequence_high"] = (largest > settings.sequence_mask_high)[sample_ids]
    if settings.importance == "mask":
        dropped |= {"token_low": ratio < settings.token_mask_low, "token_high": ratio > settings.token_mask_high}
    return dropped


def mismatch_metrics(tokens: PolicyTokens) -> dict[str, Metric]:
    """Returns metrics of how far trainer and server, and trainer and teacher, differ on the same tokens, dropped ones
    included; and the entropies by environment."""
    trainer, entropies = tokens.logprobs.detach(), tokens.entropies.detach()
    log_ratio = trainer - tokens.inference_logprobs
    ratio, count = _exp(log_ratio), number_of(log_ratio)
    estimates = k3(log_ratio, ratio)
    metrics: dict[str, Metric] = {
        "policy/entropy": Mean(entropies.sum(), count),
        "policy/kl": Mean(estimates.sum(), count),
        "policy/ratio_mean": Mean(ratio.sum(), count),
        "policy/log_ratio_clamped": share(log_ratio.abs() > MAX_LOG_RATIO, count),
    }
    if tokens.teacher_logprobs is not None:
        unknown = tokens.teacher_logprobs > 0
        gap = torch.where(unknown, 0.0, trainer - tokens.teacher_logprobs)
        metrics["policy/teacher_kl"] = Mean(gap.sum(), count - unknown.sum())
    if len(ratio):
        metrics |= {"policy/ratio_min": Min(ratio.min()), "policy/ratio_max": Max(ratio.max())}
    for lag in tokens.present_lags:
        chosen = tokens.lags == lag
        metrics[f"policy/mismatch_kl_lag{lag}"] = Mean(torch.where(chosen, estimates, 0.0).sum(), chosen.sum())
        metrics[f"policy/mismatch_max_lag{lag}"] = Max(torch.where(chosen, log_ratio.abs(), 0.0).max())
    for index, env in enumerate(tokens.envs):
        assert tokens.env_ids is not None
        chosen = torch.eq(tokens.env_ids, index)
        metrics[f"policy/entropy/{env}"] = Mean(torch.where(chosen, entropies, 0.0).sum(), chosen.sum())
    return metrics


def _teacher_term(trainer: torch.Tensor, teacher: torch.Tensor | None, settings: LossSettings) -> torch.Tensor:
    """Returns [K] minus the derivative of the estimate of KL(trainer ‖ teacher) by the trainer's log-probability:
    teacher - trainer for k1 as a reward (and k2 as a loss), exp(teacher - trainer) - 1 for k3 as a loss."""
    if teacher is None:
        tau = settings.teacher_tau
        raise ValueError(f"teacher_tau is {tau} and teacher_logprobs is None; deliver them, or set it to 0")
    gap = torch.where(teacher > 0, 0.0, teacher - trainer)  # NO_TEACHER_LOGPROB
    return gap if settings.teacher_kl == "k1" else torch.expm1(gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def sdpo_loss(divergences: torch.Tensor, clipped: torch.Tensor, *, weights: torch.Tensor, num_hint_tokens: int) -> Loss:
    """Returns the loss of self-distillation (SDPO, arXiv:2601.20802) on the aligned tokens of hinted turns.

        loss = Σ weight · divergence / num_hint_tokens

    `divergences` [K] are in nats, with gradient to the student; `clipped` [K] bool says which ones `token_clip` has
    lowered; `weights` [K] are each token's hint's weight. Returns the loss [] and metrics.
    """
    plain = divergences.detach()
    count = number_of(plain)
    loss = (weights * divergences).sum() / num_hint_tokens
    return loss, {
        "loss/sdpo": Sum(loss.detach()),
        "policy/sdpo_tokens": Sum(count),
        "policy/sdpo_divergence": Mean(plain.sum(), count),
        "policy/sdpo_clipped": share(clipped, count),
    }


def dpo_loss(
    chosen_logprobs: torch.Tensor,
    rejected_logprobs: torch.Tensor,
    *,
    chosen_ref_logprobs: torch.Tensor,
    rejected_ref_logprobs: torch.Tensor,
    score_gaps: torch.Tensor | None = None,
    beta: float,
    num_pairs: int,
) -> Loss:
    """Returns the loss of direct preference optimization (arXiv:2305.18290, equation 7) on pairs of continuations of
    one prompt, or, with `score_gaps` [P] of the chosen's score less the rejected's, that of regressing relative scores
    (REBEL, arXiv:2404.16767, equation 6, with the base model in place of the previous policy).

        margin = beta · [(chosen_logprobs - chosen_ref_logprobs) - (rejected_logprobs - rejected_ref_logprobs)]
        loss   = -Σ log σ(margin) / num_pairs, or Σ (margin - score_gap)² / num_pairs

    All tensors are [P], sums over the tokens of a continuation; the first two have gradient, the reference's were
    delivered with the pairs. Returns the loss [] and metrics: `policy/dpo_margin` is the mean margin (the difference
    of implicit rewards), `policy/dpo_accuracy` the share of the pairs whose margin is above 0.
    """
    chosen = chosen_logprobs - chosen_ref_logprobs
    rejected = rejected_logprobs - rejected_ref_logprobs
    margin = beta * (chosen - rejected)
    losses = -logsigmoid(margin) if score_gaps is None else (margin - score_gaps) ** 2
    loss = losses.sum() / num_pairs
    plain = margin.detach()
    count = number_of(plain)
    return loss, {
        "loss/dpo": Sum(loss.detach()),
        "policy/dpo_pairs": Sum(count),
        "policy/dpo_accuracy": share(plain > 0, count),
        "policy/dpo_margin": Mean(plain.sum(), count),
    }


def k3(log_ratio: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
    """Returns [K] Schulman's k3 per token. expm1 keeps it exact near 0, where it is (log ratio)² / 2."""
    return torch.where(log_ratio.abs() < 1, torch.expm1(log_ratio), ratio - 1) - log_ratio


def _exp(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _sample_sum_and_mean(
    values: torch.Tensor, sample_ids: torch.Tensor, num_samples: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns [S] sums and [S] means of [K] values over each sample's loss tokens; 0 for samples without loss
    tokens."""
    counts = values.new_zeros(num_samples).index_add_(0, sample_ids, torch.ones_like(values))
    sums = values.new_zeros(num_samples).index_add_(0, sample_ids, values)
    return sums, sums / counts.clamp(min=1)


def _sample_extreme(
    values: torch.Tensor, sample_ids: torch.Tensor, num_samples: int, reduce: Literal["amin", "amax"]
) -> torch.Tensor:
    """Returns [S] the smallest or largest of [K] values over each sample's loss tokens; 1 for samples without loss
    tokens."""
    start = values.new_ones(num_samples)
    return start.scatter_reduce_(0, sample_ids, values, reduce, include_self=False)


def number_of(values: torch.Tensor) -> torch.Tensor:
    """Returns [] how many values there are, as a number on their device."""
    return torch.full((), float(len(values)), device=values.device)


def share(chosen: torch.Tensor, count: torch.Tensor) -> Metric:
    """Returns the share of True among `count` values [K] bool."""
    return Mean(chosen.sum(), count)

"""Settings of the trainer's objective; formulas are in `trainer/loss.py`."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from configs.common import Conflicts, OnlyWith, Section, Share, Temperature, Weight

_WEIGHTS = {"adv_tau", "kl_tau", "teacher_tau", "entropy_tau", "alpha_sdpo", "beta_replay"}


class SdpoSettings(Section):
    """Self-distillation: the policy without a hint learns from itself with the hint."""

    beta: Share = 0.5
    """The teacher's share of the mixture in the generalized Jensen-Shannon divergence; 0 is KL(teacher ‖ student), 1
    the reverse. Near 0 and 1, but not at them, the divergence is small: that KL times the smaller share."""
    temperature: Temperature = 1.0
    """Both distributions are softened by this temperature before they are compared."""
    top_k: PositiveInt | None = None
    """Only the teacher's likeliest tokens, this many, are compared, renormalised (null: the whole vocabulary)."""
    token_clip: PositiveFloat | None = None
    """Upper bound of one token's divergence in nats (null: none)."""
    teacher: Literal["current", "ema"] = "current"
    """Who is given the hint: the policy as it is now, or the moving average of its trained weights."""
    ema_decay: Annotated[float, Field(gt=0, lt=1), OnlyWith("teacher", "ema")] = 0.99
    """The moving average keeps this share of itself at each step."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the weight `alpha_sdpo` rises from 0 in equal parts."""


class DpoSettings(Section):
    """Direct preference optimization."""

    beta: float = Field(default=0.1, gt=0, le=1e3)
    """Scale of the policy's preference against the reference's."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the weight `beta_replay` rises from 0 in equal parts."""


class LossSettings(Section):
    """The objective: policy gradient + alpha_sdpo · self-distillation + beta_replay · preferences."""

    ratio_type: Literal["token", "sequence"] = "token"
    """The importance ratio belongs to each token alone, or to the whole sequence: the product of its tokens' ratios."""
    importance: Literal["mask", "clip"] = "mask"
    """A token with a ratio above `token_mask_high` is masked, or its ratio is clipped to it, as in the AIPO paper. With
    `clip` no token is masked for its own ratio; the masks of whole sequences hold."""
    kl_tau: Weight = 0.0
    """Weight of the log-ratio penalty, which keeps the policy near the one that sampled."""
    adv_tau: Weight = 1.0
    """Weight of the advantage."""
    teacher_tau: Weight = 0.0
    """Weight of the teacher's log-probability minus the trainer's (on-policy distillation); above 0 a teacher is
    needed."""
    entropy_tau: Weight = 0.0
    """Weight of the policy's entropy, in nats a token: above 0 it is kept from becoming certain too early."""
    token_mask_low: Annotated[NonNegativeFloat, OnlyWith("importance", "mask")] = 0.125
    """Tokens with a smaller importance ratio are masked."""
    token_mask_high: PositiveFloat = 8.0
    """Tokens with a larger importance ratio are masked."""
    geo_mask_low: NonNegativeFloat = 0.1
    """Sequences with a smaller geometric mean of the ratios are masked."""
    geo_mask_high: PositiveFloat = 10.0
    """Sequences with a larger geometric mean of the ratios are masked."""
    sequence_mask_low: NonNegativeFloat = 0.0
    """Sequences with a token of a smaller ratio are masked."""
    sequence_mask_high: PositiveFloat = 100.0
    """Sequences with a token of a larger ratio are masked."""
    sequence_clip_high: Annotated[PositiveFloat, OnlyWith("ratio_type", "sequence")] = 10.0
    """Upper bound of the importance ratio of a sequence."""
    alpha_sdpo: Weight = 0.0
    """Weight of self-distillation from hints (SDPO); at 0 nobody gives hints."""
    beta_replay: Weight = 0.0
    """Weight of the preference loss on pairs from teachers (DPO); at 0 no teacher is asked."""
    sdpo: Annotated[SdpoSettings, OnlyWith("alpha_sdpo")] = SdpoSettings()
    """Self-distillation from hints."""
    dpo: Annotated[DpoSettings, OnlyWith("beta_replay")] = DpoSettings()
    """Preference loss."""

    @property
    def trains_policy(self) -> bool:
        """Whether the policy gradient has a weight."""
        return bool(self.adv_tau or self.teacher_tau or self.kl_tau or self.entropy_tau)

    def conflicts(self) -> Conflicts:
        if self.importance == "clip" and self.ratio_type == "sequence":
            yield "importance", "clip is for ratio_type: token; sequence ratios have sequence_clip_high"
        for name in ("token_mask", "geo_mask", "sequence_mask"):
            low, high = getattr(self, f"{name}_low"), getattr(self, f"{name}_high")
            if low >= high:
                yield f"{name}_low", f"must be below {name}_high = {high}, or nothing is ever trained"
        if self.trains_policy:
            return
        if not (self.alpha_sdpo or self.beta_replay):
            yield "adv_tau", "is 0, as all other weights of the loss: nothing is learned; set one"
        for key in sorted(self.changed - _WEIGHTS - {"sdpo", "dpo"}):
            yield key, "has no effect with adv_tau, kl_tau, teacher_tau and entropy_tau 0; remove it"

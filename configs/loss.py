"""Settings of the trainer's objective; formulas are in `trainer/loss.py`."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from configs.common import Section, changed_fields


class SdpoSettings(Section):
    """Self-distillation: the policy without a hint learns from itself with the hint."""

    beta: float = Field(default=0.5, ge=0, le=1)
    """The teacher's share of the mixture in the generalized Jensen-Shannon divergence: 0 is KL(teacher ‖ student), 1
    the reverse. Near 0 and 1, but not at them, the divergence is small: that KL times the smaller share."""
    temperature: PositiveFloat = 1.0
    """Softens both distributions before they are compared."""
    top_k: PositiveInt | None = None
    """Compare the teacher's so many likeliest tokens, renormalised on both sides (null: the whole vocabulary)."""
    token_clip: PositiveFloat | None = None
    """Upper bound of one token's divergence in nats (null: none)."""
    teacher: Literal["current", "ema"] = "current"
    """Who is given the hint: the policy as it is now, or the exponential moving average of its trained weights."""
    ema_decay: float = Field(default=0.99, gt=0, lt=1)
    """The average keeps this share of itself at each step. Only with `teacher: ema`."""


class DpoSettings(Section):
    """Direct preference optimization."""

    beta: PositiveFloat = 0.1
    """How strongly the policy's preference is scaled against the reference's."""


class LossSettings(Section):
    """The objective: policy gradient + alpha_sdpo · self-distillation + beta_replay · preferences."""

    ratio_type: Literal["token", "sequence"] = "token"
    """Importance ratio of each token alone, or one for the whole sample: the product of its tokens'."""
    importance: Literal["mask", "clip"] = "mask"
    """What happens to a token whose ratio exceeds `token_mask_high`: it is not trained, or, as in the AIPO paper, its
    ratio is clipped to it. With `clip` no token is dropped for its own ratio; the masks on whole samples hold."""
    kl_tau: NonNegativeFloat = 0.0
    """Weight of the log-ratio penalty, which keeps the policy near the one that sampled."""
    adv_tau: NonNegativeFloat = 1.0
    """Weight of the advantage."""
    teacher_tau: NonNegativeFloat = 0.0
    """Weight of the teacher's log-probability minus the trainer's: on-policy distillation. Above 0 every batch must
    bring the teacher's log-probabilities, at 0 none may."""
    entropy_tau: NonNegativeFloat = 0.0
    """Weight of the entropy bonus: the mean entropy of the loss tokens' distributions, in nats, is raised."""
    token_mask_low: NonNegativeFloat = 0.125
    """Tokens with an importance ratio below this are not trained."""
    token_mask_high: PositiveFloat = 8.0
    """Tokens with an importance ratio above this are not trained."""
    geo_mask_low: NonNegativeFloat = 0.1
    """Samples whose geometric mean ratio is below this are not trained."""
    geo_mask_high: PositiveFloat = 10.0
    """Samples whose geometric mean ratio is above this are not trained."""
    sequence_mask_low: NonNegativeFloat = 0.0
    """Samples with a token ratio below this are not trained."""
    sequence_mask_high: PositiveFloat = 100.0
    """Samples with a token ratio above this are not trained."""
    sequence_clip_high: PositiveFloat = 10.0
    """Upper bound of the importance ratio with `ratio_type: sequence`."""
    alpha_sdpo: NonNegativeFloat = 0.0
    """Weight of the self-distillation from hints (SDPO). At 0 a batch may bring no hints."""
    beta_replay: NonNegativeFloat = 0.0
    """Weight of the preference loss on pairs from teachers' disagreement (DPO). At 0 a batch may bring no pairs."""
    sdpo: SdpoSettings = SdpoSettings()
    """The self-distillation loss. Only with `alpha_sdpo` above 0."""
    dpo: DpoSettings = DpoSettings()
    """The preference loss. Only with `beta_replay` above 0."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Keys that have no effect or contradict each other."""
        changed = changed_fields(self)
        if self.ratio_type == "token" and "sequence_clip_high" in changed:
            yield "loss.sequence_clip_high", "has no effect with loss.ratio_type: token; remove it or use sequence"
        if self.importance == "clip":
            if "token_mask_low" in changed:
                yield "loss.token_mask_low", "has no effect with loss.importance: clip; remove it or use mask"
            if self.ratio_type == "sequence":
                yield "loss.importance", "clip is for ratio_type: token; sequence ratios have loss.sequence_clip_high"
        for name in ("token_mask", "geo_mask", "sequence_mask"):
            low, high = getattr(self, f"{name}_low"), getattr(self, f"{name}_high")
            if low >= high:
                yield f"loss.{name}_low", f"must be below loss.{name}_high = {high}, or nothing is ever trained"
        yield from self._conflicts_of_streams()

    @property
    def trains_policy(self) -> bool:
        """Whether the policy-gradient stream has a weight."""
        return bool(self.adv_tau or self.teacher_tau or self.kl_tau or self.entropy_tau)

    def _conflicts_of_streams(self) -> Iterator[tuple[str, str]]:
        if not (self.trains_policy or self.alpha_sdpo or self.beta_replay):
            keys = "loss.kl_tau, loss.teacher_tau, loss.alpha_sdpo and loss.beta_replay"
            yield "loss.adv_tau", f"is 0, and so are {keys}: the loss would be 0; set one of them"
        if not self.trains_policy:
            others = {"adv_tau", "kl_tau", "teacher_tau", "entropy_tau", "alpha_sdpo", "beta_replay", "sdpo", "dpo"}
            for key in sorted(changed_fields(self) - others):
                yield f"loss.{key}", "has no effect with loss.adv_tau, kl_tau and teacher_tau 0; remove it"
        for weight, name in (("alpha_sdpo", "sdpo"), ("beta_replay", "dpo")):
            if getattr(self, weight) == 0:
                for key in sorted(changed_fields(getattr(self, name))):
                    yield f"loss.{name}.{key}", f"has no effect with loss.{weight}: 0; remove it or set loss.{weight}"
        if self.alpha_sdpo and self.sdpo.teacher == "current" and "ema_decay" in changed_fields(self.sdpo):
            yield "loss.sdpo.ema_decay", "has no effect with loss.sdpo.teacher: current; remove it or use ema"

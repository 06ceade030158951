"""Settings of the trainer's objective; formulas are in `trainer/loss.py`, the losses by name in docs/losses.md."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from grpo.configs.common import Conflicts, OnlyWith, Section, Share, Temperature, Weight
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

LossName = Literal["aipo", "grpo", "dapo", "dr_grpo", "gspo", "cispo", "tis", "icepop", "reinforce"]
_OPEN: dict[str, Any] = {"geo_mask_low": 0.0, "geo_mask_high": None, "sequence_mask_high": None}
"""No masks of whole sequences."""
_PPO = _OPEN | {"importance": "ppo", "token_mask_low": 0.8, "token_mask_high": 1.2}
PRESETS: Mapping[LossName, Mapping[str, Any]] = {
    "aipo": {},
    "grpo": _PPO | {"normaliser": "sequence"},
    "dapo": _PPO | {"token_mask_high": 1.28},
    "dr_grpo": _PPO | {"normaliser": "constant"},
    "gspo": _PPO
    | {"ratio_type": "geometric", "token_mask_low": 0.9997, "token_mask_high": 1.0004, "normaliser": "sequence"},
    "cispo": _OPEN | {"importance": "clip", "token_mask_high": 5.0},
    "tis": _OPEN | {"importance": "clip", "token_mask_high": 2.0},
    "icepop": _OPEN | {"token_mask_low": 0.5, "token_mask_high": 5.0},
    "reinforce": _OPEN | {"ratio_type": "none", "importance": "none"},
}
"""The settings that each name stands for, where they are not the defaults. Each may be given beside the name."""
_WEIGHTS = {"adv_tau", "kl_tau", "teacher_tau", "entropy_tau", "alpha_sdpo", "beta_replay"}
_ENTROPY = {"entropy_tau", "entropy_tau_end", "entropy_decay_steps"}
_WITH_CUSTOM = {"import_path", "normaliser", "constant_tokens", "teacher_tau"} | _ENTROPY


class SdpoSettings(Section):
    """Self-distillation: the policy without a hint learns from itself with the hint."""

    beta: Share = 0.5
    """The teacher's share in the generalized Jensen-Shannon divergence; 0 is KL(teacher ‖ student), 1 the reverse."""
    temperature: Temperature = 1.0
    """Softens both distributions before they are compared."""
    token_clip: PositiveFloat | None = 10.0
    """Most that a vocabulary entry adds to a position's divergence, in nats (null: no limit)."""
    clip_by: Annotated[Literal["entry", "position"], OnlyWith("token_clip")] = "entry"
    """What `token_clip` bounds: each entry's term or each position's divergence."""
    teacher: Literal["current", "ema"] = "current"
    """The model that gets the hint: the policy, or the moving average of its weights."""
    ema_decay: Annotated[float, Field(gt=0, lt=1), OnlyWith("teacher", "ema")] = 0.99
    """Share of itself that the moving average keeps at each step."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which `alpha_sdpo` rises linearly from 0."""
    decay_steps: PositiveInt | None = None
    """Steps over which it then falls linearly to 0 (null: it stays)."""


class DpoSettings(Section):
    """Direct preference optimization, or regression of the teachers' scores, on preference pairs."""

    objective: Literal["preference", "regression"] = "preference"
    """`preference`: DPO. `regression`: the squared difference between the margin and that of the teachers' shares
    (REBEL)."""
    beta: float = Field(default=0.1, gt=0, le=1e3)
    """Scale of the policy's preference against the reference's."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which `beta_replay` rises linearly from 0."""
    decay_steps: PositiveInt | None = None
    """Steps over which it then falls linearly to 0 (null: it stays)."""


class LossSettings(Section):
    """The objective: policy gradient + alpha_sdpo · self-distillation + beta_replay · preferences."""

    name: LossName = "aipo"
    """The policy loss (`grpo docs losses`). Sets the keys from `ratio_type` to `sequence_mask_high` that you leave
    open."""
    import_path: str | None = None
    """Your own policy loss, as `my_loss.py:loss` (`grpo docs losses`; null: none)."""
    ratio_type: Literal["token", "sequence", "geometric", "none"] = "token"
    """The importance ratio: per token, the product or geometric mean over the sequence, or 1."""
    importance: Literal["mask", "clip", "ppo", "none"] = "mask"
    """How `token_mask_*` bound the ratio. `mask`: tokens outside are masked. `clip`: ratios are lowered to
    `token_mask_high`. `ppo`: tokens past a bound in the direction of their advantage learn no more. `none`: not at
    all."""
    normaliser: Literal["token", "sequence", "constant"] = "token"
    """Each token counts the same, each sequence does, or a sequence by its length over `constant_tokens`."""
    constant_tokens: Annotated[PositiveInt, OnlyWith("normaliser", "constant")] = 1024
    """Length at which a sequence counts fully; use the longest answer."""
    kl_tau: Weight = 0.0
    """Weight of the log-ratio penalty, which keeps the policy near the one that sampled."""
    adv_tau: Weight = 1.0
    """Weight of the advantage."""
    teacher_tau: Weight = 0.0
    """Weight of the teacher's log-probability minus the trainer's (distillation, or the KL to a reference)."""
    teacher_kl: Annotated[Literal["k1", "k3"], OnlyWith("teacher_tau")] = "k1"
    """Estimate of the KL to the teacher: `k1` in the reward, or `k3` in the loss as in GRPO's paper."""
    entropy_tau: Weight = 0.0
    """Weight of the policy's entropy in nats per token, against early certainty."""
    entropy_tau_end: Annotated[float, Field(gt=0, le=1e3), OnlyWith("entropy_decay_steps")] = 1e-3
    """The weight to which `entropy_tau` falls."""
    entropy_decay_steps: Annotated[PositiveInt | None, OnlyWith("entropy_tau")] = None
    """Steps over which `entropy_tau` falls geometrically to `entropy_tau_end` (null: it stays)."""
    token_mask_low: Annotated[NonNegativeFloat, OnlyWith("importance", "mask", "ppo")] = 0.125
    """Lower bound of the importance ratio."""
    token_mask_high: Annotated[PositiveFloat, OnlyWith("importance", "mask", "clip", "ppo")] = 8.0
    """Upper bound of the importance ratio."""
    geo_mask_low: NonNegativeFloat = 0.1
    """Masks sequences with a smaller geometric mean of the ratios."""
    geo_mask_high: PositiveFloat | None = 10.0
    """Masks sequences with a larger geometric mean of the ratios (null: none)."""
    sequence_mask_low: NonNegativeFloat = 0.0
    """Masks sequences with a token of a smaller ratio."""
    sequence_mask_high: PositiveFloat | None = 100.0
    """Masks sequences with a token of a larger ratio (null: none)."""
    sequence_clip_high: Annotated[PositiveFloat, OnlyWith("ratio_type", "sequence")] = 10.0
    """Upper bound of a sequence's ratio."""
    silent_share: Annotated[float, Field(gt=0, le=1)] = 0.125
    """Share of samples without signal (equal rewards) that is computed anyway, for metrics and traces."""
    alpha_sdpo: Weight = 0.0
    """Weight of self-distillation from hints (SDPO; 0: off)."""
    beta_replay: Weight = 0.0
    """Weight of the preference loss on pairs from teachers (DPO; 0: off)."""
    sdpo: Annotated[SdpoSettings, OnlyWith("alpha_sdpo")] = SdpoSettings()
    """Self-distillation from hints."""
    dpo: Annotated[DpoSettings, OnlyWith("beta_replay")] = DpoSettings()
    """Preference loss."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        """What `name` stands for goes before the defaults."""
        name = given.get("name") if isinstance(given, Mapping) else None
        presets: dict[str, Mapping[str, Any]] = {key: preset for key, preset in PRESETS.items()}  # noqa: C416
        return {**presets[name], **given} if isinstance(name, str) and name in presets else given

    def at_step(self, step: int) -> "LossSettings":
        """Returns the settings of a step, from 1: with the weight that the entropy has there."""
        if self.entropy_decay_steps is None:
            return self
        share = min(1.0, (step - 1) / self.entropy_decay_steps)
        weight = self.entropy_tau * (self.entropy_tau_end / self.entropy_tau) ** share
        return self.model_copy(update={"entropy_tau": weight})

    @property
    def changed(self) -> set[str]:
        """Names of the fields that were set to another value than `name` stands for."""
        preset, fields = PRESETS[self.name], type(self).model_fields
        defaults = {name: preset.get(name, fields[name].get_default()) for name in self.model_fields_set}
        return {name for name, default in defaults.items() if getattr(self, name) != default}

    @property
    def trains_policy(self) -> bool:
        """True where the policy gradient has a weight."""
        return bool(self.adv_tau or self.teacher_tau or self.kl_tau or self.entropy_tau)

    def conflicts(self) -> Conflicts:
        if self.import_path is not None:
            for key in sorted(self.changed - _WITH_CUSTOM - {"alpha_sdpo", "beta_replay", "sdpo", "dpo"}):
                yield key, f"has no effect with import_path = {self.import_path}; remove it"
        for key in ("kl_tau", "teacher_tau", "entropy_tau"):
            if getattr(self, key) and "silent_share" in self.changed:
                yield "silent_share", f"has no effect with {key}, by which every sample teaches; remove it"
        if self.ratio_type == "sequence" and self.importance in ("clip", "ppo"):
            yield "importance", f"{self.importance} is for other ratio_types; a sequence's ratio has sequence_clip_high"
        if self.ratio_type == "none" and self.importance in ("clip", "ppo"):
            yield (
                "importance",
                f"{self.importance} bounds a ratio, and ratio_type is none; use importance: none or mask",
            )
        if self.entropy_decay_steps is not None and self.entropy_tau_end >= self.entropy_tau:
            yield "entropy_tau", f"must be above entropy_tau_end = {self.entropy_tau_end:g}, to which it falls"
        for name in ("token_mask", "geo_mask", "sequence_mask"):
            low, high = getattr(self, f"{name}_low"), getattr(self, f"{name}_high")
            if high is not None and low >= high:
                yield f"{name}_low", f"must be below {name}_high = {high}, or nothing is ever trained"
        if self.trains_policy:
            return
        if not (self.alpha_sdpo or self.beta_replay):
            yield "adv_tau", "is 0, as all other weights of the loss: nothing is learned; set one"
        for key in sorted(self.changed - _WEIGHTS - {"sdpo", "dpo"}):
            yield key, "has no effect with adv_tau, kl_tau, teacher_tau and entropy_tau 0; remove it"

"""Settings of `grpo-train`, the trainer. docs/settings.md has them all."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic_settings import SettingsConfigDict

from configs.common import ProcessSettings, RolloutTransportSettings, Section, WeightBroadcastSettings, changed_fields


class LossSettings(Section):
    """The policy-gradient loss; formulas are in `trainer/loss.py`."""

    ratio_type: Literal["token", "sequence"] = "token"
    """Importance ratio of each token alone, or one for the whole sample: the product of its tokens'."""
    kl_tau: NonNegativeFloat = 0.0
    """Weight of the log-ratio penalty, which keeps the policy near the one that sampled."""
    adv_tau: NonNegativeFloat = 1.0
    """Weight of the advantage."""
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


class TrainSettings(ProcessSettings):
    """Policy-gradient steps on the micro-batches that the orchestrator packs; each step publishes a policy version."""

    model_config = SettingsConfigDict(env_prefix="GRPO_TRAIN_")
    role: ClassVar[str] = "train"

    model: str
    """Base model: a local folder, or a Hugging Face id that is in the local cache."""
    output_dir: str = "outputs/run_default"
    """The run's folder, the same for all three programs."""
    overwrite_output_dir: bool = False
    """Remove an earlier run from `output_dir` first. Without it, a folder that holds a run is refused."""
    run_id: str | None = None
    """Join the run of this id, which the launcher founded (null: found a new one)."""
    seed: int = 42
    """Seed of the adapter's initial weights."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train: `auto` takes a GPU if there is one."""
    num_threads: PositiveInt | None = None
    """Threads for computation on a CPU (null: torch's default)."""
    recipe: Literal["bf16", "fp32"] = "bf16"
    """Type of the base weights and of the computation. The adapter and the optimizer are float32 always."""
    sequence_len: PositiveInt = 2048
    """Longest packed micro-batch in tokens; must equal the orchestrator's `seq_len`."""
    max_steps: int = Field(default=-1, ge=-1)
    """Optimizer steps (-1: until the orchestrator ends the run)."""
    learning_rate: PositiveFloat = 2e-4
    """Peak learning rate."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the schedule after the warm-up; linear and cosine fall to 0 at `max_steps`."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises linearly from 0 to its peak."""
    optimizer: Literal["adamw"] = "adamw"
    """Optimizer."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's decay of the first moment."""
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """AdamW's decay of the second moment."""
    adam_epsilon: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this norm where they exceed it."""
    lora_rank: PositiveInt = 16
    """Rank of the LoRA adapter; must equal the orchestrator's `model.lora_rank`."""
    lora_alpha: PositiveInt = 32
    """LoRA alpha; the adapter's output is scaled by alpha / rank."""
    lora_target_modules: tuple[
        Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], ...
    ] = Field(default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), min_length=1)
    """Linear layers that get an adapter."""
    loss: LossSettings = LossSettings()
    """The policy-gradient loss."""
    wait_timeout: PositiveFloat = 1200.0
    """Seconds to wait for the orchestrator's next batch before the run is given up."""
    rollout_transport: RolloutTransportSettings = RolloutTransportSettings()
    """How batches arrive."""
    weight_broadcast: WeightBroadcastSettings = WeightBroadcastSettings()
    """How policy versions leave."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        loss = self.loss
        if loss.ratio_type == "token" and "sequence_clip_high" in changed_fields(loss):
            yield (
                "loss.sequence_clip_high",
                "has no effect with loss.ratio_type: token; remove it or use sequence",
            )
        for name in ("token_mask", "geo_mask", "sequence_mask"):
            low, high = getattr(loss, f"{name}_low"), getattr(loss, f"{name}_high")
            if low >= high:
                yield (
                    f"loss.{name}_low",
                    f"must be below loss.{name}_high = {high}, or nothing is ever trained",
                )
        if loss.adv_tau == 0 and loss.kl_tau == 0:
            yield "loss.adv_tau", "is 0, and so is loss.kl_tau: the loss would be 0; set one of them"
        if self.lr_scheduler_type != "constant" and self.max_steps < 1:
            yield "lr_scheduler_type", "needs max_steps, to know where it ends; set max_steps or use constant"
        if self.max_steps >= 1 and self.warmup_steps >= self.max_steps:
            yield "warmup_steps", f"must be below max_steps = {self.max_steps}"
        if self.overwrite_output_dir and self.run_id is not None:
            yield "overwrite_output_dir", "would remove the run that run_id joins; remove one of the two"
        if self.device == "cuda" and self.num_threads is not None:
            yield "num_threads", "has no effect with device: cuda; remove it"
        if "hwm" in changed_fields(self.rollout_transport):
            yield "rollout_transport.hwm", "has no effect on the trainer; set it for the orchestrator"
        yield from self.rollout_transport.conflicts()
        yield from self.weight_broadcast.conflicts()
        if self.weight_broadcast.type == "nccl":
            yield from self._conflicts_of_nccl()
        if self.weight_broadcast.format == "merged" and self.recipe == "bf16":
            if not self.weight_broadcast.allow_rounding:
                yield (
                    "weight_broadcast.format",
                    "with recipe: bf16 each update is rounded to 16 bits, which loses most of a small one; use "
                    "recipe: fp32, format: adapter, or set weight_broadcast.allow_rounding: true",
                )
        elif self.weight_broadcast.format == "merged" and "allow_rounding" in changed_fields(self.weight_broadcast):
            yield "weight_broadcast.allow_rounding", "has no effect with recipe: fp32; remove it"

    def _conflicts_of_nccl(self) -> Iterator[tuple[str, str]]:
        if self.device == "cpu":
            yield "weight_broadcast.type", "sends from GPU to GPU, and device is cpu; use filesystem"
        targets = set(self.lora_target_modules)
        for layer in ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}):
            if layer & targets and layer - targets:
                yield (
                    "lora_target_modules",
                    f"must have all of {', '.join(sorted(layer))} or none with weight_broadcast.type: nccl, because "
                    "vLLM merges them into one layer",
                )

"""Settings of `grpo-train`, the trainer. docs/settings.md has them all."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic_settings import SettingsConfigDict

from configs.common import (
    ProcessSettings,
    RolloutTransportSettings,
    Section,
    WeightBroadcastSettings,
    changed_fields,
    conflicts_of_adapters,
)
from configs.loss import LossSettings

_QUANTIZED: dict[str, Literal["nf4", "fp8", "nvfp4"]] = {"qlora_bnb": "nf4", "qlora_fp8": "fp8", "qlora_fp4": "nvfp4"}


class NoiseSettings(Section):
    """QeRL's exploration: Gaussian noise on the server's norm weights while it samples (arXiv:2510.11696)."""

    enabled: bool = False
    """Sample with noise. The gradients and the evaluation always use the clean weights."""
    sigma_start: PositiveFloat = 5e-2
    """Standard deviation of the noise in its first noisy stage."""
    sigma_end: PositiveFloat = 5e-4
    """Standard deviation in the last stage; it falls geometrically."""
    num_stages: int = Field(default=10, ge=3)
    """Stages of equal length over `max_steps`; the first has no noise."""


class CheckpointSettings(Section):
    """What a run is resumed from."""

    interval: PositiveInt | None = 10
    """Write a checkpoint after every so many steps, and after the last one (null: none; then no batch is ever removed,
    and a trainer that is started again begins with version 0)."""
    keep_last: PositiveInt | None = 2
    """Keep the newest so many (null: all)."""
    keep_interval: PositiveInt | None = None
    """Of the older ones, keep those of steps that this divides (null: none)."""
    resume_step: int | None = Field(default=None, ge=-1)
    """Go back to the checkpoint after this step (-1 or null: the newest one)."""


class TrainSettings(ProcessSettings):
    """Policy-gradient steps on the micro-batches that the orchestrator packs; each step publishes a policy version."""

    model_config = SettingsConfigDict(env_prefix="GRPO_TRAIN_")
    role: ClassVar[str] = "train"
    exit_codes: ClassVar[str] = (
        "0 done, 1 the run failed, 2 settings that cannot be honoured, 75 a program that the trainer needs is gone and "
        "it may be started again, 130 Ctrl-C, 143 SIGTERM"
    )

    model: str
    """Base model: a local folder, or a Hugging Face id that is in the local cache."""
    output_dir: str = "outputs/run_default"
    """The run's folder, the same for all three programs."""
    overwrite_output_dir: bool = False
    """Remove an earlier run from `output_dir` first."""
    resume: Literal["auto", "never"] = "auto"
    """Where `output_dir` holds a run: `auto` goes on with it, `never` refuses."""
    run_id: str | None = None
    """Join the run of this id, which the launcher founded (null: found a new one)."""
    seed: int = 42
    """Seed of the adapter's initial weights, of the canary, and of the noise on the norms."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train: `auto` takes a GPU if there is one."""
    gpus: PositiveInt = 1
    """Data-parallel ranks, one process each, started by torchrun: one a GPU, or as many processes on a CPU."""
    zero_level: int = Field(default=1, ge=1, le=3)
    """What the ranks share out among them: 1 the optimizer's state, 2 also the gradients between micro-batches, 3 also
    the weights between their uses. Only with `gpus` above 1."""
    colocate: bool = False
    """Compute on the base weights of the run's `grpo-infer`, which has `colocate` too and runs on the same machine and
    device: only the adapter is the trainer's own."""
    sleep_mode: bool = False
    """Give back after each step what only a step needs, before the servers, which sleep meanwhile (`sleep_mode` of
    grpo-infer and grpo-orch), are woken. Needs a GPU."""
    num_threads: PositiveInt | None = None
    """Threads for computation on a CPU, of each rank (null: torch's default, divided among the ranks)."""
    recipe: Literal["bf16", "fp32"] = "bf16"
    """Type of the base weights and of the computation. What is trained is kept in float32 always."""
    gradient_checkpointing: bool = False
    """Keep only each layer's input for the backward pass and compute the rest again: less memory, a third more work."""
    compile: bool = False
    """Compile the layers with `torch.compile`; the first steps take longer. On a CPU it needs a C++ compiler."""
    sequence_len: PositiveInt = 2048
    """Longest packed micro-batch in tokens; must equal the orchestrator's `seq_len`."""
    max_steps: int = Field(default=-1, ge=-1)
    """Optimizer steps (-1: until the orchestrator ends the run)."""
    learning_rate: PositiveFloat = 2e-4
    """Peak learning rate."""
    lr_scheduler_type: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Shape of the schedule after the warm-up; linear and cosine fall to 0 at `max_steps`, wsd (warm-up, stable, decay)
    stays at the peak and falls to 0 over the last `decay_steps`."""
    decay_steps: PositiveInt | None = None
    """Steps of wsd's decay (null: a tenth of `max_steps`)."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises linearly from 0 to its peak."""
    optimizer: Literal["adamw_8bit", "adamw", "adamw_8bit_paged", "muon"] = "adamw_8bit"
    """`adamw` with float32 state, with 8-bit state, or with 8-bit state in memory that a GPU may page out
    (bitsandbytes); `muon` orthogonalizes the matrices' updates and gives all else to adamw."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's decay of the first moment."""
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """AdamW's decay of the second moment."""
    adam_epsilon: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    muon_momentum: float = Field(default=0.95, ge=0, lt=1)
    """Muon's momentum. Only with `optimizer: muon`."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this norm where they exceed it."""
    lora: bool = True
    """Train a LoRA adapter. false: train all weights, and publish them whole (`weight_broadcast.format: full`)."""
    qlora_bnb: bool = False
    """Hold the base in bitsandbytes' NF4 with double quantization."""
    qlora_fp8: bool = False
    """Hold the base in FP8 (E4M3) with a scale for each block of 128 by 128."""
    qlora_fp4: bool = False
    """Hold the base in NVFP4: E2M1 with an FP8 scale for each block of 16 and one for the tensor."""
    lora_rank: PositiveInt = 16
    """Rank of the LoRA adapter; must equal the orchestrator's `model.lora_rank`."""
    lora_alpha: PositiveInt = 32
    """LoRA alpha; the adapter's output is scaled by alpha / rank."""
    lora_target_modules: tuple[
        Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], ...
    ] = Field(default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), min_length=1)
    """Linear layers that get an adapter."""
    lora_adapters: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")], ...] = ()
    """Names of several adapters, each of rank `lora_rank`, for roles that shall not share one; must equal the
    orchestrator's `model.lora_adapters` (empty: one adapter for all)."""
    loss: LossSettings = LossSettings()
    """The objective."""
    noise_scheduler: NoiseSettings = NoiseSettings()
    """Noise on the norm weights while sampling."""
    ckpt: CheckpointSettings = CheckpointSettings()
    """Checkpoints."""
    wait_timeout_s: PositiveFloat = 1200.0
    """Seconds to wait for the orchestrator's next batch, or for another rank, before the run is given up."""
    rollout_transport: RolloutTransportSettings = RolloutTransportSettings()
    """How batches arrive."""
    weight_broadcast: WeightBroadcastSettings = WeightBroadcastSettings()
    """How policy versions leave."""

    @property
    def quantization(self) -> Literal["nf4", "fp8", "nvfp4"] | None:
        """The format in which the base is held; None for the type of `recipe`."""
        return next((kind for key, kind in _QUANTIZED.items() if getattr(self, key)), None)

    def conflicts(self) -> Iterator[tuple[str, str]]:
        yield from self.loss.conflicts()
        yield from self._conflicts_of_schedule()
        yield from self._conflicts_of_optimizer()
        yield from self._conflicts_of_noise()
        yield from self._conflicts_of_checkpoints()
        yield from self._conflicts_of_precision()
        yield from self._conflicts_of_adapters()
        yield from self._conflicts_of_machines()
        if self.overwrite_output_dir and self.run_id is not None:
            yield "overwrite_output_dir", "would remove the run that run_id joins; remove one of the two"
        if "hwm" in changed_fields(self.rollout_transport):
            yield "rollout_transport.hwm", "has no effect on the trainer; set it for the orchestrator"
        yield from self.rollout_transport.conflicts()
        yield from self.weight_broadcast.conflicts()
        if self.weight_broadcast.type == "nccl":
            yield from self._conflicts_of_nccl()

    def _conflicts_of_schedule(self) -> Iterator[tuple[str, str]]:
        if self.lr_scheduler_type != "constant" and self.max_steps < 1:
            yield "lr_scheduler_type", "needs max_steps, to know where it ends; set max_steps or use constant"
        if self.max_steps >= 1 and self.warmup_steps >= self.max_steps:
            yield "warmup_steps", f"must be below max_steps = {self.max_steps}"
        if self.lr_scheduler_type != "wsd" and self.decay_steps is not None:
            yield "decay_steps", f"has no effect with lr_scheduler_type: {self.lr_scheduler_type}; remove it or use wsd"
        elif self.decay_steps is not None and 1 <= self.max_steps < self.warmup_steps + self.decay_steps:
            yield "decay_steps", f"must be at most max_steps - warmup_steps = {self.max_steps - self.warmup_steps}"

    def _conflicts_of_optimizer(self) -> Iterator[tuple[str, str]]:
        changed = changed_fields(self)
        if self.optimizer != "muon" and "muon_momentum" in changed:
            yield "muon_momentum", f"has no effect with optimizer: {self.optimizer}; remove it or use muon"
        if self.optimizer == "muon" and self.lora:
            for key in sorted({"adam_beta1", "adam_beta2", "adam_epsilon"} & changed):
                yield (
                    key,
                    "has no effect with optimizer: muon and lora: true, whose weights are all matrices; remove it",
                )

    def _conflicts_of_noise(self) -> Iterator[tuple[str, str]]:
        noise = self.noise_scheduler
        if not noise.enabled and (without_effect := sorted(changed_fields(noise) - {"enabled"})):
            for key in without_effect:
                yield f"noise_scheduler.{key}", "has no effect with noise_scheduler.enabled: false; remove it"
        if noise.enabled:
            if self.max_steps < noise.num_stages:
                yield "noise_scheduler.num_stages", f"needs max_steps of at least {noise.num_stages}, one step a stage"
            if noise.sigma_end > noise.sigma_start:
                yield "noise_scheduler.sigma_end", f"must not exceed sigma_start = {noise.sigma_start}"
            if (kind := self.weight_broadcast.format) != "adapter":
                yield (
                    "noise_scheduler.enabled",
                    f"needs weight_broadcast.format: adapter, not {kind}: rollouts with noise and evaluations without "
                    "run at the same time, and a server holds one version of other formats",
                )

    def _conflicts_of_checkpoints(self) -> Iterator[tuple[str, str]]:
        if self.ckpt.interval is None:
            for key in sorted({"keep_last", "keep_interval"} & changed_fields(self.ckpt)):
                yield f"ckpt.{key}", "has no effect without ckpt.interval; remove it or set ckpt.interval"
        elif self.ckpt.keep_last is None and self.ckpt.keep_interval is not None:
            yield "ckpt.keep_interval", "has no effect without ckpt.keep_last, which keeps all; remove it or set that"
        if self.ckpt.resume_step is not None and self.overwrite_output_dir:
            yield "overwrite_output_dir", "would remove the run that ckpt.resume_step resumes; remove one of the two"
        if self.ckpt.resume_step is not None and self.resume == "never":
            yield "resume", "never refuses the run that ckpt.resume_step resumes; remove one of the two"

    def _conflicts_of_precision(self) -> Iterator[tuple[str, str]]:
        changed, formats = changed_fields(self), [key for key in _QUANTIZED if getattr(self, key)]
        if len(formats) > 1:
            yield formats[1], f"the base is held in one format, and {formats[0]} is true too; remove one of them"
        if not self.lora:
            for key in sorted({"lora_rank", "lora_alpha", "lora_target_modules", "lora_adapters"} & changed):
                yield key, "has no effect with lora: false; remove it"
            for key in formats:
                yield key, "is for the frozen base of an adapter, and lora is false; remove one of the two"
            if self.weight_broadcast.format != "full":
                yield "weight_broadcast.format", "must be full with lora: false, which trains all weights"
        elif self.weight_broadcast.format == "full":
            yield "weight_broadcast.format", "full is for lora: false; use adapter or merged"
        if self.weight_broadcast.format == "merged":
            if formats:
                yield "weight_broadcast.format", f"cannot merge into a base that {formats[0]} quantizes; use adapter"
            rounds = self.recipe == "bf16"
            if rounds and not self.weight_broadcast.allow_rounding:
                yield (
                    "weight_broadcast.format",
                    "with recipe: bf16 each update is rounded to 16 bits, which loses most of a small one; use "
                    "recipe: fp32, format: adapter, or set weight_broadcast.allow_rounding: true",
                )
            if not rounds and "allow_rounding" in changed_fields(self.weight_broadcast):
                yield "weight_broadcast.allow_rounding", "has no effect with recipe: fp32; remove it"

    def _conflicts_of_adapters(self) -> Iterator[tuple[str, str]]:
        if not self.lora_adapters:
            return
        yield from conflicts_of_adapters("lora_adapters", self.lora_adapters)
        if self.lora and self.weight_broadcast.format != "adapter":
            yield "lora_adapters", "cannot all be merged into one base; use weight_broadcast.format: adapter"
        if self.noise_scheduler.enabled:
            yield "lora_adapters", "a version's noise is proved for one adapter; set noise_scheduler.enabled: false"

    def _conflicts_of_machines(self) -> Iterator[tuple[str, str]]:
        if self.device == "cuda" and self.num_threads is not None:
            yield "num_threads", "has no effect with device: cuda; remove it"
        if self.device == "cpu" and self.optimizer == "adamw_8bit_paged":
            yield "optimizer", "pages its state out of a GPU's memory, and device is cpu; use adamw_8bit"
        if self.gpus == 1 and "zero_level" in changed_fields(self):
            yield "zero_level", "has no effect with gpus: 1; remove it"
        if self.sleep_mode and self.weight_broadcast.type == "nccl":
            yield "sleep_mode", "is for one device, and weight_broadcast.type: nccl for several; use filesystem"
        if self.sleep_mode and self.device == "cpu":
            yield "sleep_mode", "needs a GPU: vLLM cannot sleep on a CPU, and device is cpu; remove it"
        if self.zero_level == 3:
            yield from self._conflicts_of_shared_base()
        if self.colocate:
            yield from self._conflicts_of_colocation()

    def _conflicts_of_shared_base(self) -> Iterator[tuple[str, str]]:
        for key in (key for key in _QUANTIZED if getattr(self, key)):
            yield "zero_level", f"3 shares the base's weights out, which cannot be done with those of {key}; use 1 or 2"
        if self.weight_broadcast.format == "merged":
            yield "zero_level", "3 shares the base out, and versions are merged into it whole; use 1 or 2"

    def _conflicts_of_colocation(self) -> Iterator[tuple[str, str]]:
        if not self.lora:
            yield "colocate", "shares the frozen base of an adapter, and lora is false; remove one of the two"
        elif self.weight_broadcast.format != "adapter":
            yield "colocate", "needs weight_broadcast.format: adapter: the server must not merge into weights it shares"
        if self.zero_level == 3:
            yield "colocate", "shares the base whole, and zero_level 3 divides it; use 1 or 2"

    def _conflicts_of_nccl(self) -> Iterator[tuple[str, str]]:
        if self.device == "cpu":
            yield "weight_broadcast.type", "sends from GPU to GPU, and device is cpu; use filesystem"
        targets = set(self.lora_target_modules) if self.lora else set()
        for layer in ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}):
            if layer & targets and layer - targets:
                yield (
                    "lora_target_modules",
                    f"must have all of {', '.join(sorted(layer))} or none with weight_broadcast.type: nccl, because "
                    "vLLM merges them into one layer",
                )

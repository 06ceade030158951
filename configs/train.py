"""Settings of `grpo-train`, the trainer. docs/settings.md has them all."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from configs.common import (
    AdapterName,
    Broadcast,
    Conflicts,
    FilesystemBroadcast,
    FilesystemTransport,
    OnlyWith,
    ProcessSettings,
    Receiving,
    Seconds,
    Section,
    Seed,
    adapter_conflicts,
    changed_fields,
)
from configs.loss import LossSettings

_QUANTIZED: dict[str, Literal["nf4", "fp8", "nvfp4"]] = {"qlora_bnb": "nf4", "qlora_fp8": "fp8", "qlora_fp4": "nvfp4"}
LinearLayer = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LINEAR_LAYERS: tuple[LinearLayer, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class NoiseSettings(Section):
    """QeRL's exploration: the servers sample with Gaussian noise on their norm weights (arXiv:2510.11696)."""

    enabled: bool = False
    """Servers sample with noise. Gradients and evaluation always use the clean weights."""
    sigma_start: Annotated[PositiveFloat, OnlyWith("enabled")] = 5e-2
    """Standard deviation of the noise in the first stage that has any."""
    sigma_end: Annotated[PositiveFloat, OnlyWith("enabled")] = 5e-4
    """Standard deviation in the last stage; it falls geometrically from the first."""
    num_stages: Annotated[int, Field(ge=3), OnlyWith("enabled")] = 10
    """Number of stages of equal length over `max_steps`; the first has no noise."""


class CheckpointSettings(Section):
    """What a run goes on from when its programs are started again."""

    interval: PositiveInt | None = 10
    """Steps between two checkpoints (null: none, so that a restarted run begins again and no batch is ever removed)."""
    keep_last: Annotated[PositiveInt | None, OnlyWith("interval")] = 2
    """This many of the newest checkpoints are kept (null: all)."""
    keep_interval: Annotated[PositiveInt | None, OnlyWith("keep_last")] = None
    """Older checkpoints of steps that this divides are kept too (null: none)."""
    resume_step: int | None = Field(default=None, ge=-1)
    """The run goes back to the checkpoint of this step (-1: the newest complete one; null: as `resume` says)."""


class SharedSettings(Section):
    """What a run says once, for the trainer and for the programs that need it too."""

    model: str | None = None
    """Base model: a local folder or a Hugging Face id."""
    output_dir: str = Field(default="outputs/run_default", min_length=1)
    """The run's folder, relative to where the command is given; the same for all programs."""
    resume: Literal["auto", "never"] = "auto"
    """Whether a run that `output_dir` holds goes on (`auto`) or is refused (`never`)."""
    overwrite_output_dir: bool = False
    """An earlier run in `output_dir` is removed first."""
    seed: Seed = 42
    """Seed of everything that is random."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; `auto` takes a GPU if there is one."""
    colocate: bool = False
    """Server and trainer share one device and one copy of the base weights."""
    sleep_mode: bool = False
    """The server sleeps while the trainer steps, on one GPU; needs the orchestrator's `max_async_level: 0`."""
    sequence_len: PositiveInt = 2048
    """Longest packed micro-batch in tokens, and so the longest sample."""
    lora: bool = True
    """A LoRA adapter is trained. false: all weights are, and are published whole (`weight_broadcast.format: full`)."""
    lora_rank: Annotated[PositiveInt, OnlyWith("lora")] = 16
    """Rank of the LoRA adapter."""
    lora_alpha: Annotated[PositiveInt, OnlyWith("lora")] = 32
    """LoRA alpha; the adapter's output is scaled by alpha / rank."""
    lora_target_modules: Annotated[tuple[LinearLayer, ...], Field(min_length=1), OnlyWith("lora")] = LINEAR_LAYERS
    """Linear layers that get an adapter."""
    lora_adapters: Annotated[tuple[AdapterName, ...], OnlyWith("lora")] = ()
    """Names of several adapters of rank `lora_rank`, for roles that do not share one (empty: one adapter for all)."""
    weight_broadcast: Broadcast = FilesystemBroadcast()
    """How policy versions travel from the trainer to the servers."""


class TrainSettings(ProcessSettings, SharedSettings):
    """The trainer. It makes policy-gradient steps on the micro-batches that the orchestrator packs, and publishes a
    policy version after each."""

    role: ClassVar[str] = "train"
    env_prefix: ClassVar[str] = "GRPO_TRAIN_"

    model: str
    """Base model: a local folder or a Hugging Face id."""
    run_id: str | None = None
    """Id of the run to join, which the launcher gives (null: the trainer makes one)."""
    gpus: PositiveInt = 1
    """Number of data-parallel ranks: one process for each GPU, or as many processes on a CPU."""
    zero_level: int = Field(default=1, ge=1, le=3)
    """What several ranks divide: 1 the optimizer's state, 2 also gradients, 3 also weights."""
    num_threads: Annotated[PositiveInt | None, OnlyWith("device", "auto", "cpu")] = None
    """Threads of each rank for computation on a CPU (null: torch's default, divided among the ranks)."""
    recipe: Literal["bf16", "fp32"] = "bf16"
    """Type of the base weights and of the computation; what is trained is always kept in float32."""
    gradient_checkpointing: bool = False
    """Activations are computed again in the backward pass: less memory, a third more work."""
    compile: bool = False
    """Layers are compiled with `torch.compile`; the first steps take longer. On a CPU it needs a C++ compiler."""
    max_steps: int = Field(default=-1, ge=-1)
    """Number of optimizer steps (-1: until the orchestrator ends the run)."""
    learning_rate: float = Field(default=2e-4, gt=0, le=10)
    """Peak learning rate."""
    lr_scheduler_type: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Schedule of the learning rate after the warm-up. `linear` and `cosine` fall to 0 at `max_steps`; `wsd` (warm-up,
    stable, decay) stays at the peak and falls to 0 over the last `decay_steps`."""
    decay_steps: Annotated[PositiveInt | None, OnlyWith("lr_scheduler_type", "wsd")] = None
    """Steps over which `wsd` falls to 0 (null: a tenth of `max_steps`)."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises from 0 to its peak."""
    optimizer: Literal["adamw_8bit", "adamw", "adamw_8bit_paged", "muon"] = "adamw_8bit"
    """Optimizer. `adamw` has float32 state, `adamw_8bit` 8-bit state, `adamw_8bit_paged` 8-bit state that a GPU may
    page out; `muon` orthogonalizes the updates of matrices and gives all else to AdamW."""
    weight_decay: float = Field(default=0.01, ge=0, le=10)
    """Decoupled weight decay."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's decay of the first moment."""
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """AdamW's decay of the second moment."""
    adam_epsilon: float = Field(default=1e-8, gt=0, le=1)
    """AdamW's epsilon."""
    muon_momentum: Annotated[float, Field(ge=0, lt=1), OnlyWith("optimizer", "muon")] = 0.95
    """Muon's momentum."""
    max_grad_norm: float = Field(default=1.0, gt=0, le=1e6)
    """Gradients with a larger norm are scaled down to it."""
    qlora_bnb: Annotated[bool, OnlyWith("lora")] = False
    """The base is held in bitsandbytes' NF4 with double quantization."""
    qlora_fp8: Annotated[bool, OnlyWith("lora")] = False
    """The base is held in FP8 (E4M3) with a scale for each block of 128 by 128."""
    qlora_fp4: Annotated[bool, OnlyWith("lora")] = False
    """The base is held in NVFP4: E2M1 with an FP8 scale for each block of 16 and one for the tensor."""
    loss: LossSettings = LossSettings()
    """The objective."""
    noise_scheduler: NoiseSettings = NoiseSettings()
    """Noise on the servers' norm weights while they sample."""
    ckpt: CheckpointSettings = CheckpointSettings()
    """Checkpoints."""
    wait_timeout_s: Seconds = 1200.0
    """Seconds to wait for the orchestrator's next batch, or for another rank, before the run is given up."""
    rollout_transport: Receiving = FilesystemTransport()
    """How batches arrive."""

    @property
    def quantization(self) -> Literal["nf4", "fp8", "nvfp4"] | None:
        """The format in which the base is held; None for the type of `recipe`."""
        return next((kind for key, kind in _QUANTIZED.items() if getattr(self, key)), None)

    def conflicts(self) -> Conflicts:
        yield from self._schedule_conflicts()
        yield from self._noise_conflicts()
        yield from self._precision_conflicts()
        if self.lora_adapters:
            yield from self._adapter_conflicts()
        yield from self._machine_conflicts()
        if self.overwrite_output_dir and (self.run_id is not None or self.ckpt.resume_step is not None):
            why = "run_id joins" if self.run_id is not None else "ckpt.resume_step resumes"
            yield "overwrite_output_dir", f"would remove the run that {why}; remove one of the two"
        if self.ckpt.resume_step is not None and self.resume == "never":
            yield "resume", "never refuses the run that ckpt.resume_step resumes; remove one of the two"
        if self.weight_broadcast.type == "nccl":
            yield from self._nccl_conflicts()

    def _schedule_conflicts(self) -> Conflicts:
        if self.lr_scheduler_type != "constant" and self.max_steps < 1:
            yield "lr_scheduler_type", "needs max_steps, to know where it ends; set max_steps or use constant"
        if self.max_steps >= 1 and self.warmup_steps >= self.max_steps:
            yield "warmup_steps", f"must be below max_steps = {self.max_steps}"
        elif self.decay_steps is not None and 1 <= self.max_steps < self.warmup_steps + self.decay_steps:
            yield "decay_steps", f"must be at most max_steps - warmup_steps = {self.max_steps - self.warmup_steps}"
        if self.optimizer == "muon" and self.lora:
            for key in sorted({"adam_beta1", "adam_beta2", "adam_epsilon"} & changed_fields(self)):
                yield (
                    key,
                    "has no effect with optimizer: muon and lora: true, where all weights are matrices; remove it",
                )

    def _noise_conflicts(self) -> Conflicts:
        noise = self.noise_scheduler
        if not noise.enabled:
            return
        if self.max_steps < noise.num_stages:
            yield "noise_scheduler.num_stages", f"needs max_steps of at least {noise.num_stages}, one step a stage"
        if noise.sigma_end > noise.sigma_start:
            yield "noise_scheduler.sigma_end", f"must not exceed sigma_start = {noise.sigma_start}"
        if (kind := self.weight_broadcast.format) != "adapter":
            yield (
                "noise_scheduler.enabled",
                f"needs weight_broadcast.format: adapter, not {kind}: rollouts with noise and evaluations without run "
                "at the same time, and a server holds one version of other formats",
            )

    def _precision_conflicts(self) -> Conflicts:
        formats, kind = [key for key in _QUANTIZED if getattr(self, key)], self.weight_broadcast.format
        if len(formats) > 1:
            yield formats[1], f"the base is held in one format, and {formats[0]} is true too; remove one of them"
        if (kind == "full") == self.lora:
            mend = "full is for lora: false; use adapter or merged" if self.lora else "must be full with lora: false"
            yield "weight_broadcast.format", mend
        elif kind == "merged" and formats:
            yield "weight_broadcast.format", f"cannot merge into a base that {formats[0]} quantizes; use adapter"
        elif kind == "merged" and self.recipe == "bf16" and not self.weight_broadcast.allow_rounding:
            yield (
                "weight_broadcast.format",
                "with recipe: bf16 each update is rounded to 16 bits, which loses most of a small one; use recipe: "
                "fp32, format: adapter, or set weight_broadcast.allow_rounding: true",
            )
        if kind == "merged" and self.recipe == "fp32" and self.weight_broadcast.allow_rounding:
            yield "weight_broadcast.allow_rounding", "has no effect with recipe: fp32; remove it"

    def _adapter_conflicts(self) -> Conflicts:
        yield from adapter_conflicts("lora_adapters", self.lora_adapters)
        if self.weight_broadcast.format == "merged":
            yield "lora_adapters", "cannot all be merged into one base; use weight_broadcast.format: adapter"
        if self.noise_scheduler.enabled:
            yield "lora_adapters", "a version's noise is proved for one adapter; set noise_scheduler.enabled: false"

    def _machine_conflicts(self) -> Conflicts:
        if self.zero_level > 1 and self.gpus == 1:
            yield "zero_level", "has no effect with gpus: 1, where nothing is divided; remove it"
        if self.device == "cpu" and self.optimizer == "adamw_8bit_paged":
            yield "optimizer", "pages its state out of a GPU's memory, and device is cpu; use adamw_8bit"
        if self.zero_level == 3 and self.quantization is not None:
            yield "zero_level", f"3 shards the base's weights, which {self.quantization} ones cannot be; use 1 or 2"
        if self.zero_level == 3 and self.weight_broadcast.format == "merged":
            yield "zero_level", "3 shards the base, and versions are merged into it whole; use 1 or 2"
        if self.sleep_mode and self.device == "cpu":
            yield "sleep_mode", "needs a GPU: vLLM cannot sleep on a CPU, and device is cpu; remove it"
        if self.colocate:
            if not self.lora:
                yield "colocate", "shares the frozen base of an adapter, and lora is false; remove one of the two"
            elif self.weight_broadcast.format != "adapter":
                yield "colocate", "needs weight_broadcast.format: adapter: the server must not change weights it shares"
            if self.zero_level == 3:
                yield "colocate", "shares the base whole, and zero_level 3 divides it; use 1 or 2"

    def _nccl_conflicts(self) -> Conflicts:
        if self.device == "cpu":
            yield "weight_broadcast.type", "nccl sends from GPU to GPU, and device is cpu; use filesystem"
        if self.sleep_mode:
            yield "sleep_mode", "is for one device, and weight_broadcast.type: nccl for several; use filesystem"
        targets = set(self.lora_target_modules) if self.lora else set()
        for layer in ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}):
            if layer & targets and layer - targets:
                yield (
                    "lora_target_modules",
                    f"must have all of {', '.join(sorted(layer))} or none with weight_broadcast.type: nccl, because "
                    "vLLM merges them into one layer",
                )

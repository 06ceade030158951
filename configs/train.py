"""Settings of `grpo-train`, the trainer. docs/settings.md has them all."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from grpo.configs.common import (
    AdapterName,
    Broadcast,
    Conflicts,
    FilesystemBroadcast,
    FilesystemTransport,
    Listed,
    OnDevice,
    OnlyWith,
    ProcessSettings,
    Quantization,
    Seconds,
    Section,
    Share,
    Shared,
    SpotProofSettings,
    Transport,
    adapter_conflicts,
    only,
)
from grpo.configs.facts import Hardware
from grpo.configs.loss import LossSettings
from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

LinearLayer = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$")]
ALL_LINEAR = "all-linear"
LowPrecision = Literal["fp8_hybrid", "nvfp4"]
Optimizer = Literal["adamw_8bit", "adamw", "adamw_8bit_paged", "muon"]
QUANTIZED: dict[str, Quantization] = {"qlora_bnb": "nf4", "qlora_fp8": "fp8", "qlora_fp4": "nvfp4"}
_MERGED_BY_VLLM = (
    *({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}, {"w1", "w3"}),
    *({"in_proj_qkv", "in_proj_z"}, {"in_proj_b", "in_proj_a"}),
)


def _underlined(given: Any) -> Any:
    return given.replace("-", "_") if isinstance(given, str) else given


class NoiseSettings(Section):
    """QeRL's exploration: the servers sample with Gaussian noise on their norm weights (arXiv:2510.11696)."""

    enabled: bool = False
    """Servers sample with noise; gradients and evaluation use the clean weights."""
    sigma_start: Annotated[PositiveFloat, OnlyWith("enabled")] = 5e-2
    """Standard deviation in the first stage with noise."""
    sigma_end: Annotated[PositiveFloat, OnlyWith("enabled")] = 5e-4
    """Standard deviation in the last stage; it falls geometrically."""
    num_stages: Annotated[int, Field(ge=3), OnlyWith("enabled")] = 10
    """Stages of equal length over `max_steps`; the first has no noise."""


class CheckpointSettings(Section):
    """What a run goes on from when its programs are started again."""

    interval: PositiveInt | None = 10
    """Steps between checkpoints (null: none; a restarted run begins again)."""
    keep_last: Annotated[PositiveInt | None, OnlyWith("interval")] = 2
    """Newest checkpoints that are kept (null: all)."""
    keep_interval: Annotated[PositiveInt | None, OnlyWith("keep_last")] = None
    """Older checkpoints of multiples of this step are kept too (null: none)."""
    resume_step: int | None = Field(default=None, ge=-1)
    """Go back to the checkpoint of this step (-1: the newest; null: as `resume` says)."""


class SharedSettings(OnDevice, Shared):
    """What a run says once, for the trainer and for the programs that need it too."""

    model: str | None = None
    """Base model: a local folder or a Hugging Face id."""
    resume: Literal["auto", "never"] = "auto"
    """Continue a run that is in `output_dir` (`auto`) or refuse (`never`)."""
    resume_with_changed_code: bool = False
    """Continues although files that the settings name (environments, rewards, losses, data) have changed. false:
    refuse."""
    overwrite_output_dir: bool = False
    """Remove an earlier run in `output_dir` first."""
    sequence_len: PositiveInt = 2048
    """Longest sample in tokens, with its prompt (default in a run: 8192 on a GPU, 2048 on a CPU, more for a longer
    `max_tokens`, at most the model's)."""
    micro_batch_tokens: PositiveInt | None = None
    """Largest micro-batch in tokens (null: `sequence_len`, on a GPU at least 16384)."""
    lora: bool = True
    """Train a LoRA adapter. false: train all weights, with `weight_broadcast.format: full`."""
    lora_rank: Annotated[PositiveInt, OnlyWith("lora")] = 16
    """Rank of the LoRA adapter."""
    lora_alpha: Annotated[PositiveInt, OnlyWith("lora")] = 32
    """LoRA alpha; the adapter's output is scaled by alpha / rank."""
    lora_target_modules: Annotated[Listed[LinearLayer], Field(min_length=1), OnlyWith("lora")] = (ALL_LINEAR,)
    """Linear layers with an adapter, by the model's names (`q_proj,v_proj`). `all-linear`: all of the decoder's."""
    lora_adapters: Annotated[Listed[AdapterName], OnlyWith("lora")] = ()
    """Names of several adapters, for roles of their own (empty: one for all)."""
    rollout_transport: Transport = FilesystemTransport()
    """How batches travel from the orchestrator to the trainer."""
    weight_broadcast: Broadcast = FilesystemBroadcast()
    """How policy versions travel from the trainer to the servers."""
    proofs: SpotProofSettings = SpotProofSettings()
    """Proofs of what was sampled and trained."""


class TrainSettings(ProcessSettings, SharedSettings):
    """The trainer. It makes policy-gradient steps on the micro-batches that the orchestrator packs, and publishes a
    policy version after each."""

    role: ClassVar[str] = "train"
    env_prefix: ClassVar[str] = "GRPO_TRAIN_"

    model: str
    """Base model: a local folder or a Hugging Face id."""
    run_id: str | None = None
    """Id of the run to join, set by the launcher (null: the trainer makes one)."""
    gpus: PositiveInt = 1
    """Data-parallel ranks on each machine: one process per GPU, or so many on a CPU."""
    nodes: PositiveInt = 1
    """Machines that train together; start `grpo-train` on each by the same command."""
    min_nodes: Annotated[PositiveInt | None, OnlyWith("rendezvous")] = None
    """Machines with which it begins or continues if no more come (null: all)."""
    rendezvous: str | None = Field(default=None, pattern=r"^([^\s:\[\]]+|\[[0-9a-fA-F:]+\]):[0-9]{1,5}$")
    """HOST:PORT where machines meet: a free port on one of them (null: one machine)."""
    zero_level: int = Field(default=1, ge=1, le=3)
    """ZeRO level: ranks divide the optimizer's state (1), also gradients (2), also weights (3)."""
    offload: bool = False
    """Keeps weights, gradients and optimizer state in main memory: slower steps. For `lora: false`."""
    num_threads: Annotated[PositiveInt | None, OnlyWith("device", "auto", "cpu")] = None
    """Threads of each rank on a CPU (null: allowed cores / ranks)."""
    recipe: Annotated[Literal["bf16", "fp32", "fp8_hybrid", "nvfp4"] | None, BeforeValidator(_underlined)] = None
    """Type of base weights and computation (null: bf16 on a GPU, fp32 on a CPU). `fp8_hybrid` and `nvfp4` multiply
    frozen weights in 8 or 4 bits (`grpo docs quantization`)."""
    gradient_checkpointing: bool | Literal["selective"] | None = None
    """Computes activations again in the backward pass: less memory, a third more work. `selective`: all but
    attention's. null: as memory needs on a GPU, false on a CPU."""
    compile: bool | None = None
    """Compiles layers with `torch.compile`; the first steps are slower (null: on a GPU, if Triton can)."""
    max_steps: int = Field(default=-1, ge=-1)
    """Number of optimizer steps (-1: until the orchestrator ends the run)."""
    max_async_level: NonNegativeInt | None = None
    """The orchestrator's (null: follow it)."""
    transport_type: Literal["filesystem", "zmq"] | None = None
    """Must equal `rollout_transport.type` (null: follow it)."""
    per_device_train_batch_size: Annotated[int, only(1, "samples are packed; set sequence_len instead")] = 1
    """Packed micro-batches that a rank computes at a time."""
    gradient_accumulation_steps: PositiveInt | None = None
    """Micro-batches per optimizer step on each rank (null: all of a batch)."""
    ppo_epochs: PositiveInt = 1
    """Passes over a batch before its version is published."""
    logging_steps: PositiveInt = 1
    """Steps between lines in the trainer's log."""
    learning_rate: float = Field(default_factory=lambda data: 2e-5 if data["lora"] else 1e-6, gt=0, le=10)
    """Peak learning rate (default with `lora: false`: 1e-6)."""
    lr_scheduler_type: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Schedule after the warm-up. `linear` and `cosine` fall to 0 at `max_steps`, `wsd` over the last `decay_steps`."""
    little_signal: Share = 0.0
    """If a smaller share of the loss tokens can teach (advantage not 0), the step's learning rate is multiplied by
    sqrt(share / little_signal)."""
    decay_steps: Annotated[PositiveInt | None, OnlyWith("lr_scheduler_type", "wsd")] = None
    """Steps over which `wsd` falls to 0 (null: a tenth of `max_steps`)."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises from 0."""
    optimizer: Optimizer = Field(default_factory=lambda data: "adamw" if data["lora"] else "adamw_8bit")
    """`adamw_8bit` (default with `lora: false`) has 8-bit state, `adamw_8bit_paged` may page it out of a GPU; `muon`
    orthogonalizes updates of matrices and leaves the rest to AdamW."""
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
    """Gradients with a larger norm are scaled down to this."""
    qlora_bnb: Annotated[bool, OnlyWith("lora")] = False
    """Holds the base in bitsandbytes' NF4."""
    qlora_fp8: Annotated[bool, OnlyWith("lora")] = False
    """Holds the base in FP8 (E4M3)."""
    qlora_fp4: Annotated[bool, OnlyWith("lora")] = False
    """Holds the base in NVFP4."""
    init_adapter: Annotated[str | None, OnlyWith("lora")] = None
    """Folder of a PEFT adapter to begin with, such as one from `grpo sft` (null: a new one)."""
    loss: LossSettings = LossSettings()
    """The objective."""
    noise_scheduler: NoiseSettings = NoiseSettings()
    """Noise on the servers' norm weights while they sample."""
    ckpt: CheckpointSettings = CheckpointSettings()
    """Checkpoints."""
    wait_timeout_s: Seconds = 1200.0
    """Seconds to wait for the next batch, or for another rank."""

    @model_validator(mode="before")
    @classmethod
    def _transport_by_type(cls, given: Any) -> Any:
        """`transport_type` chooses `rollout_transport` where that has no type of its own."""
        if not isinstance(given, Mapping) or not isinstance(kind := given.get("transport_type"), str):
            return given
        transport = given.get("rollout_transport", {})
        return {**given, "rollout_transport": {"type": kind, **transport}} if isinstance(transport, Mapping) else given

    @classmethod
    def fill(cls, tree: dict[str, Any], hardware: Hardware) -> None:
        on_gpu = hardware.on_gpu(tree.get("device"))
        tree.setdefault("recipe", "bf16" if on_gpu else "fp32")

    @property
    def pack_tokens(self) -> int:
        """Largest micro-batch in tokens."""
        return self.micro_batch_tokens or self.sequence_len

    @property
    def num_ranks(self) -> int:
        """Ranks on all machines together, where none is missing."""
        return self.nodes * self.gpus

    @property
    def quantization(self) -> Quantization | None:
        """The format in which the base is held; None for the type of `recipe`."""
        return next((kind for key, kind in QUANTIZED.items() if getattr(self, key)), None)

    @property
    def needs_bitsandbytes(self) -> str | None:
        """The setting that needs bitsandbytes; None where nothing does."""
        return "qlora_bnb" if self.qlora_bnb else f"optimizer: {self.optimizer}" if "8bit" in self.optimizer else None

    @property
    def dtype(self) -> Literal["float32", "bfloat16"]:
        """Name of the type of the base weights and of the computation."""
        return "float32" if self.recipe == "fp32" else "bfloat16"

    @property
    def low_precision(self) -> LowPrecision | None:
        """In how few bits an adapter's base is multiplied; None where it is in the type of the computation."""
        return self.recipe if self.recipe in ("fp8_hybrid", "nvfp4") else None

    def conflicts(self) -> Conflicts:
        yield from self._schedule_conflicts()
        yield from self._format_conflicts()
        yield from self._machine_conflicts()
        if self.overwrite_output_dir and (self.run_id or self.ckpt.resume_step is not None):
            yield "overwrite_output_dir", "would remove the run of run_id or ckpt.resume_step; remove one"
        if self.ckpt.resume_step is not None and self.resume == "never":
            yield "resume", "never refuses the run that ckpt.resume_step resumes; remove one of the two"
        if self.pack_tokens < self.sequence_len:
            yield "micro_batch_tokens", f"must hold the longest sample, of sequence_len = {self.sequence_len} tokens"
        if self.transport_type not in (None, self.rollout_transport.type):
            yield "transport_type", f"must equal rollout_transport.type = {self.rollout_transport.type}; remove one"

    def _schedule_conflicts(self) -> Conflicts:
        steps, noise = self.max_steps, self.noise_scheduler
        if self.lr_scheduler_type != "constant" and steps < 1:
            yield "lr_scheduler_type", "needs max_steps, to know where it ends; set max_steps or use constant"
        if 1 <= steps <= self.warmup_steps:
            yield "warmup_steps", f"must be below max_steps = {steps}"
        elif self.decay_steps is not None and 1 <= steps < self.warmup_steps + self.decay_steps:
            yield "decay_steps", f"must be at most max_steps - warmup_steps = {steps - self.warmup_steps}"
        if self.optimizer == "muon" and self.lora:
            for key in sorted(self.changed & {"adam_beta1", "adam_beta2", "adam_epsilon"}):
                yield key, "has no effect with muon on adapters, which are all matrices; remove it"
        if noise.enabled and steps < noise.num_stages:
            yield "noise_scheduler.num_stages", f"needs max_steps of at least {noise.num_stages}, one step a stage"
        if noise.enabled and noise.sigma_end > noise.sigma_start:
            yield "noise_scheduler.sigma_end", f"must not exceed sigma_start = {noise.sigma_start}"

    def _format_conflicts(self) -> Conflicts:
        """Yields conflicts of what is published."""
        kind, rounds = self.weight_broadcast.format, self.weight_broadcast.allow_rounding
        if len(formats := [one for one in QUANTIZED if getattr(self, one)]) > 1:
            yield formats[1], f"the base is held in one format, and {formats[0]} is true too; remove one of them"
        if self.low_precision is not None and not self.lora:
            yield "recipe", f"{self.recipe} is for an adapter's frozen base; with lora: false use bf16 or fp32"
        if (kind == "full") == self.lora:
            yield "weight_broadcast.format", "full belongs to lora: false, adapter and merged to lora: true"
        elif kind == "merged" and formats:
            yield "weight_broadcast.format", f"cannot merge into a base that {formats[0]} quantizes; use adapter"
        elif kind == "merged" and self.recipe != "fp32" and not rounds:
            why = "with 16 bits loses most of a small update; use adapter or recipe: fp32, or set"
            yield "weight_broadcast.format", f"{why} weight_broadcast.allow_rounding: true"
        if kind == "merged" and self.recipe == "fp32" and rounds:
            yield "weight_broadcast.allow_rounding", "has no effect with recipe: fp32; remove it"
        if ALL_LINEAR in self.lora_target_modules and len(self.lora_target_modules) > 1:
            yield "lora_target_modules", f"{ALL_LINEAR} is all of them; remove it or the names beside it"
        yield from adapter_conflicts("lora_adapters", self.lora_adapters)
        if self.lora_adapters and self.init_adapter is not None:
            yield "init_adapter", "is one adapter, and lora_adapters names several; remove one of the two"
        if self.lora_adapters and kind == "merged":
            yield "lora_adapters", "cannot all be merged into one base; use weight_broadcast.format: adapter"
        if self.lora_adapters and self.noise_scheduler.enabled:
            yield "lora_adapters", "a version's noise is proved for one adapter; set noise_scheduler.enabled: false"
        if self.noise_scheduler.enabled and kind != "adapter":
            yield "noise_scheduler.enabled", "needs weight_broadcast.format: adapter, with several versions in a server"

    def _machine_conflicts(self) -> Conflicts:
        on_cpu, nccl = self.device == "cpu", self.weight_broadcast.type == "nccl"
        if self.sleep_mode and (on_cpu or nccl):
            yield "sleep_mode", "needs one GPU, where vLLM can sleep: no CPU, and weight_broadcast.type: filesystem"
        if on_cpu:
            if self.low_precision is not None:
                yield "recipe", f"{self.recipe} needs a GPU that can; with device: cpu use bf16 or fp32"
            if self.optimizer == "adamw_8bit_paged":
                yield "optimizer", "pages its state out of a GPU's memory, and device is cpu; use adamw_8bit"
            if nccl:
                yield "weight_broadcast.type", "nccl sends from GPU to GPU, and device is cpu; use filesystem"
        if self.offload and (self.lora or on_cpu or self.optimizer in ("adamw_8bit", "adamw_8bit_paged")):
            yield "offload", "is for lora: false on a GPU, with optimizer: adamw or muon; adapters and 8 bits are small"
        if self.zero_level > 1 and self.num_ranks == 1:
            yield "zero_level", "has no effect with gpus: 1, where nothing is divided; remove it"
        if (self.nodes > 1) != (self.rendezvous is not None):
            yield "rendezvous", "is where several machines meet; set nodes above 1 and this, or neither"
        least = self.min_nodes or self.nodes
        if least > self.nodes:
            yield "min_nodes", f"must not exceed nodes = {self.nodes}"
        elif least < self.nodes and self.optimizer.startswith("adamw_8bit"):
            yield "min_nodes", "lets the number of ranks change, and 8-bit state is divided for good; use adamw"
        elif least < self.nodes and self.gradient_accumulation_steps is not None:
            yield "min_nodes", "lets ranks have unequal numbers of micro-batches; remove gradient_accumulation_steps"
        if self.nodes > 1 and (self.colocate or self.sleep_mode):
            yield "nodes", "a base, or a GPU, is shared with the server of one machine; remove colocate and sleep_mode"
        if self.zero_level == 3 and (self.quantization or self.weight_broadcast.format == "merged" or self.colocate):
            yield "zero_level", "3 divides the base, which qlora_*, merged versions and colocate need whole; use 1 or 2"
        if self.colocate and self.weight_broadcast.format != "adapter":
            yield "colocate", "shares an adapter's frozen base; use weight_broadcast.format: adapter"
        if nccl:
            targets = set(self.lora_target_modules) if self.lora else set()
            if any(layers & targets and layers - targets for layers in _MERGED_BY_VLLM):
                names = "; ".join(", ".join(sorted(layers)) for layers in _MERGED_BY_VLLM)
                why = f"vLLM merges each of these into one layer, of which nccl needs all or none: {names}"
                yield "lora_target_modules", why

"""Settings of `grpo-infer`, the inference server. docs/settings.md has them all."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt

from configs.common import Conflicts, OnDevice, OnlyWith, Port, ProcessSettings, Seconds, Seed, Shared


class _ServerSettings(ProcessSettings):
    """What servers of the policy and of a teacher have in common."""

    host: str = "127.0.0.1"
    """Address to listen on; with 0.0.0.0 other machines can reach it, and it should have an API key."""
    port: Port = 8000
    """Port to listen on."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights and of the computation; `auto` follows the checkpoint."""
    max_model_len: PositiveInt | None = None
    """Longest sequence in tokens, prompt and answer together (null: what the model allows)."""
    trust_remote_code: bool = False
    """Model code that comes with the checkpoint may run."""
    enforce_eager: bool = False
    """The model runs without CUDA graphs."""
    tp: PositiveInt = 1
    """Tensor parallel degree."""
    dp: PositiveInt = 1
    """Data parallel degree."""
    max_num_seqs: PositiveInt | None = None
    """How many sequences are decoded at once (null: 64 on a CPU, else vLLM's default)."""
    max_num_batched_tokens: PositiveInt | None = None
    """How many tokens one step of the engine may process (null: 2048 on a CPU, else vLLM's default)."""
    enable_prefix_caching: bool | None = None
    """The KV cache of equal prefixes is used again (null: vLLM's default)."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1), OnlyWith("device", "auto", "cuda")] = 0.9
    """Share of the GPU's memory that vLLM may take."""
    kv_cache_memory_bytes: PositiveInt | None = None
    """Size of the KV cache in bytes (null: 128 MiB on a CPU, by `gpu_memory_utilization` on a GPU)."""
    num_threads: Annotated[PositiveInt | None, OnlyWith("device", "auto", "cpu")] = None
    """Threads for computation on a CPU (null: 1)."""
    reasoning_parser: str | None = None
    """vLLM's parser for reasoning content in chat answers."""
    enable_auto_tool_choice: bool = False
    """Chat answers may call tools; needs `tool_call_parser`."""
    tool_call_parser: Annotated[str | None, OnlyWith("enable_auto_tool_choice")] = None
    """vLLM's parser for tool calls in chat answers."""
    rope_scaling: dict[str, Any] | None = None
    """The model's rope scaling is replaced by this."""

    def conflicts(self) -> Conflicts:
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            yield "enable_auto_tool_choice", "has no effect without tool_call_parser; set that too, or remove it"


class InferSettings(_ServerSettings, Shared, OnDevice):
    """The inference server. It serves vLLM's OpenAI routes and token-in, token-out generation, and loads policy
    versions from the run's folder."""

    role: ClassVar[str] = "infer"
    env_prefix: ClassVar[str] = "GRPO_INFER_"
    exit_codes: ClassVar[str] = (
        "0 done, 1 the server failed, 2 settings that cannot be honoured, 75 vLLM's engine has ended by itself and the "
        "server may be started again, 130 Ctrl-C, 143 SIGTERM"
    )

    model: str
    """Base model: a local folder or a Hugging Face id."""
    api_key_var: str = "VLLM_API_KEY"
    """Name of the environment variable that holds the API key; where it is set, every route but /health asks for it."""
    enable_lora: bool = True
    """Policy versions are LoRA adapters on top of the base model, several at once. false: versions (`merged` or `full`
    ones) replace the model's own weights, one at a time."""
    max_lora_rank: Annotated[PositiveInt | None, OnlyWith("enable_lora")] = None
    """Highest LoRA rank that can be served (null: 16), rounded up to one that vLLM knows."""
    max_loras: Annotated[int, Field(ge=2), OnlyWith("enable_lora")] = 10
    """How many policy versions one batch can mix; with 1 a new version would wait until all work on the old one ends.
    With `norm_noise` a version counts twice."""
    max_cpu_loras: Annotated[PositiveInt, OnlyWith("enable_lora")] = 100
    """How many policy versions are kept in main memory. With `norm_noise` a version counts twice."""
    norm_noise: Annotated[bool, OnlyWith("enable_lora")] = False
    """Policy versions are also served with the trainer's noise on their norm weights (its
    `noise_scheduler.enabled`)."""
    weight_broadcast_type: Literal["filesystem", "nccl"] = "filesystem"
    """How policy versions arrive: as the trainer's `weight_broadcast.type`."""
    canary_tolerance: float | None = Field(default=None, gt=0, le=1)
    """Allowed difference between the trainer's and this server's log-probabilities of the canary, in nats (null: 1e-4
    at most in float32, 0.05 on average in 16-bit types)."""
    canary_timeout_s: Seconds = 120.0
    """Seconds that loading and proving a policy version may take, and in `sleep_mode` falling asleep or waking."""

    def conflicts(self) -> Conflicts:
        yield from super().conflicts()
        if self.max_loras > self.max_cpu_loras:
            yield "max_loras", f"must not exceed max_cpu_loras = {self.max_cpu_loras}"
        if self.colocate and not self.enable_lora:
            yield (
                "colocate",
                "needs enable_lora: true: versions must not replace weights that the trainer computes with",
            )
        if self.colocate and (self.tp > 1 or (self.dp > 1 and self.device == "cpu")):
            yield "colocate", "lends whole weights, on a CPU one copy of them; set tp: 1, and dp: 1 on a CPU"
        if self.sleep_mode and self.device == "cpu":
            yield "sleep_mode", "needs a GPU: vLLM cannot sleep on a CPU, and device is cpu; remove it"
        if self.weight_broadcast_type == "nccl":
            if self.enable_lora:
                yield "weight_broadcast_type", "receives whole matrices, not adapters; set enable_lora: false"
            if self.device == "cpu":
                yield "weight_broadcast_type", "receives from GPU to GPU, and device is cpu; use filesystem"
            if self.sleep_mode:
                yield "sleep_mode", "is for one device, and weight_broadcast_type: nccl for several; use filesystem"


class TeacherServerSettings(_ServerSettings):
    """The `grpo-infer` that serves a teacher. What is left open follows from the settings of the run."""

    role: ClassVar[str] = "teacher"
    env_prefix: ClassVar[str] = "GRPO_TEACHER_"

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute (where it is left open: as the policy's server)."""
    seed: Seed = 42
    """Seed of the engine's sampler."""

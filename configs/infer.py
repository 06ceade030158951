"""Settings of `grpo-infer`, the inference server. docs/settings.md has them all."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt
from pydantic_settings import SettingsConfigDict

from configs.common import ProcessSettings, changed_fields


class InferSettings(ProcessSettings):
    """vLLM's OpenAI server, token-in/token-out generation, and policy versions loaded from the run's broadcasts."""

    model_config = SettingsConfigDict(env_prefix="GRPO_INFER_")
    role: ClassVar[str] = "infer"
    exit_codes: ClassVar[str] = (
        "0 done, 1 the server failed, 2 settings that cannot be honoured, 75 vLLM's engine process has ended by itself "
        "and the server may be started again, 130 Ctrl-C, 143 SIGTERM"
    )

    model: str
    """Base model: a local folder, or a Hugging Face id that is in the local cache."""
    output_dir: str = "outputs/run_default"
    """The run's folder; policy versions are loaded from its `broadcasts` folder and from nowhere else."""
    host: str = "127.0.0.1"
    """Address to bind to. Give 0.0.0.0 to be reached from other machines, and set an API key then."""
    port: int = Field(default=8000, ge=1, le=65535)
    """Port to bind to."""
    api_key_var: str = "VLLM_API_KEY"
    """Name of the environment variable that holds the API key. Where it is set, every route but /health asks for it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs: `auto` takes a GPU if vLLM was built for one and sees one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights and the computation. `auto` follows the checkpoint."""
    max_model_len: PositiveInt | None = None
    """Longest sequence, prompt and answer together, in tokens (null: what the model allows)."""
    colocate: bool = False
    """Lend the base weights to the run's `grpo-train`, which has `colocate` too and runs on the same machine and
    device, so that there is one copy of them. On a CPU decoding is slower then (docs/transport.md)."""
    sleep_mode: bool = False
    """Sleep while the trainer makes a step, when the orchestrator, which has `sleep_mode` too, says so: the KV cache's
    memory is freed, and the weights move to main memory unless they are shared (`colocate`). Needs a GPU."""
    seed: int = 42
    """Seed of the engine's sampler."""
    trust_remote_code: bool = False
    """Allow model code that comes with the checkpoint."""
    enforce_eager: bool = False
    """Run without CUDA graphs."""
    tp: PositiveInt = 1
    """Tensor parallel degree."""
    dp: PositiveInt = 1
    """Data parallel degree."""
    enable_lora: bool = True
    """Serve LoRA policy versions on top of the base model, several at once. false: versions (`merged` ones, or full
    weights) replace the model's own weights, one at a time."""
    max_lora_rank: PositiveInt | None = None
    """Highest LoRA rank that can be served (null: 16); rounded up to a rank that vLLM knows."""
    max_loras: int = Field(default=10, ge=2)
    """How many policy versions one batch can mix. At least 2, or a new version waits until all work on the old ends.
    With `norm_noise` a version counts twice."""
    max_cpu_loras: PositiveInt = 100
    """How many policy versions are kept in main memory. With `norm_noise` a version counts twice."""
    norm_noise: bool = False
    """Serve policy versions also with the trainer's noise on their norm weights; must equal its
    `noise_scheduler.enabled`."""
    max_num_seqs: PositiveInt | None = None
    """How many sequences are decoded at once (null: 64 on a CPU, else vLLM's default)."""
    max_num_batched_tokens: PositiveInt | None = None
    """How many tokens one engine step may process (null: 2048 on a CPU, else vLLM's default)."""
    enable_prefix_caching: bool | None = None
    """Reuse the KV cache of equal prefixes (null: vLLM's default)."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of the GPU's memory that vLLM may take. Only on a GPU."""
    kv_cache_memory_bytes: PositiveInt | None = None
    """Size of the KV cache in bytes (null: 128 MiB on a CPU, by `gpu_memory_utilization` on a GPU)."""
    num_threads: PositiveInt | None = None
    """Threads for computation on a CPU (null: 1)."""
    weight_broadcast_type: Literal["filesystem", "nccl"] = "filesystem"
    """How policy versions arrive; must equal the trainer's `weight_broadcast.type`."""
    canary_tolerance: PositiveFloat | None = None
    """Allowed difference between the trainer's and this server's log-probabilities of the canary, in nats
    (null: 1e-4 at most in float32, 0.05 on average in 16-bit types)."""
    canary_timeout_s: PositiveFloat = 120.0
    """Seconds that loading and proving a policy version may take, and with `sleep_mode` falling asleep or
    waking."""
    reasoning_parser: str | None = None
    """vLLM's parser for reasoning content in chat answers."""
    enable_auto_tool_choice: bool = False
    """Let chat answers call tools; needs `tool_call_parser`."""
    tool_call_parser: str | None = None
    """vLLM's parser for tool calls in chat answers."""
    rope_scaling: dict[str, Any] | None = None
    """Override of the model's rope scaling."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        if self.enable_auto_tool_choice != (self.tool_call_parser is not None):
            yield (
                "enable_auto_tool_choice",
                "set together with tool_call_parser, or neither; one alone has no effect",
            )
        if not self.enable_lora:
            for key in sorted({"max_lora_rank", "max_loras", "max_cpu_loras"} & changed_fields(self)):
                yield key, "has no effect with enable_lora: false; remove it"
            if self.norm_noise:
                yield "norm_noise", "needs enable_lora: true: versions with and without noise are served at once"
        if self.colocate:
            yield from self._conflicts_of_colocation()
        if self.weight_broadcast_type == "nccl":
            if self.enable_lora:
                yield "weight_broadcast_type", "receives whole matrices, not adapters; set enable_lora: false"
            if self.device == "cpu":
                yield "weight_broadcast_type", "receives from GPU to GPU, and device is cpu; use filesystem"
            if self.sleep_mode:
                yield "sleep_mode", "is for one device, and weight_broadcast_type: nccl for several; use filesystem"
        if self.sleep_mode and self.device == "cpu":
            yield "sleep_mode", "needs a GPU: vLLM cannot sleep on a CPU, and device is cpu; remove it"
        if self.max_loras > self.max_cpu_loras:
            yield "max_loras", f"must not exceed max_cpu_loras = {self.max_cpu_loras}"
        if self.device == "cpu" and "gpu_memory_utilization" in changed_fields(self):
            yield (
                "gpu_memory_utilization",
                "has no effect with device: cpu; set kv_cache_memory_bytes instead",
            )
        if self.device == "cuda" and self.num_threads is not None:
            yield "num_threads", "has no effect with device: cuda; remove it"

    def _conflicts_of_colocation(self) -> Iterator[tuple[str, str]]:
        if not self.enable_lora:
            yield (
                "colocate",
                "needs enable_lora: true: versions must not replace weights that the trainer computes with",
            )
        if self.tp > 1:
            yield "colocate", f"lends whole weights, and tp = {self.tp} servers have parts of them; set tp: 1"
        if self.dp > 1 and self.device == "cpu":
            yield "colocate", f"lends one copy on a CPU, and dp = {self.dp} servers have one each; set dp: 1"

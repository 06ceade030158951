"""Settings of `grpo-infer`, the inference server. docs/settings.md has them all."""

import re
from typing import Annotated, Any, ClassVar, Literal

from grpo.configs.common import (
    Conflicts,
    OnDevice,
    OnlyWith,
    Port,
    ProcessSettings,
    Quantization,
    Seconds,
    Seed,
    Shared,
    TemplateArguments,
)
from pydantic import BeforeValidator, Field, PositiveInt

_BESIDE = "it is a setting of its own; give it beside vllm"
_OLD_CACHE = "what was computed under earlier weights would be used again; remove it"
_OTHER_TOKENS = "changes the distribution that tokens are drawn from, which the trainer could not follow"
_OURS = "the proof of versions depends on it; remove it"
_NO_EFFECT = "grpo-infer serves by itself, and it would have no effect; remove it"
VLLM_REFUSED = {
    **dict.fromkeys(("model", "host", "port", "dtype", "max_model_len", "seed", "trust_remote_code"), _BESIDE),
    **dict.fromkeys(("enforce_eager", "enable_prefix_caching", "gpu_memory_utilization", "reasoning_parser"), _BESIDE),
    **dict.fromkeys(("enable_auto_tool_choice", "enable_lora", "max_lora_rank", "max_loras", "max_cpu_loras"), _BESIDE),
    "tensor_parallel_size": "set tp",
    "data_parallel_size": "set dp",
    "default_chat_template_kwargs": "set chat_template_kwargs",
    "api_key": "set the environment variable that api_key_var names",
    "hf_overrides": "server and trainer would compute other models; set rope_scaling, or change config.json",
    "enable_sleep_mode": "set sleep_mode",
    "weight_transfer_config": "set weight_broadcast_type",
    **dict.fromkeys(("served_model_name", "lora_modules", "generation_config", "config"), _OURS),
    **dict.fromkeys(("lora_target_modules", "logprobs_mode", "scheduling_policy", "disable_log_stats"), _OURS),
    **dict.fromkeys(("worker_cls", "worker_extension_cls", "additional_config"), _OURS),
    "pipeline_parallel_size": "the proof of versions does not know its stages; set tp",
    **dict.fromkeys(("logits_processors", "watermark_config"), f"it {_OTHER_TOKENS}; remove it"),
    **dict.fromkeys(("kv_transfer_config", "kv_offloading_size"), _OLD_CACHE),
    **dict.fromkeys(("uds", "root_path", "headless", "api_server_count", "grpc", "ssl_keyfile"), _NO_EFFECT),
    **dict.fromkeys(("ssl_certfile", "ssl_ca_certs", "uvicorn_log_level", "shutdown_timeout"), _NO_EFFECT),
}
"""vLLM's arguments that `vllm` cannot set, and why."""


class _ServerSettings(ProcessSettings):
    """Settings that servers of the policy and of a teacher have in common."""

    host: Annotated[str, BeforeValidator(lambda given: "0.0.0.0" if given is None else given)] = "127.0.0.1"
    """Address to listen on (null: all interfaces; then set an API key)."""
    port: Port = 8000
    """Port to listen on."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and computation; `auto` follows the checkpoint (default in a run: the trainer's)."""
    max_model_len: PositiveInt | None = None
    """Longest sequence in tokens, with the answer (null: the model's limit; in a run, `seq_len`)."""
    trust_remote_code: bool = False
    """Code in the checkpoint may run."""
    enforce_eager: bool = False
    """Runs the model without CUDA graphs."""
    tp: PositiveInt = 1
    """Tensor parallel degree."""
    dp: PositiveInt = 1
    """Data parallel degree."""
    enable_prefix_caching: bool | None = None
    """Reuses the KV cache of equal prefixes (null: vLLM's default)."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1), OnlyWith("device", "auto", "cuda")] = 0.9
    """Share of the GPU's memory for vLLM (default in a run on one GPU: what the trainer leaves, `grpo docs memory`)."""
    num_threads: Annotated[PositiveInt | None, OnlyWith("device", "auto", "cpu")] = None
    """Threads on a CPU (null: 1)."""
    reasoning_parser: str | None = None
    """vLLM's parser for reasoning in chat answers."""
    enable_auto_tool_choice: bool = False
    """Chat answers may call tools; needs `tool_call_parser` in `vllm`."""
    rope_scaling: dict[str, Any] | None = None
    """Replaces the model's rope scaling."""
    vllm: dict[str, Any] = {}
    """More arguments of vLLM's server, such as `max_num_seqs: 256`; defaults and those refused are in `grpo docs
    servers`."""

    def conflicts(self) -> Conflicts:
        for name in sorted(self.vllm.keys() & VLLM_REFUSED.keys()):
            yield f"vllm.{name}", f"is refused: {VLLM_REFUSED[name]}"
        for name in sorted(self.vllm):
            if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
                yield f"vllm.{name}", "is no argument of vLLM's, expected a name as max_num_seqs"
        drafting = self.vllm.get("speculative_config")
        if isinstance(drafting, dict) and drafting.get("rejection_sample_method") in ("synthetic", "fly"):
            yield "vllm.speculative_config", f"accepts drafts inexactly, which {_OTHER_TOKENS}"
        if self.enable_auto_tool_choice and "tool_call_parser" not in self.vllm:
            yield "enable_auto_tool_choice", "has no effect without vllm.tool_call_parser; set that too, or remove it"


class InferSettings(_ServerSettings, OnDevice, Shared):
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
    chat_template_kwargs: TemplateArguments = {}
    """Arguments of the chat template for chat requests, which may override them."""
    api_key_var: str = "VLLM_API_KEY"
    """Environment variable with the API key; if it is set, every route but /health asks for it."""
    enable_lora: bool = True
    """Policy versions are LoRA adapters, several at once. false: versions (`merged` or `full`) replace the weights, one
    at a time."""
    max_lora_rank: Annotated[PositiveInt | None, OnlyWith("enable_lora")] = None
    """Highest LoRA rank (null: 16), rounded up to one that vLLM knows."""
    max_loras: Annotated[int, Field(ge=2), OnlyWith("enable_lora")] = 10
    """Policy versions served at once; with `norm_noise` each counts twice (default in a run: `max_off_policy_steps` + 2
    for each adapter)."""
    max_cpu_loras: Annotated[PositiveInt, OnlyWith("enable_lora")] = 100
    """Policy versions kept in main memory."""
    norm_noise: Annotated[bool, OnlyWith("enable_lora")] = False
    """Also serves versions with noise on their norm weights (the trainer's `noise_scheduler.enabled`)."""
    base_quantization: Annotated[Quantization | None, OnlyWith("enable_lora")] = None
    """The base has the quantized values of a trainer with `qlora_bnb` (nf4), `qlora_fp8` or `qlora_fp4` (nvfp4); see
    `grpo docs quantization`."""
    weight_broadcast_type: Literal["filesystem", "http", "nccl"] = "filesystem"
    """As the trainer's `weight_broadcast.type`."""
    weight_broadcast_url: Annotated[str | None, OnlyWith("weight_broadcast_type", "http")] = None
    """Where the orchestrator serves versions, such as `http://10.0.0.5:5556`."""
    weight_broadcast_key_var: Annotated[str, OnlyWith("weight_broadcast_type", "http")] = "GRPO_TRANSPORT_KEY"
    """Environment variable with the key (if unset, that in `output_dir`)."""
    canary_tolerance: float | None = Field(default=None, gt=0, le=1)
    """Allowed difference of the canary from the trainer's, in nats (null: as in `grpo docs versions`)."""
    canary_timeout_s: Seconds = 120.0
    """Seconds that loading and proving a version, falling asleep or waking may take."""

    def conflicts(self) -> Conflicts:
        yield from super().conflicts()
        if self.max_loras > self.max_cpu_loras:
            yield "max_loras", f"must not exceed max_cpu_loras = {self.max_cpu_loras}"
        if self.colocate and not self.enable_lora:
            yield "colocate", "needs enable_lora: true: versions must not replace weights that are shared"
        if self.colocate and (self.tp > 1 or (self.dp > 1 and self.device == "cpu")):
            yield "colocate", "lends whole weights, on a CPU one copy of them; set tp: 1, and dp: 1 on a CPU"
        if self.sleep_mode and (self.device == "cpu" or self.weight_broadcast_type == "nccl"):
            yield "sleep_mode", "needs one GPU, where vLLM can sleep: no CPU, and weight_broadcast_type: filesystem"
        if self.weight_broadcast_type == "http" and not self.weight_broadcast_url:
            yield "weight_broadcast_url", "must be given with weight_broadcast_type: http, as http://10.0.0.5:5556"
        if self.weight_broadcast_type == "http" and self.base_quantization is not None:
            why = "the values of the trainer's quantized base lie in the run's folder, and do not travel over HTTP"
            yield "base_quantization", f"{why}; set weight_broadcast_type: filesystem, or a plain base"
        if self.weight_broadcast_type == "nccl" and (self.enable_lora or self.device == "cpu"):
            yield "weight_broadcast_type", "nccl receives whole matrices by GPUs; set enable_lora: false, and no CPU"


class TeacherServerSettings(_ServerSettings):
    """The `grpo-infer` that serves a teacher. Open settings follow from the run."""

    role: ClassVar[str] = "teacher"
    env_prefix: ClassVar[str] = "GRPO_TEACHER_"

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute (default: as the policy's server)."""
    seed: Seed = 42
    """Seed of the engine's sampler."""

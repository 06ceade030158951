"""Translates our settings into the command line of vLLM's own server, parsed by its own parser; and what vLLM reads
from the environment while it is imported."""

import importlib
import json
import os
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NoReturn

from grpo.configs.facts import model_facts
from grpo.configs.infer import InferSettings
from grpo.infer import engine_process
from grpo.infer.checks import tensor_shapes

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts as the largest rank."""
DEFAULT_LORA_RANK = 16
MERGED_MODULES = ("qkv_proj", "gate_up_proj", "w13", "in_proj_qkvz", "in_proj_ba", "in_proj_qkvg")
"""Names of layers that vLLM merges from several of a checkpoint's."""
ON_CPU: dict[str, Any] = {
    "max_num_seqs": 256,
    "max_num_batched_tokens": 2048,
    "kv_cache_memory_bytes": 128 * 2**20,
    "enforce_eager": True,
    "distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
}
"""Defaults of vLLM's arguments on a CPU; the cache is larger where two of the longest sequences need more."""
BLOCK_SIZE_ON_CPU = 32
"""The smallest blocks of the cache that vLLM's kernel takes: a group's samples share the whole blocks of their prompt.
vLLM's engine ends over those of a model with Mamba's states, for which it computes others."""


class ArgumentError(ValueError):
    """Settings that the installed vLLM cannot honour."""


def first_module(*names: str) -> Any:
    """Returns the first of several modules that this vLLM has; raises ImportError if none."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not name.startswith(str(error.name)):
                raise
    raise ImportError(f"this vLLM has none of {', '.join(names)}; versions 0.26 to 0.33 are supported")


def prepare_environment() -> None:
    """Sets what vLLM reads from the environment while it is imported: development routes stay closed, usage reports
    stay home, and nothing is looked for on the network."""
    for name in ("VLLM_CPU_KVCACHE_SPACE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_SERVER_DEV_MODE", "VLLM_API_KEY"):
        os.environ.pop(name, None)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.environ[engine_process.METHOD] = "spawn"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # One of vLLM's dependencies silences all loggers below this level as soon as it is imported, ours too.
    os.environ.setdefault("SAGEMAKER_CONTAINER_LOG_LEVEL", "INFO")
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")  # vLLM leaves semaphores to it at exit


def vllm_version() -> str:
    """Returns vLLM's version, for example `0.32.0`."""
    return str(importlib.import_module("vllm").__version__)


def device_of(settings: InferSettings) -> Literal["cpu", "cuda"]:
    """Returns where this vLLM computes. Raises `ArgumentError` for settings that it cannot honour there."""
    platform = importlib.import_module("vllm.platforms").current_platform
    device: Literal["cpu", "cuda"] = "cpu" if platform.is_cpu() else "cuda"
    if settings.device not in ("auto", device):
        raise ArgumentError(
            f"device is {settings.device}, but the installed vLLM {vllm_version()} runs on {device}; set device: "
            f"{device}, or install the other build"
        )
    if settings.weight_broadcast_type == "nccl":
        nccl = "vllm.distributed.weight_transfer.nccl_engine"
        if device == "cpu" or not hasattr(importlib.import_module(nccl), "NCCLTrainerInitInfo"):
            what = f"this vLLM {vllm_version()} runs on a {device} device; it needs a GPU and vLLM 0.28 or later"
            raise ArgumentError(f"weight_broadcast_type: nccl receives from GPU to GPU, and {what}")
    if device == "cpu" and settings.sleep_mode:
        raise ArgumentError("sleep_mode: vLLM sleeps on a GPU only, and this vLLM runs on a CPU; remove it")
    if device == "cpu" and settings.colocate and settings.dp > 1:
        raise ArgumentError(
            f"colocate shares one copy on a CPU, and dp = {settings.dp} servers have one each; set dp: 1"
        )
    return device


def checkpoint_dtype(model_dir: Path) -> str:
    """Returns the checkpoint's own type by its config.json (`float32`, …), or `auto` where it names none."""
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    return str(config.get("dtype") or config.get("torch_dtype") or "auto").removeprefix("torch.")


def served_rank(settings: InferSettings) -> int:
    """Returns the largest LoRA rank, rounded up to one that vLLM knows; above those, vLLM's parser refuses it."""
    wanted = settings.max_lora_rank or DEFAULT_LORA_RANK
    return next((rank for rank in LORA_RANKS if rank >= wanted), wanted)


def lora_modules(model_dir: Path) -> list[str]:
    """Returns the names of the linear layers that can carry an adapter: those of the checkpoint's decoder layers, and
    of vLLM's merged layers. The head is left out: with LoRA around it, `prompt_logprobs` for two requests at once end
    the engine on a CPU."""
    weights = [name.split(".") for name, shape in tensor_shapes(model_dir).items() if len(shape) == 2]
    own = {parts[-2] for parts in weights if parts[-1] == "weight" and "layers" in parts}
    return sorted(own.union(MERGED_MODULES))


def own_arguments(settings: InferSettings, *, model_dir: Path, device: str) -> dict[str, Any]:
    """Returns vLLM's arguments that follow from our own settings; None stands for vLLM's default."""
    overrides: dict[str, Any] = {"head_dtype": "float32"} if settings.fp32_lm_head else {}
    if settings.rope_scaling:
        overrides["rope_scaling"] = settings.rope_scaling
    lora = {
        "enable_lora": True,
        "max_lora_rank": served_rank(settings),
        "max_loras": settings.max_loras,
        "max_cpu_loras": settings.max_cpu_loras,
        "lora_target_modules": lora_modules(model_dir),
    }
    return {
        "model": str(model_dir),
        "served_model_name": settings.model,
        "host": settings.host,
        "port": settings.port,
        "dtype": checkpoint_dtype(model_dir) if settings.dtype == "auto" else settings.dtype,
        "seed": settings.seed,
        "max_model_len": settings.max_model_len,
        "gpu_memory_utilization": None if device == "cpu" else settings.gpu_memory_utilization,
        "enforce_eager": settings.enforce_eager or None,
        "tensor_parallel_size": settings.tp,
        "data_parallel_size": settings.dp,
        "trust_remote_code": settings.trust_remote_code or None,
        "enable_prefix_caching": settings.enable_prefix_caching,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "scheduling_policy": "priority",
        "worker_extension_cls": f"grpo.infer.{'noise.Noisy' if settings.norm_noise else 'worker.'}PolicyWorker",
        "default_chat_template_kwargs": settings.chat_template_kwargs or None,
        "reasoning_parser": settings.reasoning_parser,
        "enable_auto_tool_choice": settings.enable_auto_tool_choice or None,
        "hf_overrides": overrides or None,
        "weight_transfer_config": {"backend": "nccl"} if settings.weight_broadcast_type == "nccl" else None,
        "enable_sleep_mode": settings.sleep_mode or None,
        "worker_cls": "grpo.infer.sleep_worker.CacheSleepWorker" if settings.sleep_mode and settings.colocate else None,
    } | (lora if settings.enable_lora else {})


def device_defaults(settings: InferSettings, model_dir: Path, device: str) -> dict[str, Any]:
    """Returns defaults of vLLM's arguments for the device, which `vllm` may overrule.

    On a GPU the kernels of adapters are launched for those in use, not for all `max_loras`, where this vLLM can.
    """
    if device != "cpu":
        config = importlib.import_module("vllm.config").LoRAConfig
        specializes = settings.enable_lora and hasattr(config, "specialize_active_lora")
        return {"specialize_active_lora": True} if specializes else {}
    if (model := model_facts(str(model_dir))) is None:
        return ON_CPU
    size = 4 if "float32" in (settings.dtype, checkpoint_dtype(model_dir) if settings.dtype == "auto" else "") else 2
    longest = 2 * (settings.max_model_len or model.positions or 0) * model.cache_values * size
    blocks = {"block_size": BLOCK_SIZE_ON_CPU} if model.only_attends else {}
    return ON_CPU | blocks | {"kv_cache_memory_bytes": max(ON_CPU["kv_cache_memory_bytes"], longest)}


def command_line(values: dict[str, Any]) -> Iterator[str]:
    """Yields the words for these arguments; those that are None are left out."""
    for name, value in values.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{'' if value else 'no-'}{option}"
        elif isinstance(value, list | tuple):
            yield from (f"--{option}", *map(str, value))
        elif value is not None:
            yield from (f"--{option}", json.dumps(value) if isinstance(value, dict) else str(value))


def make_args(settings: InferSettings, *, model_dir: Path, device: str) -> Namespace:
    """Returns the parsed arguments of vLLM's own server that our settings stand for. Raises `ArgumentError` where
    vLLM's parser refuses what is in `vllm`."""
    at_first, later = "vllm.entrypoints.openai.cli_args", "vllm.entrypoints.launchers.cli_args"
    cli_args = first_module("vllm.entrypoints.common.cli_args", later, at_first)
    base: type[Any] = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser

    class Parser(base):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise ArgumentError(f"vllm: {message}; the arguments are those of vLLM {vllm_version()}'s `vllm serve`")

    given = own_arguments(settings, model_dir=model_dir, device=device)
    own = {name: value for name, value in given.items() if value is not None}
    values = device_defaults(settings, model_dir, device) | settings.vllm | own
    args: Namespace = cli_args.make_arg_parser(Parser(allow_abbrev=False)).parse_args(list(command_line(values)))
    try:
        cli_args.validate_parsed_serve_args(args)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"vllm: {error}") from error
    plain_weights = settings.colocate and device == "cpu"
    args.additional_config = engine_process.FollowServer(os.getpid(), settings.norm_noise, plain_weights)
    return args

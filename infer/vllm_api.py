"""The one place that knows vLLM's API, 0.24 to 0.32: arguments, the embedded OpenAI server, and the engine.

Everything else in `infer/` sees `Engine`, `Adapter` and plain numbers. vLLM is imported inside functions: the import
takes seconds, and reads environment variables that `prepare_environment` sets first.
"""

import asyncio
import contextlib
import importlib
import json
import logging
import math
import os
import socket
from argparse import Namespace
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from configs.infer import InferSettings
from infer import engine_process, score_temperature
from infer.adapters import tensor_shapes
from infer.engine_process import FollowServer
from transport.http import Choice, ServerLoad
from transport.weights.nccl import Announcement

log = logging.getLogger(__name__)

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts as the largest rank."""
DEFAULT_LORA_RANK = 16
LORA_MODULES = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("qkv_proj", "gate_up_proj"),
)
"""The linear layers that can carry an adapter, by the checkpoint's names and by those of vLLM's merged layers.

Named so that vLLM leaves the head alone: with LoRA around the head, `prompt_logprobs` for two requests at once end
the engine on a CPU.
"""
CPU_KV_CACHE_BYTES = 128 * 1024 * 1024
CPU_MAX_NUM_SEQS = 64
CPU_MAX_NUM_BATCHED_TOKENS = 2048
ENGINE_CHECK_S = 1.0
ABORT_AGAIN_S = 0.05
"""After which a request that should have ended is told so again: vLLM forgets it where the request is still on its way
into the engine."""


class EngineError(RuntimeError):
    """The engine cannot be built as asked, has ended, or returned something that is no answer."""


class EngineEnded(EngineError):
    """The engine's process has ended by itself."""


class AdapterRejected(ValueError):
    """vLLM itself refused an adapter that had passed our checks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA adapter on disk as vLLM knows it. `key` is unique for the engine's life; a name may come again."""

    name: str
    key: int
    path: str
    noisy: bool = False
    """Together with the noise in its folder on the norm weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRequest:
    """What to sample: `n` answers of at most `max_tokens` tokens to one prompt of token ids."""

    prompt_token_ids: list[int]
    n: int
    max_tokens: int
    min_tokens: int
    temperature: float
    seed: int | None
    stop_token_ids: list[int]
    cache_salt: str | None


_GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


def _first_module(*names: str) -> Any:
    """The first of several modules that this vLLM has; ImportError if none."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not name.startswith(str(error.name)):
                raise
    raise ImportError(f"this vLLM has none of {', '.join(names)}; versions 0.24 to 0.32 are supported")


def _launcher() -> Any:
    """Module with `build_async_engine_client`."""
    return _first_module("vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.openai.api_server")


def prepare_environment() -> None:
    """Set what vLLM reads from the environment while it is imported.

    Development and adapter-loading routes stay closed, usage reports stay home, and no file is looked for on the
    network, whatever the caller's environment says.
    """
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


def version() -> str:
    """vLLM's version, for example `0.32.0`."""
    return str(importlib.import_module("vllm").__version__)


def device_of(settings: InferSettings) -> Literal["cpu", "cuda"]:
    """Where this vLLM computes. Raises EngineError if the settings ask for the other."""
    platform = importlib.import_module("vllm.platforms").current_platform
    device: Literal["cpu", "cuda"] = "cpu" if platform.is_cpu() else "cuda"
    if settings.device not in ("auto", device):
        raise EngineError(
            f"device is {settings.device}, but the installed vLLM {version()} runs on {device}; "
            f"set device: {device}, or install the other build"
        )
    return device


def checkpoint_dtype(model_dir: Path) -> str:
    """The checkpoint's own type by its config.json (`float32`, …), or `auto` where it names none."""
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    return str(config.get("dtype") or config.get("torch_dtype") or "auto").removeprefix("torch.")


def served_rank(settings: InferSettings) -> int:
    """The largest LoRA rank, rounded up to one that vLLM knows. Raises EngineError above the largest of those."""
    asked = settings.max_lora_rank or DEFAULT_LORA_RANK
    fitting = [rank for rank in LORA_RANKS if rank >= asked]
    if not fitting:
        raise EngineError(f"max_lora_rank is {asked}, vLLM serves at most {LORA_RANKS[-1]}; lower it")
    return fitting[0]


def _arguments(settings: InferSettings, model_dir: Path, device: str) -> dict[str, object]:
    """Long options of `vllm serve` and their values; True stands for a bare flag, None for leaving it out."""
    cpu = device == "cpu"
    dtype = checkpoint_dtype(model_dir) if settings.dtype == "auto" else settings.dtype
    return {
        "model": str(model_dir),
        "served-model-name": settings.model,
        "host": settings.host,
        "port": settings.port,
        "dtype": dtype,
        "seed": settings.seed,
        "max-model-len": settings.max_model_len,
        "max-num-seqs": settings.max_num_seqs or (CPU_MAX_NUM_SEQS if cpu else None),
        "max-num-batched-tokens": settings.max_num_batched_tokens or (CPU_MAX_NUM_BATCHED_TOKENS if cpu else None),
        "kv-cache-memory-bytes": settings.kv_cache_memory_bytes or (CPU_KV_CACHE_BYTES if cpu else None),
        "gpu-memory-utilization": None if cpu else settings.gpu_memory_utilization,
        "enforce-eager": True if cpu or settings.enforce_eager else None,
        "tensor-parallel-size": settings.tp,
        "data-parallel-size": settings.dp,
        "trust-remote-code": settings.trust_remote_code or None,
        "logprobs-mode": "processed_logprobs",
        "generation-config": "vllm",
        "scheduling-policy": "priority",
        "worker-extension-cls": f"infer.{'noisy_worker.Noisy' if settings.norm_noise else 'worker.'}PolicyWorker",
        "reasoning-parser": settings.reasoning_parser,
        "enable-auto-tool-choice": settings.enable_auto_tool_choice or None,
        "tool-call-parser": settings.tool_call_parser,
        "hf-overrides": json.dumps({"rope_scaling": settings.rope_scaling}) if settings.rope_scaling else None,
        "weight-transfer-config": '{"backend": "nccl"}' if settings.weight_broadcast_type == "nccl" else None,
        "distributed-executor-backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor" if cpu else None,
        "enable-sleep-mode": settings.sleep_mode or None,
        "worker-cls": "infer.sleep_worker.CacheSleepWorker" if settings.sleep_mode and settings.colocate else None,
    }


def _command_line(settings: InferSettings, model_dir: Path, device: str) -> list[str]:
    words = []
    for option, value in _arguments(settings, model_dir, device).items():
        if value is not None:
            words += [f"--{option}"] if value is True else [f"--{option}", str(value)]
    if settings.enable_prefix_caching is not None:
        words.append(f"--{'' if settings.enable_prefix_caching else 'no-'}enable-prefix-caching")
    if settings.enable_lora:
        words += ["--enable-lora", "--max-lora-rank", str(served_rank(settings))]
        words += ["--max-loras", str(settings.max_loras), "--max-cpu-loras", str(settings.max_cpu_loras)]
        words += ["--lora-target-modules", *LORA_MODULES]
    return words


def make_args(settings: InferSettings, *, model_dir: Path, device: str) -> Namespace:
    """The parsed arguments of vLLM's own server that our settings stand for."""
    cli_args = _first_module("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
    argparse_utils = _first_module("vllm.utils.argparse_utils", "vllm.utils")
    parser = cli_args.make_arg_parser(argparse_utils.FlexibleArgumentParser())
    args: Namespace = parser.parse_args(_command_line(settings, model_dir, device))
    cli_args.validate_parsed_serve_args(args)
    plain_weights = settings.colocate and device == "cpu"
    args.additional_config = FollowServer(os.getpid(), settings.norm_noise, plain_weights)
    return args


class Engine:
    """The running engine: sampling, scoring and adapters in plain types."""

    def __init__(self, client: Any, *, device: str, model_dir: Path) -> None:
        self._client = client
        self._model_dir = model_dir
        self._num_requests = 0
        self._in_group = False
        self.device = device
        self.max_model_len = int(client.model_config.max_model_len)
        self.vocab_size = int(client.model_config.get_vocab_size())
        self.noisy_norms: Mapping[str, int] = {}
        """Norm weights that can carry noise, by the checkpoint's names, and their sizes."""
        self.scores_at_temperatures = False
        """Whether `score` can be asked for another temperature than 1."""
        self.shared_bytes = 0
        """Of the base weights that trainers can import."""
        self.torch_dtype = client.model_config.dtype
        self.dtype = str(self.torch_dtype).removeprefix("torch.")

    @property
    def dead(self) -> bool:
        """Whether the engine has ended and cannot answer any more."""
        return bool(self._client.errored)

    def load(self) -> ServerLoad:
        """What it has to do now, by vLLM's own published metrics, which /metrics has too. Costs microseconds."""
        from prometheus_client import REGISTRY

        values: dict[str, list[float]] = {name: [0.0] for name in _GAUGES}
        for family in REGISTRY.restricted_registry(_GAUGES).collect():
            values[family.name] += [sample.value for sample in family.samples]
        running, waiting, kv_use = (values[name] for name in _GAUGES)
        return ServerLoad(num_running=int(sum(running)), num_waiting=int(sum(waiting)), kv_use=max(kv_use))

    async def generate(self, request: SamplingRequest, adapter: Adapter | None) -> list[Choice]:
        """Sample under the adapter (None: the base model). Cancelling the call ends the sampling."""
        salt = _salt(request.cache_salt, adapter)
        result = await self._final(request.prompt_token_ids, _sampling_params(request), adapter, salt)
        return [_sampled(output) for output in sorted(result.outputs, key=lambda output: int(output.index))]

    async def generate_until(
        self, requests: Sequence[SamplingRequest], adapter: Adapter | None, superseded: asyncio.Event
    ) -> list[Choice]:
        """One answer to each request (n = 1) under the adapter. Those that run when `superseded` is set end there, with
        what they have. Cancelling the call ends the sampling."""
        names = [self._next_name() for _ in requests]
        sampling = [
            asyncio.ensure_future(self._one_until(request, adapter, superseded, name))
            for request, name in zip(requests, names, strict=True)
        ]
        all_sampled, must_end = asyncio.gather(*sampling), asyncio.ensure_future(superseded.wait())
        try:
            await asyncio.wait((all_sampled, must_end), return_when=asyncio.FIRST_COMPLETED)
            while not all_sampled.done():
                async with while_alive(self):
                    await self._client.abort(names)
                await asyncio.wait((all_sampled,), timeout=ABORT_AGAIN_S)
            return all_sampled.result()
        finally:
            for task in (must_end, *sampling):
                task.cancel()
            await asyncio.gather(must_end, all_sampled, *sampling, return_exceptions=True)

    async def _one_until(
        self, request: SamplingRequest, adapter: Adapter | None, superseded: asyncio.Event, name: str
    ) -> Choice:
        prompt, salt = request.prompt_token_ids, _salt(request.cache_salt, adapter)
        result = await self._final(prompt, _sampling_params(request), adapter, salt, name=name, may_end=superseded)
        return _sampled(result.outputs[0])

    async def score(
        self, token_ids: Sequence[int], adapter: Adapter | None, *, temperature: float = 1.0, priority: int = 0
    ) -> list[float]:
        """Log-probabilities [L - 1] in nats of tokens 1 … L-1, each given those before it, at the temperature.

        A lower `priority` is scheduled before waiting requests of a higher one; requests have 0.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args=None if temperature == 1.0 else {score_temperature.KEY: temperature},
        )
        result = await self._final(list(token_ids), params, adapter, None, priority=priority)
        return _checked(result.prompt_logprobs.logprobs, len(token_ids) - 1)

    def _next_name(self) -> str:
        self._num_requests += 1
        return f"policy-{self._num_requests}"

    async def _final(
        self,
        prompt: list[int],
        params: Any,
        adapter: Adapter | None,
        salt: str | None,
        *,
        priority: int = 0,
        name: str | None = None,
        may_end: asyncio.Event | None = None,
    ) -> Any:
        """vLLM's only output of a request in FINAL_ONLY mode; an incomplete one only once `may_end` is set."""
        final = None
        async with while_alive(self):
            async for output in self._client.generate(
                {"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})},
                params,
                request_id=name or self._next_name(),
                lora_request=_lora_request(adapter) if adapter else None,
                priority=priority,
            ):
                final = output
        ends = ("stop", "length", "abort") if may_end is not None and may_end.is_set() else ("stop", "length")
        if final is None or any(output.finish_reason not in ends for output in final.outputs):
            raise (EngineEnded if self.dead else EngineError)("the engine ended the request without an answer")
        return final

    async def add_adapter(self, adapter: Adapter) -> None:
        """Load an adapter into the engine. Raises AdapterRejected with vLLM's reason."""
        async with while_alive(self):
            try:
                if adapter.noisy:
                    await self._client.collective_rpc("load_norm_noise", args=(adapter.key, adapter.path))
                await self._client.add_lora(_lora_request(adapter))
            except Exception as error:
                if self.dead:
                    raise
                raise AdapterRejected(str(error)) from error

    async def remove_adapter(self, adapter: Adapter) -> None:
        """Take an adapter out of the engine; without effect if it is not in it."""
        async with while_alive(self):
            await self._client.remove_lora(adapter.key)
            if adapter.noisy:
                await self._client.collective_rpc("drop_norm_noise", args=(adapter.key,))

    async def forget_prefixes(self) -> None:
        """Empty the prefix cache, so that a name or path that comes again with other weights reuses nothing."""
        async with while_alive(self):
            await self._client.reset_prefix_cache()

    async def load_weights(self, folder: Path | None) -> None:
        """Replace the model's weights, in every worker, by those in a version's folder (None: the base model's).

        The engine first comes to the end of all its requests, those of the chat routes too, and empties its caches;
        what arrives meanwhile waits. Raises EngineError.
        """
        path = None if folder is None else str(folder)
        async with self._paused():
            await self._client.collective_rpc("load_policy_weights", args=(path, str(self._model_dir)))

    async def receive_weights(self, announcement: Announcement, *, rank_offset: int) -> None:
        """Replace the model's weights, in every worker, by what the trainer broadcasts; otherwise as `load_weights`.

        This server's workers are the ranks from `rank_offset` on. Not yet run on a GPU. Raises EngineError.
        """
        base = importlib.import_module("vllm.distributed.weight_transfer.base")
        where = announcement.rendezvous
        async with self._paused():
            if not self._in_group:
                await self._client.init_weight_transfer_engine(
                    base.WeightTransferInitRequest(
                        init_info={
                            "master_address": where.host,
                            "master_port": where.port,
                            "rank_offset": rank_offset,
                            "world_size": where.world_size,
                            "packed": True,
                        }
                    )
                )
                self._in_group = True
            await self._client.start_weight_update()
            await self._client.update_weights(
                base.WeightTransferUpdateRequest(
                    update_info={
                        "names": list(announcement.names),
                        "dtype_names": list(announcement.dtypes),
                        "shapes": [list(shape) for shape in announcement.shapes],
                    }
                )
            )
            await self._client.finish_weight_update()

    @contextlib.asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Within it the engine has no requests and empty caches, and its weights may change."""
        async with while_alive(self):
            await self._client.pause_generation(mode="wait", clear_cache=True)
            try:
                yield
            except Exception as error:
                raise EngineError(f"vLLM could not load the weights: {error}") from error
            finally:
                await self._client.resume_generation()

    async def supported_tasks(self) -> Any:
        """What vLLM's application asks for."""
        async with while_alive(self):
            return await self._client.get_supported_tasks()

    async def warm_up(self) -> None:
        """Answer one request, which takes a second or two the first time and milliseconds from then on."""
        await self.score([0, 0], None)

    async def install_grouped_lora(self) -> None:
        """Replace vLLM's LoRA product on a CPU by ours, in every worker. Raises EngineError if it took no effect."""
        async with while_alive(self):
            num_layers = await self._client.collective_rpc("install_grouped_lora")
        if not num_layers or not all(num_layers):
            raise EngineError(f"our LoRA product serves {num_layers} layers per worker, expected some in each")
        log.info("LoRA on CPU: %s layers use the grouped product", num_layers[0])

    async def install_score_temperature(self) -> None:
        """Let sequences be scored at any temperature, where this vLLM's workers are known. Proved by its effect."""
        async with while_alive(self):
            installed = all(await self._client.collective_rpc("install_score_temperature"))
        if installed and await self.score([0, 1], None) != await self.score([0, 1], None, temperature=2.0):
            self.scores_at_temperatures = True
        else:
            log.warning("vLLM %s: sequences can be scored at temperature 1 only", version())

    async def export_base_weights(self, output_dir: Path, base_model: str) -> None:
        """Offer the base weights, in every worker, to the trainers of the run in `output_dir` on its device.

        `base_model` is their identity. Raises EngineError where they cannot be shared as the checkpoint has them.
        """
        async with while_alive(self):
            try:
                args = (str(output_dir), str(self._model_dir), base_model)
                found = await self._client.collective_rpc("export_base_weights", args=args)
            except Exception as error:
                raise EngineError(f"colocate: the base weights cannot be shared: {error}") from error
        self.shared_bytes = found[0]
        log.info("base weights: %d bytes are shared with the run's trainer", self.shared_bytes)

    async def sleep(self) -> None:
        """Frees the GPU's memory once all requests are answered; those that come later wait for `wake`. Raises
        EngineError. Not yet run on a GPU.

        The KV cache is discarded, and weights and adapters move to main memory, unless they are shared
        (`CacheSleepWorker`). That is vLLM's level 1; level 2 would lose the adapters.
        """
        async with self._changing("the engine cannot sleep"):
            await self._client.sleep(level=1, mode="wait")

    async def wake(self) -> None:
        """Takes the memory again, and goes on. Raises EngineError."""
        async with self._changing("the engine cannot wake; is the GPU's memory free?"):
            await self._client.wake_up()

    @contextlib.asynccontextmanager
    async def _changing(self, failed: str) -> AsyncIterator[None]:
        async with while_alive(self):
            try:
                yield
            except Exception as error:
                raise EngineError(f"{failed}: {error}") from error

    async def install_ranks(self) -> None:
        """Let ranks of tokens be counted on a CPU, in every worker, without a compiler."""
        async with while_alive(self):
            if not all(await self._client.collective_rpc("install_ranks")):
                log.info("vLLM %s: torch compiles the function that counts the ranks of tokens", version())

    async def install_restored_generators(self) -> None:
        """Let requests with a seed be sampled on a CPU, in every worker, whose prompts are read in parts."""
        async with while_alive(self):
            await self._client.collective_rpc("install_restored_generators")

    async def install_norm_noise(self) -> None:
        """Prepare the norms for noise, in every worker. Raises EngineError where the model cannot carry it."""
        candidates = [name for name, shape in tensor_shapes(self._model_dir).items() if len(shape) == 1]
        async with while_alive(self):
            try:
                found = await self._client.collective_rpc("install_norm_noise", args=(candidates,))
            except Exception as error:
                raise EngineError(f"noise on the norm weights cannot be served: {error}") from error
        if any(norms != found[0] for norms in found):
            raise EngineError("noise on the norm weights cannot be served: the workers have different norms")
        self.noisy_norms = found[0]
        log.info("noise: %d norms can carry it", len(self.noisy_norms))


def _sampling_params(request: SamplingRequest) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=request.n,
        max_tokens=request.max_tokens,
        min_tokens=request.min_tokens,
        temperature=request.temperature,
        seed=request.seed,
        stop_token_ids=request.stop_token_ids,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _salt(salt: str | None, adapter: Adapter | None) -> str | None:
    """What tells prefixes in vLLM's cache apart: a version may come again under its name with other weights, while
    requests of the earlier one still add to the cache."""
    return salt if adapter is None else f"{adapter.name}/{adapter.key}/{salt or ''}"


def _lora_request(adapter: Adapter) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(adapter.name, adapter.key, adapter.path)


def _checked(logprobs: Sequence[float], num_expected: int) -> list[float]:
    """The log-probabilities as a list. Raises EngineError if there are too few or too many, or one is not finite."""
    if len(logprobs) != num_expected:
        raise EngineError(f"the engine returned {len(logprobs)} log-probabilities, expected {num_expected}")
    if not all(map(math.isfinite, logprobs)):
        raise EngineError("the engine returned a log-probability that is not finite")
    return list(logprobs)


def _sampled(output: Any) -> Choice:
    """Our record of one of vLLM's CompletionOutputs."""
    token_ids = list(output.token_ids)
    return Choice(
        token_ids=token_ids,
        logprobs=_checked(output.logprobs.logprobs, len(token_ids)),
        finish_reason="superseded" if output.finish_reason == "abort" else output.finish_reason,
        stop_reason=token_ids[-1] if output.finish_reason == "stop" else None,
    )


class ChatModels:
    """Names under which vLLM's own OpenAI routes reach adapters."""

    def __init__(self, serving_models: Any) -> None:
        self._requests: dict[str, Any] = serving_models.lora_requests
        self._models: list[Any] = serving_models.base_model_paths

    def offer(self, name: str, adapter: Adapter) -> None:
        """Let `model: name` mean this adapter."""
        self._requests[name] = _lora_request(adapter)

    def withdraw(self, adapter: Adapter) -> None:
        """Take back every name of this adapter."""
        for name in [name for name, request in self._requests.items() if request.lora_int_id == adapter.key]:
            del self._requests[name]

    def rename(self, names: Sequence[str]) -> None:
        """Let these names mean the model itself, besides its own, which is the first."""
        own = self._models[0]
        self._models[1:] = [type(own)(name=name, model_path=own.model_path) for name in names]


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """vLLM's OpenAI application around a running engine, not yet served."""

    app: Any
    engine: Engine
    chat_models: ChatModels


@contextlib.asynccontextmanager
async def _forked_engine(args: Namespace) -> AsyncIterator[Any]:
    """vLLM's client of an engine whose process is forked from this one, where that can be; else it is started anew."""
    engine_args = importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs

    class Forked(engine_args):  # type: ignore[misc, valid-type]
        """vLLM's arguments; its configuration for a CPU asks for `spawn`, whatever it was before."""

        def create_engine_config(self, *args: Any, **kwargs: Any) -> Any:
            config = super().create_engine_config(*args, **kwargs)
            if not config.model_config.is_multimodal_model:  # pictures may be prepared, by threads, before the fork
                engine_process.choose_fork()
            return config

    async with _launcher().build_async_engine_client_from_engine_args(Forked.from_cli_args(args)) as client:
        os.environ[engine_process.METHOD] = "spawn"
        yield client


@contextlib.asynccontextmanager
async def embedded(settings: InferSettings, *, model_dir: Path, sock: socket.socket) -> AsyncIterator[Embedded]:
    """Start the engine in its own process and build vLLM's application; the engine ends with the context.

    `sock` is where the server will listen, which its engine must not hold. Raises EngineError if the settings ask for
    what this vLLM cannot do.
    """
    device = device_of(settings)
    if device == "cpu" and settings.weight_broadcast_type == "nccl":
        raise EngineError("weight_broadcast_type: nccl receives from GPU to GPU, and this vLLM runs on a CPU")
    if device == "cpu" and settings.sleep_mode:
        raise EngineError("sleep_mode: vLLM sleeps on a GPU only, and this vLLM runs on a CPU; remove it")
    if device == "cpu" and settings.colocate and settings.dp > 1:
        raise EngineError(f"colocate shares one copy on a CPU, and dp = {settings.dp} servers have one each; set dp: 1")
    args = make_args(settings, model_dir=model_dir, device=device)
    app_module = _first_module("vllm.entrypoints.launchers.app", "vllm.entrypoints.openai.api_server")
    state_module = _first_module(
        "vllm.entrypoints.launchers.api_server.app_state", "vllm.entrypoints.openai.api_server"
    )
    args.additional_config.at_forks([sock])
    one_on_cpu = device == "cpu" and settings.tp == settings.dp == 1
    start = _forked_engine if one_on_cpu else _launcher().build_async_engine_client
    async with start(args) as client:
        engine = Engine(client, device=device, model_dir=model_dir)
        tasks = await engine.supported_tasks()
        app = app_module.build_app(args, tasks, client.model_config)
        await state_module.init_app_state(client, app.state, args, tasks)
        if device == "cpu":
            await engine.install_restored_generators()
            await engine.install_ranks()
        if device == "cpu" and settings.enable_lora:
            await engine.install_grouped_lora()
        if settings.norm_noise:
            await engine.install_norm_noise()
        await engine.warm_up()
        await engine.install_score_temperature()
        yield Embedded(app=app, engine=engine, chat_models=ChatModels(app.state.openai_serving_models))


class Mortal(Protocol):
    """What of the engine is needed to wait with it."""

    @property
    def dead(self) -> bool:
        """Whether it has ended and cannot answer any more."""


async def until_dead(engine: Mortal) -> None:
    """Returns when the engine has ended by itself. Waits for nothing else; ends by being cancelled."""
    while not engine.dead:  # noqa: ASYNC110 - vLLM has no event for it
        await asyncio.sleep(ENGINE_CHECK_S)


@contextlib.asynccontextmanager
async def while_alive(engine: Mortal) -> AsyncIterator[None]:
    """Within it every error of an engine that has ended, and every wait, becomes EngineEnded, and so does the beginning
    where that is so already. What vLLM has asked an engine that ends before it answers, it would wait for for ever.
    """
    if engine.dead:
        raise EngineEnded("vLLM's engine process has ended")

    async def expire(wait: asyncio.Timeout) -> None:
        await until_dead(engine)
        wait.reschedule(0.0)

    try:
        async with asyncio.timeout(None) as wait:
            watch = asyncio.create_task(expire(wait))
            try:
                yield
            finally:
                watch.cancel()
    except Exception as error:
        if engine.dead and not isinstance(error, EngineEnded):
            raise EngineEnded(": ".join(filter(None, ("vLLM's engine process has ended", str(error))))) from error
        raise

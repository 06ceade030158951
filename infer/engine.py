"""The engine: sampling, scoring, adapters and weights in plain types, over vLLM 0.26 to 0.33.

What follows in vLLM's own process is in `worker.py`, its command line in `arguments.py`. vLLM is imported inside
functions: the import takes seconds, and reads environment variables that `arguments.prepare_environment` sets first.
"""

import asyncio
import contextlib
import importlib
import itertools
import logging
import math
import multiprocessing.connection
import os
import re
import secrets
import signal
import socket
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from grpo.configs.infer import InferSettings
from grpo.infer import engine_process, score_temperature
from grpo.infer.arguments import device_of, first_module, make_args, vllm_version
from grpo.infer.checks import tensor_shapes
from grpo.transport.errors import PolicyRefused
from grpo.transport.http import Choice, GenerateRequest, Scored, ServerLoad, Top
from grpo.transport.imports import hidden_modules, import_transformers_by_names
from grpo.transport.weights.nccl import Announcement, Rendezvous
from msgspec.structs import replace

log = logging.getLogger(__name__)
T = TypeVar("T")

ENGINE_CHECK_S = 1.0
ABORT_AGAIN_S = 0.05
"""Between two aborts of a request: vLLM forgets one that comes before the request is in the engine."""
MAX_ANSWERS_AT_ONCE = 128
"""Tokens whose log-probabilities vLLM gives of one distribution."""
_GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


class EngineError(RuntimeError):
    """The engine cannot be built as asked, or returned something that is no answer."""


class EngineEnded(EngineError):
    """The engine's process has ended by itself, or must be ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA adapter on disk as vLLM knows it. `key` is unique for the engine's life; a name may come again."""

    name: str
    key: int
    path: str
    noisy: bool = False
    """Together with the noise in its folder on the norm weights."""


class Engine:
    """The running engine, and the names under which vLLM's own OpenAI routes reach its adapters."""

    def __init__(self, client: Any, *, device: str, model_dir: Path, num_replicas: int = 1) -> None:
        self._client, self._model_dir, self.device = client, model_dir, device
        self._generate = client.generate
        self.num_replicas = num_replicas
        """Engines (`dp`) among which requests are divided; each has every version."""
        self._models: Any = None
        self._numbers = itertools.count(1)
        self._fault = ""
        self.ended = asyncio.Event()
        """Set once the engine cannot answer any more."""
        self.asleep = False
        self.max_model_len = int(client.model_config.max_model_len)
        self.vocab_size = int(client.model_config.get_vocab_size())
        self.noisy_norms: Mapping[str, int] = {}
        """Norm weights that can carry noise, by the checkpoint's names, and their sizes."""
        self.torch_dtype = client.model_config.dtype
        self.dtype = str(self.torch_dtype).removeprefix("torch.")

    def end(self, why: str) -> None:
        """Ends the server, which is then started again."""
        log.error("%s", why)
        self._fault = why
        self.ended.set()

    async def watch(self) -> None:
        """Sets `ended` when the engine's process has ended by itself. Waits for nothing else, and ends with it."""
        while not self._client.errored:  # noqa: ASYNC110 - vLLM has no event for it
            await asyncio.sleep(ENGINE_CHECK_S)
        if not self.ended.is_set():
            self.end("vLLM's engine process has ended by itself; its last lines are above")

    def fault(self) -> EngineEnded:
        """Returns the error that says why it has ended."""
        return EngineEnded(self._fault or "vLLM's engine process has ended")

    async def or_end(self, work: Awaitable[T]) -> T:
        """Awaits `work`, and returns its result. Raises `EngineEnded` as soon as the engine ends: vLLM itself would
        wait for ever."""
        task, ended = asyncio.ensure_future(work), asyncio.ensure_future(self.ended.wait())
        try:
            await asyncio.wait((task, ended), return_when=asyncio.FIRST_COMPLETED)
            if not task.done() or (self._client.errored and task.exception() is not None):
                raise self.fault()
            return task.result()
        finally:
            task.cancel()
            ended.cancel()

    def load(self) -> ServerLoad:
        """Returns what it has to do now, by vLLM's own metrics, which /metrics has too."""
        from prometheus_client import REGISTRY

        values: dict[str, list[float]] = {name: [0.0] for name in _GAUGES}
        for family in REGISTRY.restricted_registry(_GAUGES).collect():
            values[family.name] += [sample.value for sample in family.samples]
        running, waiting, kv_use = (values[name] for name in _GAUGES)
        return ServerLoad(num_running=int(sum(running)), num_waiting=int(sum(waiting)), kv_use=max(kv_use))

    async def generate(
        self,
        wanted: GenerateRequest,
        adapter: Adapter | None,
        *,
        name: str | None = None,
        may_end: asyncio.Event | None = None,
    ) -> list[Choice]:
        """Samples under the adapter (None: the model). Cancelling the call ends the sampling, and so does vLLM's
        abortion of `name` once `may_end` is set."""
        same = ("n", "max_tokens", "min_tokens", "temperature", "seed", "stop_token_ids", "ignore_eos")
        some = {key: getattr(wanted, key) for key in same}
        if wanted.is_restricted:
            some |= {"top_k": wanted.top_k, "top_p": wanted.top_p}
        if wanted.stop:  # a text of special tokens is one too
            some |= {"stop": wanted.stop, "detokenize": True, "skip_special_tokens": False}
        params = _params(logprobs=0 if wanted.is_restricted else wanted.num_top, **some)
        options: dict[str, Any] = {"salt": wanted.cache_salt, "name": name, "may_end": may_end}
        result = await self._final(wanted.prompt_token_ids, params, adapter, **options)
        choices = [
            _sampled(output, num_top=params.logprobs)
            for output in sorted(result.outputs, key=lambda output: int(output.index))
        ]
        if wanted.is_restricted:  # vLLM has told log-probabilities of what was left of the distribution
            choices = await asyncio.gather(*(self._scored(wanted, choice, adapter) for choice in choices))
        if wanted.seed is None:
            return choices
        return [replace(choice, seed=wanted.seed + place) for place, choice in enumerate(choices)]

    async def _scored(self, wanted: GenerateRequest, choice: Choice, adapter: Adapter | None) -> Choice:
        """Returns an answer with the log-probabilities of the whole distribution."""
        start, ids = len(wanted.prompt_token_ids) - 1, [*wanted.prompt_token_ids, *choice.token_ids.tolist()]
        options: dict[str, Any] = {"temperature": wanted.temperature, "num_top": wanted.num_top}
        found = await self.score_top(ids, adapter, **options)
        top = found.top and Top(token_ids=found.top.token_ids[start:], logprobs=found.top.logprobs[start:])
        return replace(choice, logprobs=np.asarray(found.logprobs[start:], np.float32), top=top)

    async def generate_until(
        self, requests: Sequence[GenerateRequest], adapter: Adapter | None, superseded: asyncio.Event
    ) -> list[Choice]:
        """Returns one answer to each request (n = 1). Those that run when `superseded` is set end there, with what they
        have."""
        named = {f"policy-{next(self._numbers)}": wanted for wanted in requests}
        sampling = [
            asyncio.ensure_future(self.generate(one, adapter, name=name, may_end=superseded))
            for name, one in named.items()
        ]

        async def end() -> None:
            await superseded.wait()
            while True:
                await self._client.abort(list(named))
                await asyncio.sleep(ABORT_AGAIN_S)

        ending = asyncio.ensure_future(end())
        try:
            return [choice for choices in await asyncio.gather(*sampling) for choice in choices]
        finally:
            for task in (ending, *sampling):
                task.cancel()
            await asyncio.gather(ending, *sampling, return_exceptions=True)

    async def score(
        self,
        token_ids: Sequence[int],
        adapter: Adapter | None,
        *,
        temperature: float = 1.0,
        priority: int = 0,
        replica: int | None = None,
    ) -> list[float]:
        """Returns the log-probabilities [L - 1] in nats of tokens 1 … L-1, each given those before it. A lower
        `priority` is scheduled before waiting requests of a higher one; requests have 0. `replica` is which of several
        engines (`dp`) computes them, None: whichever is free."""
        options: dict[str, Any] = {"temperature": temperature, "priority": priority, "replica": replica}
        return (await self.score_top(token_ids, adapter, **options)).logprobs

    async def score_top(
        self,
        token_ids: Sequence[int],
        adapter: Adapter | None,
        *,
        num_top: int = 0,
        temperature: float = 1.0,
        priority: int = 0,
        replica: int | None = None,
    ) -> Scored:
        """Returns what `score` does, with the `num_top` likeliest tokens in each place."""
        extra = None if temperature == 1.0 else {score_temperature.KEY: temperature}
        params = _params(max_tokens=1, temperature=0.0, prompt_logprobs=num_top, extra_args=extra)
        result = await self._final(list(token_ids), params, adapter, priority=priority, replica=replica)
        logprobs, top = _checked(result.prompt_logprobs, len(token_ids) - 1, num_top=num_top)
        return Scored(version=None, logprobs=logprobs, top=top)

    async def score_answers(
        self,
        prompt: Sequence[int],
        answers: Sequence[Sequence[int]],
        adapter: Adapter | None,
        *,
        temperature: float = 1.0,
    ) -> list[float]:
        """Returns the log-probability in nats of each answer to a prompt, the sum over its tokens. Answers of one token
        are read off one distribution; longer ones are scored each by itself."""
        if len(answers) <= MAX_ANSWERS_AT_ONCE and all(len(answer) == 1 for answer in answers):
            ids = [answer[0] for answer in answers]
            params = _params(max_tokens=1, temperature=temperature, logprob_token_ids=list(dict.fromkeys(ids)))
            [output] = (await self._final(list(prompt), params, adapter)).outputs
            found = dict(zip(output.logprobs.token_ids, output.logprobs.logprobs, strict=True))
            if missing := [token for token in ids if not math.isfinite(found.get(token, math.nan))]:
                raise EngineError(f"the engine returned no finite log-probability of tokens {missing}")
            return [float(found[token]) for token in ids]
        scored = await asyncio.gather(
            *(self.score([*prompt, *answer], adapter, temperature=temperature) for answer in answers)
        )
        return [math.fsum(logprobs[len(prompt) - 1 :]) for logprobs in scored]

    async def _final(
        self,
        prompt: list[int],
        params: Any,
        adapter: Adapter | None,
        *,
        salt: str | None = None,
        priority: int = 0,
        name: str | None = None,
        may_end: asyncio.Event | None = None,
        replica: int | None = None,
    ) -> Any:
        """vLLM's only output of a request in FINAL_ONLY mode; an incomplete one only once `may_end` is set."""
        final = None
        if adapter is not None:  # a name may come again with other weights, while the earlier one's still add prefixes
            salt = f"{adapter.name}/{adapter.key}/{salt or ''}"
        async for output in self._generate(
            {"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})},
            params,
            request_id=name or f"policy-{next(self._numbers)}",
            lora_request=_lora_request(adapter) if adapter else None,
            priority=priority,
            **({} if replica is None or self.num_replicas == 1 else {"data_parallel_rank": replica}),
        ):
            final = output
        ends = ("stop", "length", "abort") if may_end is not None and may_end.is_set() else ("stop", "length")
        if final is None or any(output.finish_reason not in ends for output in final.outputs):
            if final is not None and any(output.finish_reason == "abort" for output in final.outputs):
                raise EngineEnded("the engine has aborted the request, as one does that is told to end")
            raise EngineError("the engine ended the request without an answer")
        return final

    def count_requests(self, using: Callable[[int], contextlib.AbstractAsyncContextManager[None]]) -> None:
        """Has vLLM's own routes sample with an adapter only within `using` of its key."""

        async def generate(*args: Any, lora_request: Any = None, **more: Any) -> AsyncIterator[Any]:
            counted = contextlib.nullcontext() if lora_request is None else using(lora_request.lora_int_id)
            outputs = self._generate(*args, lora_request=lora_request, **more)
            async with counted, contextlib.aclosing(outputs):
                async for output in outputs:
                    yield output

        self._client.generate = generate

    async def add_adapter(self, adapter: Adapter) -> None:
        """Loads an adapter into the engine. Raises `PolicyRefused` with vLLM's reason."""
        try:
            if adapter.noisy:
                await self._client.collective_rpc("load_norm_noise", args=(adapter.key, adapter.path))
            await self._client.add_lora(_lora_request(adapter))
        except Exception as error:
            raise PolicyRefused("corrupt", f"vLLM refused {adapter.name}: {error}") from error

    async def remove_adapter(self, adapter: Adapter) -> None:
        """Takes an adapter out of the engine; without effect if it is not in it."""
        await self._client.remove_lora(adapter.key)
        if adapter.noisy:
            await self._client.collective_rpc("drop_norm_noise", args=(adapter.key,))

    async def forget_prefixes(self) -> None:
        """Empties the prefix cache, so that a name or path that comes again with other weights reuses nothing."""
        await self._client.reset_prefix_cache()

    def offer(self, name: str, adapter: Adapter | None) -> None:
        """Lets `model: name` of vLLM's own routes mean this adapter, None: the model itself."""
        if adapter is not None:
            self._models.lora_requests[name] = _lora_request(adapter)
        elif name not in [known.name for known in self._models.base_model_paths]:
            own = self._models.base_model_paths[0]
            self._models.base_model_paths.append(type(own)(name=name, model_path=own.model_path))

    def withdraw(self, adapter: Adapter) -> None:
        """Takes back every name of this adapter."""
        requests = self._models.lora_requests
        for name in [name for name, request in requests.items() if request.lora_int_id == adapter.key]:
            del requests[name]

    def forget_names(self) -> None:
        """Takes back every name of the model but its own, which is the first."""
        del self._models.base_model_paths[1:]

    async def load_weights(self, folder: Path | None) -> None:
        """Replaces the model's weights by those in a version's folder (None: the base's), once all requests have ended,
        those of the chat routes too. Raises `EngineError`."""
        async with self._paused():
            args = (None if folder is None else str(folder), str(self._model_dir))
            await self._client.collective_rpc("load_policy_weights", args=args)

    async def join_trainer(self, where: Rendezvous, *, rank_offset: int) -> None:
        """Has the workers join the trainer's group, as the ranks from `rank_offset` on. Waits for the trainer. Not yet
        run on a GPU."""
        base = importlib.import_module("vllm.distributed.weight_transfer.base")
        joining = {"master_address": where.host, "master_port": where.port, "world_size": where.world_size}
        joining |= {"rank_offset": rank_offset, "packed": True}
        async with self._paused():
            await self._client.init_weight_transfer_engine(base.WeightTransferInitRequest(init_info=joining))

    async def receive_weights(self, announcement: Announcement) -> None:
        """Replaces the weights by what the trainer broadcasts, whose group the workers have joined. Not yet run on a
        GPU."""
        base = importlib.import_module("vllm.distributed.weight_transfer.base")
        shapes = [list(shape) for shape in announcement.shapes]
        sent = {"names": list(announcement.names), "dtype_names": list(announcement.dtypes), "shapes": shapes}
        async with self._paused():
            await self._client.start_weight_update()
            await self._client.update_weights(base.WeightTransferUpdateRequest(update_info=sent))
            await self._client.finish_weight_update()

    @contextlib.asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Within it the engine has no requests and empty caches, and its weights may change."""
        await self._client.pause_generation(mode="wait", clear_cache=True)
        try:
            with _failing("vLLM could not load the weights"):
                yield
        finally:
            await self._client.resume_generation()

    async def export_base_weights(self, output_dir: Path, base_model: str) -> None:
        """Offers the base weights to the trainers of the run in `output_dir`. `base_model` is their identity. Raises
        `EngineError` where they cannot be shared as the checkpoint has them."""
        args = (str(output_dir), str(self._model_dir), base_model)
        with _failing("colocate: the base weights cannot be shared"):
            [num_bytes, *_] = await self._client.collective_rpc("export_base_weights", args=args)
        log.info("base weights: %d bytes are shared with the run's trainer", num_bytes)

    async def sleep(self) -> None:
        """Frees the GPU's memory once all requests are answered: of the KV cache, and of weights that are not shared.
        Raises `EngineError`; then it is to be woken. Not yet run on a GPU."""
        self.asleep = True
        with _failing("the engine cannot sleep"):
            await self._client.sleep(level=1, mode="wait")

    async def wake(self) -> None:
        """Takes the memory again; without effect where it is awake. Raises `EngineError`."""
        if self.asleep:
            with _failing("the engine cannot wake; is the GPU's memory free?"):
                await self._client.wake_up()
            self.asleep = False

    async def install(self, *, lora: bool, noise: bool) -> None:
        """Has every worker do what is ours. Raises `EngineError` where it took no effect."""
        norms = [name for name, shape in tensor_shapes(self._model_dir).items() if len(shape) == 1] if noise else []
        args = self.device == "cpu", lora, norms
        with _failing(f"this vLLM {vllm_version()} cannot serve versions"):
            self.noisy_norms, *_ = await self._client.collective_rpc("install_ours", args=args)
        await self.score([self.vocab_size // 2, 1], None)  # the first request takes a second, all others milliseconds


def _params(**more: Any) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    same: dict[str, Any] = {"flat_logprobs": True, "detokenize": False, "output_kind": RequestOutputKind.FINAL_ONLY}
    return SamplingParams(**(same | more))


@contextlib.contextmanager
def _failing(what: str) -> Iterator[None]:
    """vLLM's errors within it become `EngineError`s that begin so."""
    try:
        yield
    except Exception as error:
        raise EngineError(f"{what}: {error}") from error


def _lora_request(adapter: Adapter) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(adapter.name, adapter.key, adapter.path)


def _checked(found: Any, num_expected: int, *, num_top: int = 0) -> tuple[list[float], Top | None]:
    """Returns the log-probabilities in vLLM's flat record of some positions, and the likeliest tokens of each; in a
    position the token itself is the first. Raises `EngineError` if there are too few or too many, or one is not
    finite."""
    width, logprobs = num_top + 1, list(found.logprobs)
    if len(logprobs) != num_expected * width:
        raise EngineError(f"the engine returned {len(logprobs)} log-probabilities, expected {num_expected * width}")
    if not all(map(math.isfinite, logprobs)):
        raise EngineError("the engine returned a log-probability that is not finite")
    if not num_top:
        return logprobs, None
    starts = range(0, len(logprobs), width)
    top = Top(
        token_ids=[found.token_ids[start + 1 : start + width] for start in starts],
        logprobs=[logprobs[start + 1 : start + width] for start in starts],
    )
    return logprobs[::width], top


def _sampled(output: Any, *, num_top: int = 0) -> Choice:
    """Our record of one of vLLM's CompletionOutputs."""
    token_ids = list(output.token_ids)  # vLLM has lists
    logprobs, top = _checked(output.logprobs, len(token_ids), num_top=num_top)
    return Choice(
        token_ids=np.asarray(token_ids, np.int32),
        logprobs=np.asarray(logprobs, np.float32),
        finish_reason="superseded" if output.finish_reason == "abort" else output.finish_reason,
        stop_reason=token_ids[-1] if output.finish_reason == "stop" else None,
        mark=secrets.randbits(53),
        top=top,
    )


@contextlib.asynccontextmanager
async def _forked_engine(args: Namespace, launcher: Any) -> AsyncIterator[Any]:
    """Yields vLLM's client of engines that are forked from this process, or started anew where they cannot be."""
    engine_args = importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs

    class Forked(engine_args):  # type: ignore[misc, valid-type]
        """vLLM's arguments; its configuration for a CPU asks for `spawn`, whatever it was before."""

        def create_engine_config(self, *args: Any, **kwargs: Any) -> Any:
            config = super().create_engine_config(*args, **kwargs)
            if not config.model_config.is_multimodal_model:  # pictures may be prepared, by threads, before the fork
                engine_process.choose_fork()
            return config

    async with launcher.build_async_engine_client_from_engine_args(Forked.from_cli_args(args)) as client:
        os.environ[engine_process.METHOD] = "spawn"
        yield client


def _wait_for_exit_codes() -> None:
    """Lets vLLM tell how an engine has ended while it started: it asks before the kernel has an exit code."""
    manager: Any = importlib.import_module("vllm.v1.engine.utils").CoreEngineProcManager
    known = manager.finished_procs

    def finished_procs(self: Any) -> dict[str, int]:
        for process in self.processes:
            if multiprocessing.connection.wait([process.sentinel], timeout=0):
                process.join(5)
        return dict(known(self))

    manager.finished_procs = finished_procs


@contextlib.asynccontextmanager
async def embedded(
    settings: InferSettings, *, model_dir: Path, sock: socket.socket
) -> AsyncIterator[tuple[Any, Engine]]:
    """Starts the engine in its own process and builds vLLM's application; the engine ends with the context. `sock` is
    where the server will listen, which its engine must not hold. Raises `ArgumentError` and `EngineError`."""
    device = device_of(settings)
    with import_transformers_by_names(), hidden_modules("scipy"):  # which is for sound
        args = make_args(settings, model_dir=model_dir, device=device)
        openai = "vllm.entrypoints.openai.api_server"
        app_module = first_module("vllm.entrypoints.launchers.app", openai)
        state_module = first_module("vllm.entrypoints.launchers.api_server.app_state", openai)
        launcher = first_module("vllm.entrypoints.launchers.api_server.entry", openai)
    args.additional_config.at_forks([sock])
    _wait_for_exit_codes()
    may_fork = device == "cpu" and args.tensor_parallel_size == 1
    starting = _forked_engine(args, launcher) if may_fork else launcher.build_async_engine_client(args)
    async with contextlib.AsyncExitStack() as opened:
        try:
            client = await opened.enter_async_context(starting)
        except RuntimeError as error:  # vLLM tells only by its text that a signal has ended the engine's process
            if killed := re.search(r"Failed core proc\(s\): .*: -(\d+)", str(error)):
                name = signal.Signals(int(killed[1])).name
                raise EngineEnded(f"vLLM's engine process was killed by {name} while it started") from error
            raise
        engine = Engine(client, device=device, model_dir=model_dir, num_replicas=settings.dp)
        watch = asyncio.create_task(engine.watch())
        try:
            tasks = await engine.or_end(client.get_supported_tasks())
            app = app_module.build_app(args, tasks, client.model_config)
            await engine.or_end(state_module.init_app_state(client, app.state, args, tasks))
            await engine.or_end(engine.install(lora=settings.enable_lora, noise=settings.norm_noise))
            engine._models = app.state.openai_serving_models
            yield app, engine
        finally:
            watch.cancel()

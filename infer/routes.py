"""Our routes under /policy: HTTP to records and back. Errors are those of `answers.py`."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Sequence

from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import Response

from configs.infer import InferSettings
from infer import vllm_api
from infer.answers import BadRequest, Handler, answering, as_json, decode, require
from infer.following import follow
from infer.in_place import InPlaceTable
from infer.policies import PolicyTable
from infer.sleep import SleepMode
from infer.telling import Telling
from transport.http import (
    Generated,
    GenerateRequest,
    LoadRequest,
    Scored,
    ScoreRequest,
    ServerInfo,
    Unloaded,
    UnloadRequest,
)

MAX_N = 1024
MIN_TEMPERATURE = 0.01
"""vLLM raises lower ones to this silently; 0 is greedy."""
MAX_TEMPERATURE = 100.0
CLIENT_CLOSED_REQUEST = 499


def _check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        bad = next(token for token in ids if not 0 <= token < vocab_size)
        raise BadRequest(f"{name} holds {bad}, expected ids from 0 to {vocab_size - 1}")


def check_generate(body: GenerateRequest, *, vocab_size: int, max_model_len: int) -> None:
    """Raises BadRequest for what vLLM would refuse less clearly, cut, or change silently."""
    length = len(body.prompt_token_ids)
    require(length > 0, "prompt_token_ids is empty, expected at least one id")
    require(1 <= body.n <= MAX_N, f"n is {body.n}, expected 1 to {MAX_N}")
    require(body.max_tokens >= 1, f"max_tokens is {body.max_tokens}, expected at least 1")
    require(
        0 <= body.min_tokens <= body.max_tokens,
        f"min_tokens is {body.min_tokens}, expected 0 to max_tokens = {body.max_tokens}",
    )
    require(
        length + body.max_tokens <= max_model_len,
        f"{length} prompt tokens and max_tokens = {body.max_tokens} exceed max_model_len = {max_model_len}",
    )
    greedy = body.temperature == 0
    require(
        greedy or MIN_TEMPERATURE <= body.temperature <= MAX_TEMPERATURE,
        f"temperature is {body.temperature}, expected 0 (greedy) or {MIN_TEMPERATURE} to {MAX_TEMPERATURE}",
    )
    require(not (greedy and body.n > 1), f"temperature 0 gives {body.n} equal answers; ask for n = 1")
    require(body.seed is None or 0 <= body.seed < 2**63, f"seed is {body.seed}, expected 0 to 2^63 - 1")
    require(
        body.version is not None or not body.follow,
        "follow is true with version null, expected a version: the base model is none",
    )
    _check_adapter(body)
    _check_ids("prompt_token_ids", body.prompt_token_ids, vocab_size)
    _check_ids("stop_token_ids", body.stop_token_ids, vocab_size)


def check_score(body: ScoreRequest, *, vocab_size: int, max_model_len: int) -> None:
    """Raises BadRequest for a sequence that cannot be scored. vLLM samples one more token, so one must be free."""
    length = len(body.token_ids)
    require(length >= 2, f"token_ids has {length} ids, expected at least 2")
    require(
        MIN_TEMPERATURE <= body.temperature <= MAX_TEMPERATURE,
        f"temperature is {body.temperature}, expected {MIN_TEMPERATURE} to {MAX_TEMPERATURE}",
    )
    require(length < max_model_len, f"token_ids has {length} ids, expected fewer than max_model_len = {max_model_len}")
    _check_adapter(body)
    _check_ids("token_ids", body.token_ids, vocab_size)


def _check_adapter(body: GenerateRequest | ScoreRequest) -> None:
    require(
        body.version is not None or body.adapter is None,
        f"adapter is {body.adapter!r} with version null, expected a version: the base model has none",
    )


async def _unless_disconnected(request: Request, work: Awaitable[Response]) -> Response:
    """The work's response; the work is cancelled when the client hangs up first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        for pending in (task, gone):
            pending.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    """Returns when the client has hung up; the request's body must have been read. Ends by being cancelled."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRoutes:
    """The handlers over one engine and its table of versions."""

    settings: InferSettings
    engine: vllm_api.Engine
    table: PolicyTable | InPlaceTable
    sleep_mode: SleepMode | None = None
    """None where the server was started without `sleep_mode`."""
    telling: Telling = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        folder, host, port = self.table.output_dir, self.settings.host, self.settings.port
        telling = Telling(output_dir=folder, host=host, port=port, live=lambda: self.table.live)
        object.__setattr__(self, "telling", telling)

    def attach(self, app: FastAPI) -> None:
        """Adds the routes, which read and write the bodies of `transport/http.py`, to vLLM's application."""
        router = APIRouter()
        router.add_route("/info", self._answering(self.info), methods=["GET"])
        for name in ("load", "unload", "generate", "score", "sleep", "wake"):
            router.add_route(f"/{name}", self._answering(getattr(self, name)), methods=["POST"])
        app.include_router(router, prefix="/policy")

    def _answering(self, handler: Handler) -> Handler:
        """The handler with its errors as responses; that the engine has ended is told at once, also where the answer
        would not need it: nothing that is said of this server's versions holds any more."""

        async def alive(request: Request) -> Response:
            async with vllm_api.while_alive(self.engine):
                return await handler(request)

        return answering(alive)

    async def info(self, request: Request) -> Response:
        """What is served, which versions are live, and how much there is to do."""
        return as_json(
            ServerInfo(
                model=self.settings.model,
                base_model=self.table.base.identity,
                max_model_len=self.engine.max_model_len,
                vocab_size=self.engine.vocab_size,
                max_lora_rank=self.table.base.max_rank,
                kinds=list(self.table.kinds),
                num_workers=self.settings.tp * self.settings.dp,
                dtype=self.engine.dtype,
                vllm_version=vllm_api.version(),
                device=self.engine.device,
                run_id=self.table.run_id,
                live=self.table.live,
                in_flight=self.table.in_flight,
                load=self.engine.load(),
                shared_bytes=self.engine.shared_bytes,
                tolerance=self.table.tolerance_for(self.engine.dtype),
                asleep=None if self.sleep_mode is None else self.sleep_mode.asleep,
            )
        )

    async def load(self, request: Request) -> Response:
        """Make a version live; see PolicyTable.load."""
        body = decode(await request.body(), LoadRequest)
        require(body.alias != self.settings.model, f"alias {body.alias!r} is the base model's own name")
        require(body.rank_offset >= 1, f"rank_offset is {body.rank_offset}, expected 1 or more")
        ranks = {"rank_offset": body.rank_offset} if isinstance(self.table, InPlaceTable) else {}
        with self.telling.loading(body.run_id, body.version):
            loaded = await self.table.load(run_id=body.run_id, version=body.version, alias=body.alias, **ranks)
        return as_json(loaded)

    async def unload(self, request: Request) -> Response:
        """Route no more to a version."""
        body = decode(await request.body(), UnloadRequest)
        await self.table.unload(body.version)
        return as_json(Unloaded(version=body.version, in_flight=self.table.in_flight.get(body.version, 0)))

    async def sleep(self, _: Request) -> Response:
        """Free the device's memory until `wake`."""
        with self.telling.said("falling asleep", then="asleep"):
            return as_json({"seconds": await self._sleep_mode.sleep()})

    async def wake(self, _: Request) -> Response:
        """Take the memory again."""
        with self.telling.said("waking", then="serving"):
            return as_json({"seconds": await self._sleep_mode.wake()})

    @property
    def _sleep_mode(self) -> SleepMode:
        if self.sleep_mode is None:
            raise BadRequest("this server cannot sleep; set sleep_mode: true for grpo-infer")
        return self.sleep_mode

    async def generate(self, request: Request) -> Response:
        """Sample n answers to one prompt of token ids."""
        body = decode(await request.body(), GenerateRequest)
        check_generate(body, vocab_size=self.engine.vocab_size, max_model_len=self.engine.max_model_len)
        return await _unless_disconnected(request, self._generate(body))

    async def _generate(self, body: GenerateRequest) -> Response:
        wanted = vllm_api.SamplingRequest(
            prompt_token_ids=body.prompt_token_ids,
            n=body.n,
            max_tokens=body.max_tokens,
            min_tokens=body.min_tokens,
            temperature=body.temperature,
            seed=body.seed,
            stop_token_ids=body.stop_token_ids,
            cache_salt=body.cache_salt,
        )
        if body.follow and body.version is not None:
            followed = await follow(
                self.engine, self.table, wanted, version=body.version, noisy=body.noisy, adapter=body.adapter
            )
            return as_json(Generated(version=body.version, choices=followed))
        async with self.table.using(body.version, noisy=body.noisy, adapter=body.adapter) as adapter:
            choices = await self.engine.generate(wanted, adapter)
        return as_json(Generated(version=body.version, choices=choices))

    async def score(self, request: Request) -> Response:
        """Log-probabilities of a given sequence."""
        body = decode(await request.body(), ScoreRequest)
        check_score(body, vocab_size=self.engine.vocab_size, max_model_len=self.engine.max_model_len)
        require(
            body.temperature == 1.0 or self.engine.scores_at_temperatures,
            f"temperature is {body.temperature}, expected 1: this server cannot divide by it, because its vLLM "
            f"({vllm_api.version()}) is none that is known; use one of 0.24 to 0.32",
        )
        return await _unless_disconnected(request, self._score(body))

    async def _score(self, body: ScoreRequest) -> Response:
        async with self.table.using(body.version, noisy=body.noisy, adapter=body.adapter) as adapter:
            logprobs = await self.engine.score(body.token_ids, adapter, temperature=body.temperature)
        return as_json(Scored(version=body.version, logprobs=logprobs))

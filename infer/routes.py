"""Our routes under /policy: HTTP to the records of `transport/http.py` and back.

Errors are `{"error": {"type", "message"}}`, with status and type by `ERRORS`, or 409 and the reason of a refused
policy.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter
from grpo.configs.infer import InferSettings
from grpo.infer.engine import Engine, EngineEnded, EngineError
from grpo.infer.following import follow
from grpo.infer.versions import NotLive, UnknownAdapter, VersionTable
from grpo.transport.errors import DeadlineError, PolicyRefused, RunFolderError
from grpo.transport.http import (
    Generated,
    GenerateRequest,
    LoadReport,
    LoadRequest,
    ScoreAnswersRequest,
    Scored,
    ScoredAnswers,
    ScoreRequest,
    ServerInfo,
    Unloaded,
    UnloadRequest,
)
from grpo.transport.records import MESSAGE_TYPE, from_body, to_body
from grpo.transport.run import current_run_id
from grpo.transport.status import FAILED, FINISHED, StatusFile, server_file
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

CLIENT_CLOSED_REQUEST = 499
T = TypeVar("T")


class BadRequest(ValueError):
    """A value of a request that cannot be served; the message says which one, and what is expected."""


class Asleep(RuntimeError):
    """A request came while the engine sleeps."""


ANNOUNCE_S = 1.0
ERRORS: dict[type[Exception], tuple[int, str]] = {
    BadRequest: (400, "bad_request"),
    UnknownAdapter: (400, "bad_request"),
    NotLive: (404, "not_live"),
    RunFolderError: (409, "stale_run"),
    EngineEnded: (503, "engine_ended"),
    EngineError: (503, "engine"),
    Asleep: (503, "asleep"),
    DeadlineError: (504, "deadline"),
}
"""Status and type of an error's answer; other errors stay the framework's 500."""


class PolicyRoutes:
    """The handlers over one engine and its table of versions."""

    def __init__(self, settings: InferSettings, engine: Engine, table: VersionTable) -> None:
        self.settings, self.engine, self.table = settings, engine, table
        self._status_path = Path(settings.output_dir) / "status" / server_file(settings.host, settings.port)
        self._changing = asyncio.Lock()
        """Held while the engine falls asleep or wakes."""

    def router(self) -> APIRouter:
        """Returns the routes, which belong under /policy."""
        router = APIRouter()
        self._add(router, "info", self.info)
        self._add(router, "load", self.load, LoadRequest)
        self._add(router, "unload", self.unload, UnloadRequest)
        self._add(router, "generate", self.generate, GenerateRequest, cancels=True)
        self._add(router, "score", self.score, ScoreRequest, cancels=True)
        self._add(router, "score_answers", self.score_answers, ScoreAnswersRequest, cancels=True)
        self._add(router, "sleep", self.sleep, method="POST")
        self._add(router, "wake", self.wake, method="POST")
        return router

    def _add(
        self,
        router: APIRouter,
        name: str,
        handler: Callable[..., Awaitable[object]],
        body: type[msgspec.Struct] | None = None,
        *,
        cancels: bool = False,
        method: str = "",
    ) -> None:
        """Adds a route whose handler takes the body's record and returns a record. With `cancels` the handler is
        cancelled when the client hangs up."""

        async def answer(request: Request) -> Response:
            try:
                sent_as = request.headers.get("content-type", "")
                given = [] if body is None else [decode(await request.body(), body, sent_as)]
                if self.engine.ended.is_set():
                    raise self.engine.fault()
                if body is not None and self.engine.asleep:
                    raise Asleep("this server sleeps while the trainer makes a step (sleep_mode); try again")
                work = self.engine.or_end(handler(*given))
                done = await (unless_disconnected(request, work) if cancels else work)
            except Exception as error:
                return answer_to(error)
            if done is None:
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            return as_body(done, request.headers.get("accept", ""))

        router.add_route(f"/{name}", answer, methods=[method or ("GET" if body is None else "POST")])

    async def info(self) -> ServerInfo:
        """Says what is served, which versions are live, and how much there is to do."""
        return ServerInfo(
            model=self.settings.model,
            base_model=self.table.base.identity,
            max_model_len=self.engine.max_model_len,
            vocab_size=self.engine.vocab_size,
            max_lora_rank=self.table.base.max_rank or 0,
            kinds=self.table.base.kinds,
            num_workers=self.settings.tp * self.settings.dp,
            run_id=self.table.run_id,
            live=self.table.live,
            in_flight=self.table.in_flight,
            num_slots=None if self.table.in_place else self.table.num_slots,
            load=self.engine.load(),
            asleep=self.engine.asleep if self.settings.sleep_mode else None,
        )

    async def load(self, body: LoadRequest) -> LoadReport:
        """Makes a version live; see VersionTable.load."""
        require(body.alias != self.settings.model, f"alias {body.alias!r} is the base model's own name")
        self._report(f"loading version {body.version}")
        refused = None
        try:
            return await self.table.load(
                run_id=body.run_id,
                version=body.version,
                alias=body.alias,
                rank_offset=body.rank_offset,
                snapshot=body.snapshot,
            )
        except Exception as error:
            refused = f"version {body.version}: {error}"
            raise
        finally:
            self._report("serving", refused)

    async def unload(self, body: UnloadRequest) -> Unloaded:
        """Routes no more to a version."""
        await self.table.unload(body.version)
        return Unloaded(version=body.version, in_flight=self.table.in_flight.get(body.version, 0))

    async def generate(self, body: GenerateRequest) -> Generated:
        """Samples n answers to one prompt of token ids."""
        length, longest = len(body.prompt_token_ids), self.engine.max_model_len
        longest -= body.is_restricted  # such answers are scored, for which vLLM samples one more token
        message = f"{length} prompt tokens and max_tokens = {body.max_tokens} exceed max_model_len = {longest}"
        require(length + body.max_tokens <= longest, message)
        check_ids("prompt_token_ids", body.prompt_token_ids, self.engine.vocab_size)
        check_ids("stop_token_ids", body.stop_token_ids, self.engine.vocab_size)
        require(body.num_top <= self.engine.vocab_size, f"num_top is {body.num_top}, and the model has fewer tokens")
        if body.follow:
            return Generated(version=body.version, choices=await follow(self.engine, self.table, body))
        async with self.table.using(body.version, noisy=body.noisy, adapter=body.adapter) as (_, adapter):
            return Generated(version=body.version, choices=await self.engine.generate(body, adapter))

    async def score(self, body: ScoreRequest) -> Scored:
        """Returns the log-probabilities of a given sequence."""
        length, longest = len(body.token_ids), self.engine.max_model_len  # vLLM samples one more token
        require(length < longest, f"token_ids has {length} ids, expected fewer than max_model_len = {longest}")
        check_ids("token_ids", body.token_ids, self.engine.vocab_size)
        require(body.num_top <= self.engine.vocab_size, f"num_top is {body.num_top}, and the model has fewer tokens")
        async with self.table.using(body.version, noisy=body.noisy, adapter=body.adapter) as (_, adapter):
            options: Any = {"temperature": body.temperature, "num_top": body.num_top}
            found = await self.engine.score_top(body.token_ids, adapter, **options)
        return replace(found, version=body.version)

    async def score_answers(self, body: ScoreAnswersRequest) -> ScoredAnswers:
        """Returns the log-probabilities of the given answers to each prompt."""
        for prompt, answers in zip(body.prompts, body.answers, strict=True):
            length, longest = len(prompt) + max(map(len, answers)), self.engine.max_model_len
            message = f"a prompt with its answer has {length} ids, expected fewer than max_model_len = {longest}"
            require(length < longest, message)
            check_ids("prompts", prompt, self.engine.vocab_size)
            for answer in answers:
                check_ids("answers", answer, self.engine.vocab_size)
        async with self.table.using(body.version, noisy=False, adapter=body.adapter) as (_, adapter):
            score = partial(self.engine.score_answers, adapter=adapter, temperature=body.temperature)
            pairs = zip(body.prompts, body.answers, strict=True)
            logprobs = await asyncio.gather(*(score(prompt, answers) for prompt, answers in pairs))
        return ScoredAnswers(version=body.version, logprobs=logprobs)

    async def sleep(self) -> dict[str, float]:
        """Frees the device's memory until `wake`, once what is in flight is answered."""
        return await self._change(self.engine.sleep, "falling asleep", "asleep")

    async def wake(self) -> dict[str, float]:
        """Takes the memory again."""
        return await self._change(self.engine.wake, "waking", "serving")

    async def _change(self, change: Callable[[], Awaitable[None]], state: str, then: str) -> dict[str, float]:
        require(self.settings.sleep_mode, "this server cannot sleep; set sleep_mode: true for grpo-infer")
        limit_s = self.settings.canary_timeout_s
        async with self._changing:
            started_s = time.monotonic()
            self._report(state)
            try:
                await asyncio.wait_for(change(), limit_s)
            except TimeoutError:
                message = f"{state} took longer than canary_timeout_s = {limit_s:g} s; set that higher, or start the "
                raise DeadlineError(f"{message}server again if its engine hangs") from None
            self._report(then)
        return {"seconds": time.monotonic() - started_s}

    async def announce(self) -> None:
        """The loop that notes this server in the folder of its run, and again in that of a later run. Consumes nothing.
        Waits for the run. Ends when it is cancelled."""
        while True:
            if not self._status_path.exists():
                self._report("serving")
            await asyncio.sleep(ANNOUNCE_S)

    def report_end(self, error: BaseException | None) -> None:
        """Records that the server ends, by a signal or by an error."""
        wanted = error is None or isinstance(error, SystemExit | KeyboardInterrupt)
        self._report(FINISHED if wanted else FAILED, None if wanted else f"{type(error).__name__}: {error}")

    def _report(self, state: str, message: str | None = None) -> None:
        """Writes the status file, where the folder holds a run and it can be written."""
        with contextlib.suppress(OSError, RunFolderError):
            if current_run_id(Path(self.settings.output_dir)) is not None:
                step = max(self.table.live, default=None)
                StatusFile(self._status_path).set(state, step=step, message=message)


def decode(data: bytes, body: type[Any], media_type: str = "") -> Any:
    """Returns the request's body as a record. Raises `BadRequest`."""
    try:
        return from_body(data, body, media_type)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadRequest(str(error)) from error


def as_body(content: object, wanted: str) -> Response:
    """Returns the content as a response of the media type that is wanted, MessagePack or else JSON."""
    media_type = MESSAGE_TYPE if wanted == MESSAGE_TYPE else "application/json"
    return Response(to_body(content, media_type), media_type=media_type)


def as_json(content: object, status: int) -> Response:
    """Returns an error's response."""
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def answer_to(error: Exception) -> Response:
    """Returns the response for an error; raises errors that are not expected."""
    known = [(409, error.reason)] if isinstance(error, PolicyRefused) else []
    known += [answer for kind, answer in ERRORS.items() if isinstance(error, kind)]
    if not known:
        raise error
    status, kind = known[0]
    return as_json({"error": {"type": kind, "message": str(error)}}, status)


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T | None:
    """Returns the work's result; None where the client hung up first, and the work is cancelled. The request's body
    must have been read."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, hung_up = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((task, hung_up), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for pending in (task, hung_up):
            pending.cancel()
        await asyncio.gather(task, hung_up, return_exceptions=True)


def require(holds: bool, message: str) -> None:
    """Raises `BadRequest` unless it holds."""
    if not holds:
        raise BadRequest(message)


def check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raises `BadRequest` unless the model has these ids."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        bad = next(token for token in ids if not 0 <= token < vocab_size)
        raise BadRequest(f"{name} holds {bad}, expected ids from 0 to {vocab_size - 1}")

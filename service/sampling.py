"""Samples from tenants' snapshots on grpo-infers.

A snapshot is a policy version like any other: written with its canary, and live on a server only once that scores it as
the trainer does. A new one is loaded on all servers; one that a server does not have any more is loaded and proved
again when it is asked for. Each request goes to the server that has the fewest. A server that does not answer is left
out until it does, and what it was asked for is asked of another.
"""

import asyncio
import itertools
import json
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Annotated, Any, Literal

import httpx
import msgspec
import numpy as np
from grpo.service.errors import Refused
from grpo.service.log import SESSION_S, Answer, Command, CommandLog, Sample
from grpo.service.training import ALPHA, TrainedModel
from grpo.service.wire import MAX_CANDIDATES, samples_of
from grpo.trainer.weights import AdapterWeights
from grpo.transport.folders import step_folder
from grpo.transport.http import (
    MAX_TOP,
    NO_SLOTS,
    Generated,
    GenerateRequest,
    LoadRequest,
    ScoreAnswersRequest,
    Scored,
    ScoredAnswers,
    ScoreRequest,
    ServerInfo,
    Top,
    UnloadRequest,
)
from grpo.transport.records import PolicySpec
from grpo.transport.run import RunFolder
from grpo.transport.weights.store import CANARY_FILE, HeldVersion, InUse, PolicyPublisher, write_in_use
from msgspec import Meta
from tinker.proto import tinker_public_pb2 as schema

log = logging.getLogger(__name__)

MAX_RUNNING = 64
"""Requests that each server has at once; more wait here."""
MAX_SAMPLES = 1024
TIMEOUT_S = 600.0
"""How long an answer may take, and how long all servers may be gone."""
CONNECT_S = 10.0
"""A server that takes no connection for so long is gone; one that only takes its time to answer is not."""
ROWS_AT_ONCE = 64
"""Places of a prompt whose candidates are scored in one request; each takes the prompt up to there along."""
LOOK_S = 1.0
"""Between two looks whether a server is there."""
NO_TOP_ID, NO_TOP_LOGPROB = 0, -99999.0
"""Of an empty place among the likeliest tokens, as the protocol has it."""
NumTop = Annotated[int, Meta(ge=0, le=MAX_TOP)]


class Chunk(msgspec.Struct, kw_only=True):
    """A piece of a prompt."""

    type: str = "encoded_text"
    tokens: list[int] = []


class Prompt(msgspec.Struct, kw_only=True):
    """The pieces of a prompt, in order."""

    chunks: list[Chunk]


class Params(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The protocol's sampling parameters."""

    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    """None: as many as fit."""
    seed: int | None = None
    stop: str | list[str | int] | None = None
    """Texts or token ids; None: the model's end token alone, empty: not even that."""
    temperature: float = 1.0
    top_k: int = -1
    """-1 and 0: all tokens."""
    top_p: float = 1.0


class Targets(msgspec.Struct, kw_only=True):
    """A tensor [L - 1, K] of token ids for a prompt of L tokens, dense or sparse (CSR): row i has candidates for the
    prompt's token i + 1; -1 stands for none."""

    data: list[Annotated[int, Meta(ge=-1, lt=2**31)]]
    shape: tuple[int, int]
    dtype: Literal["int64"] = "int64"
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None

    def rows(self, num_rows: int) -> list[list[int]]:
        """Returns the ids of each row. Raises `Refused` for what is no tensor of so many rows."""
        (height, width), ends, columns = self.shape, self.sparse_crow_indices, self.sparse_col_indices
        if ends is None:
            ends, columns = [width * row for row in range(num_rows + 1)], [0] * len(self.data)
        is_whole = len(ends) == num_rows + 1 and ends == sorted(ends) and (ends[0], ends[-1]) == (0, len(self.data))
        is_whole = is_whole and len(columns or []) == len(self.data) and all(0 <= one < width for one in columns or [])
        if height != num_rows or not 1 <= width <= MAX_CANDIDATES or not is_whole:
            what = f"target_prompt_logprobs has the shape {list(self.shape)} and {len(self.data)} values"
            raise Refused(f"{what}, expected [{num_rows}, K] for this prompt, K from 1 to {MAX_CANDIDATES}")
        return [self.data[start:end] for start, end in itertools.pairwise(ends)]


class SampleRequest(msgspec.Struct, kw_only=True):
    """What of a request's body is served, besides whom it addresses."""

    prompt: Prompt
    sampling_params: Params = msgspec.field(default_factory=Params)
    num_samples: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] = 1
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: Annotated[int, Meta(ge=1)] | None = None
    topk_prompt_logprobs: NumTop = 0
    topk_sample_logprobs: NumTop = 0
    target_prompt_logprobs: Targets | None = None

    @property
    def token_ids(self) -> list[int]:
        """The prompt. Raises `Refused` for what is no token."""
        for chunk in self.prompt.chunks:
            if chunk.type != "encoded_text":
                raise Refused(f"the prompt has a chunk of type {chunk.type!r:.40}; only tokens are served")
        if not (ids := [token for chunk in self.prompt.chunks for token in chunk.tokens]):
            raise Refused("the prompt has no tokens")
        return ids


NOT_SERVED = {
    "prompt_alt_tokens_k": ": a server draws tokens only after a prompt; sample after its beginnings",
    "record_stability_info": ": it is for the loss stable_reinforce",
}
"""Fields of a request that are refused, and why."""
_ADDRESS = {"type", "base_model", "model_path", "sampling_session_id", "seq_id"}


class ServerGone(Exception):
    """A server has not answered."""


class Server:
    """A grpo-infer, and what it does for this service."""

    def __init__(self, url: str, key: str | None) -> None:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        limits = httpx.Timeout(TIMEOUT_S, connect=CONNECT_S)
        self.url, self.http = url, httpx.AsyncClient(base_url=url, headers=headers, timeout=limits)
        self.num_running = 0
        self.loading: dict[int, asyncio.Task[None]] = {}
        self.used: dict[int, int] = {}
        """By version, the number of its newest use."""
        self.there, self.gone = asyncio.Event(), asyncio.Event()
        """One of them is set."""
        self.there.set()

    def leave_out(self, why: object) -> None:
        """Gives it no more requests until it answers, and ends those that it has."""
        if self.there.is_set():
            log.warning("%s does not answer and is left out until it does: %s", self.url, why)
            self.there.clear()
            self.gone.set()

    async def watch(self) -> None:
        """The loop that looks whether the server is there. Waits for its answers. Ends when it is cancelled."""
        while True:
            try:
                answer = await self.http.get("/health", timeout=CONNECT_S)
                if answer.status_code == 200 and self.gone.is_set():
                    log.warning("%s answers again", self.url)
                    self.gone.clear()
                    self.there.set()
            except (httpx.ReadTimeout, httpx.PoolTimeout):  # it has much to do
                pass
            except httpx.TransportError as error:
                self.leave_out(repr(error))
            await asyncio.sleep(LOOK_S)

    async def send(self, route: str, request: Any = None) -> httpx.Response:
        """Returns the server's response. Raises `ServerGone` if it gives none, or cannot now."""
        method, content = ("GET", None) if request is None else ("POST", request.to_json())
        sending = asyncio.ensure_future(self.http.request(method, route, content=content))
        gone = asyncio.ensure_future(self.gone.wait())
        try:
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                raise ServerGone(self.url)
            answer = sending.result()
        except httpx.TransportError as error:
            self.leave_out(repr(error))
            raise ServerGone(self.url) from error
        finally:
            sending.cancel()
            gone.cancel()
        if answer.status_code == 503 and answer.json()["error"]["type"] != "engine":
            self.leave_out(answer.text[:200])
            raise ServerGone(self.url)
        return answer


class Sampling:
    """The end of the service that talks to servers. Its methods belong to the event loop, but for `publish`."""

    def __init__(
        self,
        commands: CommandLog,
        run: RunFolder,
        *,
        urls: Sequence[str],
        key: str | None,
        base_model: str,
        max_tokens: int,
        finished: Callable[[str], None],
    ) -> None:
        """`urls` are the servers', who have the same `key`, `base_model` is the base's identity, `max_tokens` the
        longest sequence with its answer, and `finished` is called with the id of each request that has ended."""
        self._log, self._run, self._base_model, self._max_tokens = commands, run, base_model, max_tokens
        self._finished = finished
        self._publisher = PolicyPublisher(run.broadcasts, run_id=run.run_id, keep_last=1)
        self._started = time.time()
        self.servers = [Server(url, key) for url in urls]
        self._loop = asyncio.get_running_loop()
        self._places = asyncio.Semaphore(MAX_RUNNING * len(self.servers))
        self._uses = itertools.count(1)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """By the request's id."""
        self._watching: list[asyncio.Task[None]] = []

    @property
    def left_out(self) -> list[str]:
        """The addresses of the servers that do not answer."""
        return [server.url for server in self.servers if server.gone.is_set()]

    def start(self) -> None:
        """Begins what was waiting when the service ended, and looks after the servers."""
        self._watching = [asyncio.create_task(server.watch()) for server in self.servers]
        for command in self._log.waiting(("asample",)):
            self.submit(command)

    async def close(self) -> None:
        """Ends what runs; it is done after the next start."""
        tasks = [*self._tasks.values(), *self._watching]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for server in self.servers:
            await server.http.aclose()

    # --- snapshots ---

    def publish(self, model: TrainedModel, command: Command, path: str) -> Future[int]:
        """Writes the model, which is in use, as the next version, in the thread that trains, and begins to load it."""
        policy = model.policy
        assert isinstance(policy.weights, AdapterWeights)
        version = self._log.new_version(command, path)
        canary, files = model.canary(version=version), model.files()
        spec = PolicySpec(
            base_model=self._base_model,
            rank=int(json.loads(files["adapter_config.json"])["r"]),
            alpha=ALPHA,
            target_modules=policy.weights.target_modules,
            sequence_len=self._max_tokens,
            dtype=policy.dtype_name,
        )
        # Sessions that could not be heard while the service was down have an hour.
        heard_since = time.time() - SESSION_S if time.time() > self._started + SESSION_S else 1.0
        pins = self._log.pins(heard_since=heard_since)
        held = {number: HeldVersion(snapshot=None, pins=by) for number, by in sorted(pins.items())}
        write_in_use(self._run.broadcasts, InUse(run_id=self._run.run_id, versions=held, newest=version))
        self._publisher.publish(version=version, spec=spec, files={**files, CANARY_FILE: canary.to_json()})

        return asyncio.run_coroutine_threadsafe(self._load_everywhere(version), self._loop)

    async def _load_everywhere(self, version: int) -> int:
        """Returns the version once it is live on all servers that answer."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            await self._until_there(deadline_s)
            servers = [server for server in self.servers if server.there.is_set()]
            ends = await asyncio.gather(*(self._load(server, version) for server in servers), return_exceptions=True)
            for error in ends:
                if error is not None and not isinstance(error, ServerGone):
                    raise error
            if None in ends:
                return version

    async def _until_there(self, deadline_s: float) -> None:
        """Returns once a server answers. Raises `RuntimeError` if none does until then."""
        waiting = [asyncio.ensure_future(server.there.wait()) for server in self.servers]
        left_s = deadline_s - time.monotonic()
        done, _ = await asyncio.wait(waiting, timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED)
        for one in waiting:
            one.cancel()
        if not done:
            raise RuntimeError(f"no server has answered for {TIMEOUT_S:g} s: {', '.join(self.left_out)}")

    async def _load(self, server: Server, version: int) -> None:
        """Returns once the version is live on a server. Requests at the same time share one load."""
        if (loading := server.loading.get(version)) is None:
            loading = server.loading[version] = asyncio.create_task(self._load_now(server, version))
            loading.add_done_callback(lambda _: server.loading.pop(version))
        await asyncio.shield(loading)

    async def _load_now(self, server: Server, version: int) -> None:
        """Has a server load a version; where it has no slot, in place of the one that was used longest ago, and that no
        request uses if there is one."""
        if not step_folder(self._run.broadcasts, version).exists():
            what = "its session was not heard for an hour, and it is no checkpoint"
            raise Refused(f"snapshot {version} has been removed: {what}; save the weights again")
        request = LoadRequest(run_id=self._run.run_id, version=version)
        while (answer := await server.send("/policy/load", request)).status_code != 200:
            if answer.status_code != 409 or answer.json()["error"]["type"] != NO_SLOTS:
                raise RuntimeError(f"{server.url} refuses version {version}: {answer.text[:500]}")
            info = ServerInfo.from_json((await server.send("/policy/info")).content)
            if not info.live:
                raise RuntimeError(f"{server.url} has no slot for version {version}: {answer.text[:500]}")
            oldest = min(info.live, key=lambda one: (info.in_flight.get(one, 0) > 0, server.used.get(one, 0)))
            await server.send("/policy/unload", UnloadRequest(version=oldest))
        self._log.add_canary(version, answer.text)
        server.used[version] = next(self._uses)

    # --- samples ---

    def submit(self, command: Command) -> None:
        """Begins a request that is in the log."""
        task = self._tasks[command.request_id] = asyncio.create_task(self._answer(command))
        task.add_done_callback(lambda _: self._tasks.pop(command.request_id))

    def cancel(self, command: Command) -> None:
        """Ends a request that runs, and the server's work for it."""
        if (task := self._tasks.get(command.request_id)) is not None and not task.done():
            task.cancel()
            self._end(command, Answer(state="failed", content=b"the client has cancelled the request"))

    async def _answer(self, command: Command) -> None:
        samples: list[Sample] = []
        try:
            async with self._places:
                _, version = self._log.sampler(command.target, command.tenant)
                answer = Answer(state="proto", content=await self._sample(command, version))
            samples = self._samples(command, answer, version)
        except Refused as error:
            answer = Answer(state="failed", content=str(error).encode())
        except Exception as error:
            log.exception("%s", command.request_id)
            answer = Answer(state="broken", content=f"{type(error).__name__}: {error}".encode())
        self._end(command, answer, samples)

    def _end(self, command: Command, answer: Answer, samples: Sequence[Sample] = ()) -> None:
        ended = self._log.finish(command, answer, samples=samples)
        ended.add_done_callback(lambda _: self._finished(command.request_id))

    def _samples(self, command: Command, answer: Answer, version: int | None) -> list[Sample]:
        """Returns the samples whose log-probabilities are those of the whole distribution at temperature 1, which the
        trainer computes too."""
        asked = read_sample(command.body)
        params = asked.sampling_params
        if params.temperature != 1 or params.top_p < 1 or params.top_k > 0:
            return []
        return samples_of(asked.token_ids, answer.content, version=version)

    async def _sample(self, command: Command, version: int | None) -> bytes:
        asked = read_sample(command.body)
        request, copies = self._request(asked, version)
        message = schema.SampleResponse()
        if asked.prompt_logprobs or asked.topk_prompt_logprobs:
            await self._add_scores(message, asked, version)
        if asked.target_prompt_logprobs is not None:
            await self._add_targets(message.target_prompt_logprobs, asked, asked.target_prompt_logprobs, version)
        generated = await self._post("/policy/generate", request, Generated, version)
        for choice in generated.choices * copies:
            if choice.finish_reason not in ("stop", "length"):
                raise RuntimeError(f"the server has ended an answer because of {choice.finish_reason!r}")
            sequence = message.sequences.add()
            is_full = choice.finish_reason == "length"
            sequence.stop_reason = schema.STOP_REASON_LENGTH if is_full else schema.STOP_REASON_STOP
            sequence.tokens = np.array(choice.token_ids, "<i4").tobytes()
            sequence.logprobs = np.array(choice.logprobs, "<f4").tobytes()
            if choice.top is not None:
                sequence.topk_sampled_logprobs.CopyFrom(top_message(choice.top))
        content: bytes = message.SerializeToString(deterministic=True)
        return content

    def _request(self, asked: SampleRequest, version: int | None) -> tuple[GenerateRequest, int]:
        """Returns the server's request, and how many times each answer counts: greedy ones are all equal."""
        params, prompt = asked.sampling_params, asked.token_ids
        stop = [params.stop] if isinstance(params.stop, str) else params.stop
        greedy, top_k, top_p = params.temperature == 0, max(params.top_k, 0), params.top_p
        room = self._max_tokens - len(prompt) - (not greedy and (top_k > 0 or top_p < 1))
        if room < 1:
            raise Refused(f"the prompt has {len(prompt)} tokens, and a sequence at most {self._max_tokens}")
        fields: dict[str, Any] = {
            "version": version,
            "prompt_token_ids": prompt,
            "max_tokens": min(params.max_tokens or room, room),
            "n": 1 if greedy else asked.num_samples,
            "temperature": params.temperature,
            "seed": None if params.seed is None else params.seed % (2**63 - 1),
            "stop": [one for one in stop or [] if isinstance(one, str)],
            "stop_token_ids": [one for one in stop or [] if isinstance(one, int)],
            "ignore_eos": stop == [],
            "top_k": top_k,
            "top_p": top_p,
            "num_top": asked.topk_sample_logprobs,
        }
        try:
            return msgspec.convert(fields, GenerateRequest), asked.num_samples if greedy else 1
        except ValueError as error:
            raise Refused(f"sampling_params: {error}") from error

    async def _add_scores(self, message: Any, asked: SampleRequest, version: int | None) -> None:
        """Adds the log-probabilities of the prompt's tokens at temperature 1, and the likeliest tokens in their places;
        none for the first, and for all but the last `prompt_logprobs_last_n`."""
        prompt, num_top = asked.token_ids, asked.topk_prompt_logprobs
        scores, top = np.full(len(prompt), np.nan, "<f4"), Top(token_ids=[], logprobs=[])
        num_without = max(1, len(prompt) - (asked.prompt_logprobs_last_n or len(prompt)))
        if len(prompt) > 1:
            request = ScoreRequest(version=version, token_ids=prompt, num_top=num_top)
            scored = await self._post("/policy/score", request, Scored, version)
            scores[num_without:] = scored.logprobs[num_without - 1 :]
            top = scored.top or top
        if asked.prompt_logprobs:
            message.prompt_logprobs = scores.tobytes()
        if num_top:
            whole = Top(
                token_ids=[[NO_TOP_ID] * num_top] * num_without + top.token_ids[num_without - 1 :],
                logprobs=[[NO_TOP_LOGPROB] * num_top] * num_without + top.logprobs[num_without - 1 :],
            )
            message.topk_prompt_logprobs.CopyFrom(top_message(whole))

    async def _add_targets(self, message: Any, asked: SampleRequest, targets: Targets, version: int | None) -> None:
        """Adds the candidates' log-probabilities at temperature 1, in the tensor's own layout; 0 in place of -1."""
        prompt, found = asked.token_ids, list[float]()
        wanted = [[[one] for one in ids if one >= 0] for ids in targets.rows(len(prompt) - 1)]
        places = [place for place, answers in enumerate(wanted) if answers]
        for start in range(0, len(places), ROWS_AT_ONCE):
            now = places[start : start + ROWS_AT_ONCE]
            given: dict[str, Any] = {"prompts": [prompt[: place + 1] for place in now]}
            request = ScoreAnswersRequest(version=version, answers=[wanted[place] for place in now], **given)
            scored = await self._post("/policy/score_answers", request, ScoredAnswers, version)
            found += itertools.chain.from_iterable(scored.logprobs)
        values = np.zeros(len(targets.data), "<f4")
        values[np.array(targets.data, int) >= 0] = found
        message.dtype = schema.DTYPE_FLOAT32
        message.shape.extend(targets.shape)
        if targets.sparse_crow_indices is None:
            message.dense = values.tobytes()
            return
        message.sparse_csr.values = values.tobytes()
        message.sparse_csr.crow_indices = np.array(targets.sparse_crow_indices, "<i8").tobytes()
        message.sparse_csr.col_indices = np.array(targets.sparse_col_indices, "<i8").tobytes()

    async def _post(self, route: str, request: Any, answer_type: Any, version: int | None) -> Any:
        """Returns the answer of the server that has the fewest requests, or of another one where that goes. Raises
        `Refused` for what servers do not take."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            await self._until_there(deadline_s)
            there = [server for server in self.servers if server.there.is_set()]
            server = min(there, key=lambda one: (one.num_running, self.servers.index(one)))
            server.num_running += 1
            try:
                return answer_type.from_json(await self._answer_of(server, route, request, version))
            except ServerGone:
                continue
            finally:
                server.num_running -= 1

    async def _answer_of(self, server: Server, route: str, request: Any, version: int | None) -> bytes:
        """Returns what a server answers; a version that it does not have is loaded first."""
        if version is not None:
            server.used[version] = next(self._uses)
        for attempt in range(3):
            answer = await server.send(route, request)
            if answer.status_code == 200:
                return answer.content
            if answer.status_code == 404 and version is not None and attempt < 2:
                await self._load(server, version)
                continue
            if answer.status_code == 400:
                raise Refused(answer.json()["error"]["message"])
            break
        raise RuntimeError(f"{server.url} answers {route} with {answer.status_code}: {answer.text[:500]}")


def read_sample(body: bytes) -> SampleRequest:
    """Returns what a body asks for. Raises `Refused` for a field that is not served, unless it asks for nothing."""
    try:
        asked = msgspec.json.decode(body, type=SampleRequest)
        fields = msgspec.json.decode(body, type=dict[str, Any])
    except (ValueError, RecursionError) as error:
        raise Refused(f"the request is no sample: {error}") from error
    if unknown := sorted(
        name for name, value in fields.items() if value and name not in {*_ADDRESS, *SampleRequest.__struct_fields__}
    ):
        raise Refused(f"{unknown[0]} is not served{NOT_SERVED.get(unknown[0], '')}")
    return asked


def top_message(top: Top) -> Any:
    """Returns the protocol's message of the likeliest tokens, [N][K]."""
    ids, logprobs = np.array(top.token_ids, "<i4"), np.array(top.logprobs, "<f4")
    length, k = ids.shape
    return schema.TopkLogprobs(token_ids=ids.tobytes(), logprobs=logprobs.tobytes(), k=k, length=length)

"""HTTP to the inference servers: least-loaded routing, retries with back-off, deadlines, errors that name them."""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import aiohttp
import msgspec

from orchestrator.episodes.types import Completion
from orchestrator.membership import Membership

RETRIED_STATUS = {429, 502, 503, 504}
MIN_PAUSE_S, MAX_PAUSE_S = 0.05, 2.0
CONNECT_TIMEOUT_S = 10.0


class ServerError(RuntimeError):
    """A server that cannot be reached, or that refuses a request."""


class Unreachable(ServerError):
    """A server that cannot be reached now."""


class Refused(ServerError):
    """A server's answer of 4xx: `kind` is its word for the reason."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        self.status, self.kind = status, kind
        super().__init__(message)


class _Choice(msgspec.Struct):
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str


class _Generated(msgspec.Struct):
    version: int | None
    choices: list[_Choice]


class ServerInfo(msgspec.Struct):
    """What a server says about itself."""

    base_model: str
    max_model_len: int
    max_lora_rank: int
    kinds: list[str] = msgspec.field(default_factory=lambda: ["adapter"])
    """Kinds of policy versions that it can serve."""
    num_workers: int = 1
    """GPUs that it computes on."""
    in_flight: dict[int, int] = msgspec.field(default_factory=dict)
    """Requests that run now, by version."""


class CanaryFigures(msgspec.Struct):
    """How far the server's log-probabilities of the canary are from the trainer's, in nats."""

    max_abs: float
    mean_abs: float
    tolerance: float


class LoadReport(msgspec.Struct):
    """How a version became live on one server."""

    version: int
    name: str
    canary: CanaryFigures
    load_s: float
    canary_s: float
    noise: CanaryFigures | None = None
    """The same with the version's noise; None for a version without."""


A = TypeVar("A")


class ServerPool:
    """All servers, and the number of requests that each has in flight."""

    def __init__(self, base_urls: Sequence[str], *, api_key: str | None, timeout_s: float) -> None:
        """`base_urls` with or without `/v1`. `timeout_s` is what one request may take, retries included."""
        self.servers = tuple(url.rstrip("/").removesuffix("/v1") for url in base_urls)
        self.membership = Membership(self.servers)
        self.timeout_s = timeout_s
        self._num_in_flight = dict.fromkeys(self.servers, 0)
        headers = {"Content-Type": "application/json"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(CONNECT_TIMEOUT_S, timeout_s)),
        )

    @property
    def num_in_flight(self) -> int:
        """Requests for answers that a server has now."""
        return sum(self._num_in_flight.values())

    async def close(self) -> None:
        """Closes all connections; servers drop what was in flight."""
        await self._session.close()

    # --- sampling ---

    async def generate(
        self,
        *,
        prompt_token_ids: Sequence[int],
        num: int,
        version: int,
        max_tokens: int,
        min_tokens: int,
        temperature: float,
        seed: int | None,
        noisy: bool = False,
    ) -> list[Completion]:
        """`num` answers to one prompt by the least loaded server. Raises ServerError."""
        request = {
            "version": version,
            "prompt_token_ids": prompt_token_ids,
            "n": num,
            "max_tokens": max_tokens,
            "min_tokens": min_tokens,
            "temperature": temperature,
            "seed": seed,
            "noisy": noisy,
        }
        answer = await self._anywhere("/policy/generate", request, _Generated)
        if answer.version != version or len(answer.choices) != num:
            raise ServerError(
                f"a server answered with {len(answer.choices)} choices of version {answer.version}, expected {num} of "
                f"version {version}; run the same release of grpo in all three programs"
            )
        return [
            Completion(token_ids=choice.token_ids, logprobs=choice.logprobs, finish_reason=choice.finish_reason)
            for choice in answer.choices
        ]

    async def _anywhere(self, path: str, request: Mapping[str, Any], answer: type[A]) -> A:
        """The answer of whichever server in the routing is least loaded. One that cannot be reached or has lost the
        version is taken out, and another one's turn comes; where there is none, one that comes back is waited for."""
        body, deadline, pause_s = msgspec.json.encode(request), time.monotonic() + self.timeout_s, MIN_PAUSE_S
        failed: dict[str, int] = dict.fromkeys(self.servers, 0)
        while True:
            members = self.membership.routed or (() if self.membership.watched else self.servers)
            if not members:
                await self._until_changed(deadline)
                continue
            server = min(members, key=lambda name: (failed[name], self._num_in_flight[name]))
            self._num_in_flight[server] += 1
            try:
                return await self._once("POST", server, path, answer, body=body)
            except _Unavailable as error:
                failed[server] += 1
                if error.gone:
                    self.membership.take_out(server, str(error))
                await self._pause(error, server, deadline, pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
            except Refused as error:
                if not self._has_lost(error, request):
                    raise
                self.membership.take_out(server, str(error))
            finally:
                self._num_in_flight[server] -= 1

    def _has_lost(self, error: Refused, request: Mapping[str, Any]) -> bool:
        """Whether a server does not serve a version that it had proved: it has been restarted."""
        return error.kind == "not_live" and self.membership.watched and request["version"] in self.membership.versions

    async def _until_changed(self, deadline: float) -> None:
        """Returns when a server is put back. Raises ServerError at the deadline."""
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline - time.monotonic()):
                await self.membership.changed.wait()
        except TimeoutError:
            raise self.none_left() from None

    def none_left(self) -> ServerError:
        """The error of a wait for any server."""
        out = sorted(self.membership.out.items())
        why = "; ".join(reason if server in reason else f"{server}: {reason}" for server, reason in out)
        return ServerError(
            f"no inference server was in service within client.timeout = {self.timeout_s:g} s: {why}; "
            "see the servers' logs, or raise client.timeout"
        )

    async def _pause(self, error: "_Unavailable", server: str, deadline: float, pause_s: float) -> None:
        pause_s *= random.uniform(0.5, 1.0)
        if time.monotonic() + pause_s > deadline:
            raise ServerError(
                f"{server} did not answer within client.timeout = {self.timeout_s:g} s: {error}; "
                "see the server's log, or raise client.timeout"
            ) from error
        await asyncio.sleep(pause_s)

    # --- one server ---

    async def on(self, server: str, method: str, path: str, answer: type[A], **request: Any) -> A:
        """The answer of one server, with retries until the timeout. Raises Refused and ServerError."""
        body = msgspec.json.encode(request) if request else None
        deadline, pause_s = time.monotonic() + self.timeout_s, MIN_PAUSE_S
        while True:
            try:
                return await self._once(method, server, path, answer, body=body)
            except _Unavailable as error:
                await self._pause(error, server, deadline, pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def once(self, server: str, method: str, path: str, answer: type[A], **request: Any) -> A:
        """The answer of one server at the first try. Raises Unreachable, Refused and ServerError."""
        body = msgspec.json.encode(request) if request else None
        try:
            return await self._once(method, server, path, answer, body=body)
        except _Unavailable as error:
            raise Unreachable(f"{server}: {error}") from error

    async def wait_healthy(self, server: str) -> None:
        """Returns when the server's /health answers. Raises ServerError after the timeout."""
        deadline, error = time.monotonic() + self.timeout_s, "no answer"
        while True:
            try:
                async with self._session.get(f"{server}/health") as response:
                    if response.status == 200:
                        return
                    error = f"/health answers {response.status}"
            except (aiohttp.ClientError, TimeoutError, OSError) as problem:
                error = _text(problem)
            if time.monotonic() > deadline:
                raise ServerError(
                    f"waited client.timeout = {self.timeout_s:g} s for the inference server {server} to come up: "
                    f"{error}; start grpo-infer, or mend client.base_url"
                )
            await asyncio.sleep(0.1)

    async def _once(self, method: str, server: str, path: str, answer: type[A], *, body: bytes | None) -> A:
        try:
            async with self._session.request(method, server + path, data=body) as response:
                data = await response.read()
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError, OSError) as error:
            raise _Unavailable(_text(error), gone=True) from error
        if response.status == 200:
            return _decode(data, answer, server + path)
        kind, message = _error_of(data)
        text = f"{server}{path} answered {response.status}: {message}"
        if kind == "engine" and len(self.servers) > 1:
            raise _Unavailable(text, gone=True)
        if response.status in RETRIED_STATUS and kind not in ("engine", "deadline"):
            raise _Unavailable(text)
        if response.status == 401:
            text += "; set the variable that client.api_key_var names to the server's API key"
        if 400 <= response.status < 500:
            raise Refused(response.status, kind, text)
        raise ServerError(text)


class _Unavailable(Exception):
    """Worth another try; elsewhere first, where the server is `gone`."""

    def __init__(self, text: str, *, gone: bool = False) -> None:
        self.gone = gone
        super().__init__(text)


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _decode(data: bytes, answer: type[A], where: str) -> A:
    try:
        return msgspec.json.decode(data, type=answer)
    except msgspec.MsgspecError as error:
        raise ServerError(f"{where} answered something else than expected: {error}; is it a grpo-infer?") from error


def _error_of(data: bytes) -> tuple[str, str]:
    """Kind and message of an error's body."""
    try:
        error = msgspec.json.decode(data)["error"]
        return (str(error["type"]), str(error["message"])) if isinstance(error, dict) else ("", str(error))
    except (msgspec.MsgspecError, KeyError, TypeError):
        return "", data[:500].decode(errors="replace") or "nothing"

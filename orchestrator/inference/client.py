"""HTTP to the inference servers: least-loaded routing, retries with back-off, deadlines, errors that name them."""

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import aiohttp
import msgspec

from orchestrator.inference.membership import Membership
from orchestrator.rollouts.records import Completion, SamplingParams
from transport.http import Choice, Generated, GenerateRequest, Scored, ScoreRequest, ServerInfo
from transport.records import Record

RETRIED_STATUS = {429, 502, 503, 504}
MIN_PAUSE_S, MAX_PAUSE_S = 0.05, 2.0
CONNECT_TIMEOUT_S = 10.0
HEALTH_PAUSE_S = 0.1


class ServerError(RuntimeError):
    """A server that cannot be reached, or that refuses a request."""


class Unreachable(ServerError):
    """A server that cannot be reached now, or that is there (not `gone`) and cannot do what it is asked now."""

    def __init__(self, message: str, *, gone: bool = True) -> None:
        self.gone = gone
        super().__init__(message)


class Refused(ServerError):
    """A server's answer of 4xx: `kind` is its word for the reason."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        self.status, self.kind = status, kind
        super().__init__(message)


A = TypeVar("A")


class ServerPool:
    """All servers, and the number of requests that each has in flight."""

    def __init__(self, base_urls: Sequence[str], *, api_key: str | None, timeout_s: float) -> None:
        """`base_urls` with or without `/v1`; none where servers are found later. `timeout_s` is what one request may
        take, retries included."""
        self.membership = Membership([url.rstrip("/").removesuffix("/v1") for url in base_urls])
        self.timeout_s = timeout_s
        self._alone = len(base_urls) == 1
        self._num_in_flight: Counter[str] = Counter()
        self._timers: defaultdict[str, set[asyncio.Timeout]] = defaultdict(set)
        """Of each server's requests that end when it is abandoned."""
        self._released = asyncio.Event()
        """Whether requests for answers may go to the servers."""
        self._released.set()
        self.busy: Callable[[str], AbstractContextManager[None]] = lambda server: nullcontext()
        """Entered while a server has a request for an answer."""
        headers = {"Content-Type": "application/json"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=min(CONNECT_TIMEOUT_S, timeout_s)),
        )

    @property
    def servers(self) -> tuple[str, ...]:
        """All that are known, in the routing or not."""
        return self.membership.servers

    @property
    def num_in_flight(self) -> int:
        """Requests for answers that a server has now."""
        return self._num_in_flight.total()

    async def close(self) -> None:
        """Closes all connections; servers drop what was in flight."""
        await self._session.close()

    def hold(self) -> None:
        """Lets requests for answers that are made from now on wait until `release`."""
        self._released.clear()

    def release(self) -> None:
        """Lets requests go to the servers again, those that wait first."""
        self._released.set()

    # --- sampling ---

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        params: SamplingParams,
        num: int,
        version: int | None,
        seed: int | None,
    ) -> list[Completion]:
        """`num` answers of a version, or of the base model, to one prompt by the least loaded server. Where they
        follow, they begin under the newest version that it serves, `version` or a later one, and go on under each newer
        one. Raises ServerError."""
        assert params.max_tokens is not None, "who samples has resolved it"
        request = GenerateRequest(
            version=version,
            prompt_token_ids=list(prompt_token_ids),
            n=num,
            seed=seed,
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            noisy=params.noisy,
            follow=params.follow,
            adapter=params.adapter,
        )

        def check(server: str, answer: Generated) -> None:
            pairs = [(len(choice.token_ids), len(choice.logprobs)) for choice in answer.choices]
            if answer.version == version and len(pairs) == num and all(ids == logprobs for ids, logprobs in pairs):
                return
            raise ServerError(
                f"{server} answered with {len(pairs)} choices of version {answer.version}, of (ids, log-probabilities) "
                f"{pairs}; expected {num} of version {version}, with as many of the one as of the other; run the same "
                "release of grpo in all three programs"
            )

        def check_all(server: str, answer: Generated) -> None:
            check(server, answer)
            if params.follow and version is not None:
                for choice in answer.choices:
                    _check_versions(server, choice, since=version)

        answer = await self._anywhere("/policy/generate", request, Generated, check_all)
        return [
            Completion(
                token_ids=choice.token_ids,
                logprobs=choice.logprobs,
                finish_reason=choice.finish_reason,
                versions=choice.versions or (),
            )
            for choice in answer.choices
        ]

    async def score(
        self, token_ids: Sequence[int], version: int | None, temperature: float = 1.0, adapter: str | None = None
    ) -> list[float]:
        """[L - 1] natural log-probabilities of tokens 1 to L - 1, each given those before it, at `temperature`, under a
        version (with several adapters: under one of them, None is the first) or the base model, by the least loaded
        server. Raises ServerError."""
        request = ScoreRequest(
            version=version, token_ids=[*map(int, token_ids)], temperature=temperature, adapter=adapter
        )

        def check(server: str, answer: Scored) -> None:
            if answer.version != version or len(answer.logprobs) != len(token_ids) - 1:
                raise ServerError(
                    f"{server} answered with {len(answer.logprobs)} log-probabilities under version {answer.version}, "
                    f"expected {len(token_ids) - 1} under version {version}; run the same release of grpo in all three "
                    "programs"
                )

        return (await self._anywhere("/policy/score", request, Scored, check)).logprobs

    async def _anywhere(
        self,
        path: str,
        request: GenerateRequest | ScoreRequest,
        answer: type[A],
        check: Callable[[str, A], None],
    ) -> A:
        """The answer of whichever server in the routing is least loaded. One that cannot be reached, has lost the
        version or answers what no server of ours would is taken out, and another one's turn comes; where there is
        none, one that comes back is waited for. `check` raises ServerError for an answer that cannot be. The time that
        requests are held back does not count."""
        body, deadline_s, pause_s = msgspec.json.encode(request), self._deadline_s(), MIN_PAUSE_S
        failed: Counter[str] = Counter()
        while True:
            deadline_s += await self._held_back_s()
            members = self.membership.routed or (() if self.membership.watched else self.servers)
            if not members:
                await self._until_changed(deadline_s)
                continue
            server = min(members, key=lambda name: (failed[name], self._num_in_flight[name]))
            try:
                found = await self._abandonable(server, path, answer, body=body, deadline_s=deadline_s)
                check(server, found)
                return found
            except _Unavailable as error:
                failed[server] += 1
                if error.gone:
                    self.membership.take_out(server, str(error))
                await self._pause(error, server, deadline_s, pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
            except ServerError as error:
                if not (self._has_lost(error, request) or self.can_do_without(server, error)):
                    raise
                failed[server] += 1
                self.membership.take_out(server, str(error))

    async def _abandonable(self, server: str, path: str, answer: type[A], *, body: bytes, deadline_s: float) -> A:
        """The server's answer. Raises _Unavailable when the server is abandoned meanwhile."""
        self._num_in_flight[server] += 1
        try:
            with self.busy(server), self._ends_when_abandoned(server, deadline_s) as timer:
                async with timer:
                    return await self._once("POST", server, path, answer, body=body)
        except TimeoutError:
            why = self.membership.out.get(server, f"no answer within client.timeout = {self.timeout_s:g} s")
            raise _Unavailable(why, gone=True) from None
        finally:
            self._num_in_flight[server] -= 1
            if not self._num_in_flight[server]:
                del self._num_in_flight[server]

    @contextmanager
    def _ends_when_abandoned(self, server: str, deadline_s: float) -> Iterator[asyncio.Timeout]:
        """A timer for one request, to be entered."""
        timer = asyncio.timeout_at(deadline_s)
        self._timers[server].add(timer)
        try:
            yield timer
        finally:
            self._timers[server].discard(timer)
            if not self._timers[server]:
                del self._timers[server]

    async def _held_back_s(self) -> float:
        """Returns when requests may go to the servers: for how many seconds they might not."""
        began_s = asyncio.get_running_loop().time()
        await self._released.wait()
        return asyncio.get_running_loop().time() - began_s

    def abandon(self, server: str, why: str) -> None:
        """Takes a server that has fallen silent out of the routing; what it was to answer goes elsewhere, and what it
        alone was asked (`once`, `change`) is not waited for."""
        self.membership.take_out(server, why)
        for timer in self._timers.get(server, ()):
            if not timer.expired():
                timer.reschedule(asyncio.get_running_loop().time())

    def _has_lost(self, error: ServerError, request: GenerateRequest | ScoreRequest) -> bool:
        """Whether a server does not serve a version that it had proved: it has been restarted."""
        not_live = isinstance(error, Refused) and error.kind == "not_live"
        version, proved = request.version, self.membership.versions
        follows = isinstance(request, GenerateRequest) and request.follow and version is not None
        fitting = version in proved or (follows and any(one > (version or 0) for one in proved))
        return not_live and self.membership.watched and fitting

    def can_do_without(self, server: str, error: ServerError) -> bool:
        """Whether the fault may be this server's alone, and there are others in the routing."""
        ours = isinstance(error, Refused) and error.kind not in ("", "unauthorized")
        return not ours and self.membership.watched and any(other != server for other in self.membership.routed)

    async def _until_changed(self, deadline_s: float) -> None:
        """Returns when a server is put back. Raises ServerError at the deadline."""
        try:
            async with asyncio.timeout_at(deadline_s):
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

    def _deadline_s(self) -> float:
        """When a request that begins now must have its answer, on the loop's clock."""
        return asyncio.get_running_loop().time() + self.timeout_s

    async def _pause(self, error: "_Unavailable", server: str, deadline_s: float, pause_s: float) -> None:
        pause_s *= random.uniform(0.5, 1.0)
        if asyncio.get_running_loop().time() + pause_s > deadline_s:
            raise ServerError(
                f"{server} did not answer within client.timeout = {self.timeout_s:g} s: {error}; "
                "see the server's log, or raise client.timeout"
            ) from error
        await asyncio.sleep(pause_s)

    # --- one server ---

    async def on(self, server: str, method: str, path: str, answer: type[A]) -> A:
        """The answer of one server, with retries until the timeout. Raises Refused and ServerError."""
        deadline_s, pause_s = self._deadline_s(), MIN_PAUSE_S
        while True:
            try:
                return await self._within(deadline_s, method, server, path, answer, body=None)
            except _Unavailable as error:
                await self._pause(error, server, deadline_s, pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def once(self, server: str, method: str, path: str, answer: type[A], request: Record | None = None) -> A:
        """The answer of one server at the first try; ends when the server is abandoned. Raises Unreachable, Refused and
        ServerError."""
        limit = f"client.timeout = {self.timeout_s:g} s"
        return await self._at_once(server, method, path, answer, request, within_s=self.timeout_s, limit=limit)

    async def change(self, server: str, path: str, answer: type[A], *, within_s: float) -> A:
        """Like `once`, for what changes the server's state: it may take `within_s`, at most `client.timeout`."""
        within_s = min(within_s, self.timeout_s)
        return await self._at_once(server, "POST", path, answer, None, within_s=within_s, limit=f"{within_s:g} s")

    async def _at_once(
        self,
        server: str,
        method: str,
        path: str,
        answer: type[A],
        request: Record | None,
        *,
        within_s: float,
        limit: str,
    ) -> A:
        body, clock = None if request is None else msgspec.json.encode(request), asyncio.get_running_loop()
        deadline_s = clock.time() + within_s
        try:
            with self._ends_when_abandoned(server, deadline_s) as timer:
                async with timer:
                    return await self._once(method, server, path, answer, body=body)
        except TimeoutError:
            late = f"no answer within {limit}"
            why = late if clock.time() >= deadline_s else self.membership.out.get(server, late)
            raise Unreachable(f"{server}{path}: {why}") from None
        except _Unavailable as error:
            raise Unreachable(f"{server}: {error}", gone=error.gone) from error

    async def info(self, server: str) -> ServerInfo:
        """What the server says about itself, at the first try. Raises Unreachable, Refused and ServerError."""
        return await self.once(server, "GET", "/policy/info", ServerInfo)

    async def wait_healthy(self, server: str) -> None:
        """Returns when the server's /health answers. Raises ServerError after the timeout."""
        error: str | None = "no answer"
        try:
            async with asyncio.timeout_at(self._deadline_s()):
                while error := await self.sickness(server):  # noqa: ASYNC110 - only asking tells
                    await asyncio.sleep(HEALTH_PAUSE_S)
        except TimeoutError:
            raise ServerError(
                f"waited client.timeout = {self.timeout_s:g} s for the inference server {server} to come up: "
                f"{error}; start grpo-infer, or mend client.base_url"
            ) from None

    async def sickness(self, server: str) -> str | None:
        """Why the server's /health does not answer well; None where it does."""
        try:
            async with self._session.get(f"{server}/health") as response:
                return None if response.status == 200 else f"/health answers {response.status}"
        except (aiohttp.ClientError, OSError) as problem:
            return _text(problem)

    async def _within(
        self, deadline_s: float, method: str, server: str, path: str, answer: type[A], *, body: bytes | None
    ) -> A:
        try:
            async with asyncio.timeout_at(deadline_s):
                return await self._once(method, server, path, answer, body=body)
        except TimeoutError:
            raise _Unavailable(f"no answer within client.timeout = {self.timeout_s:g} s", gone=True) from None

    async def _once(self, method: str, server: str, path: str, answer: type[A], *, body: bytes | None) -> A:
        try:
            async with self._session.request(method, server + path, data=body) as response:
                data = await response.read()
        except aiohttp.ClientResponseError as error:
            raise _no_answer(server + path, error) from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
            raise _Unavailable(_text(error), gone=True) from error
        if response.status == 200:
            return _decode(data, answer, server + path)
        kind, message = _error_of(data)
        text = f"{server}{path} answered {response.status}: {message}"
        if kind == "engine_ended" or (kind == "engine" and not self._alone):  # what has ended may be started again
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


def _check_versions(server: str, choice: Choice, *, since: int) -> None:
    """Raises ServerError unless the answer's runs are of rising versions, `since` or later, and cover its tokens."""
    runs = choice.versions or ()
    versions, num_tokens = [version for version, _ in runs], [num for _, num in runs]
    rising = versions == sorted(set(versions)) and min(versions, default=-1) >= since
    if not (rising and min(num_tokens, default=0) > 0 and sum(num_tokens) == len(choice.token_ids)):
        raise ServerError(
            f"{server} answered {len(choice.token_ids)} tokens with runs of (version, number of tokens) {list(runs)}; "
            f"expected rising versions from {since} on, for all tokens; run the same release of grpo in all three "
            "programs"
        )


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _decode(data: bytes, answer: type[A], where: str) -> A:
    try:
        return msgspec.json.decode(data, type=answer)
    except msgspec.MsgspecError as error:
        raise _no_answer(where, error) from error


def _no_answer(where: str, error: Exception) -> ServerError:
    return ServerError(f"{where} answered something else than expected: {error}; is it a grpo-infer?")


def _error_of(data: bytes) -> tuple[str, str]:
    """Kind and message of an error's body."""
    try:
        error = msgspec.json.decode(data)["error"]
        return (str(error["type"]), str(error["message"])) if isinstance(error, dict) else ("", str(error))
    except (msgspec.MsgspecError, KeyError, TypeError):
        return "", data[:500].decode(errors="replace") or "nothing"

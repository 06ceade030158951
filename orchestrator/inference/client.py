"""HTTP to the inference servers: least-loaded routing, retries with back-off, deadlines, errors that name them."""

import asyncio
import errno
import logging
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TypeVar

import aiohttp
import msgspec
from grpo.orchestrator.inference.pool import ServerPool
from grpo.orchestrator.rollouts.records import SamplingParams
from grpo.transport.http import (
    Choice,
    Generated,
    GenerateRequest,
    ScoreAnswersRequest,
    Scored,
    ScoredAnswers,
    ScoreRequest,
    ServerInfo,
)
from grpo.transport.limits import raise_file_limit
from grpo.transport.records import MESSAGE_TYPE, Record, from_body

log = logging.getLogger(__name__)

RETRIED_STATUS = {429, 502, 503, 504}
MIN_PAUSE_S, MAX_PAUSE_S = 0.05, 2.0
CONNECT_TIMEOUT_S = 10.0
MAX_SILENT = 3
"""Times `client.timeout` without a single answer of any server, while requests are in flight, before that is an
error."""
JOINED_TOKENS, MAX_JOINED = 16, 256
"""Answers of up to so many tokens to one prompt, without a seed, that are asked for in the same turn of the loop are
one request, of up to so many answers: a game's states come again and again, and a request costs more than a token."""


class ServerError(RuntimeError):
    """A server that cannot be reached, or that refuses a request."""


class ServersAway(ServerError):
    """No server is in service, and none came back in time. Started again, the program may find one."""


class TimedOut(ServerError):
    """A request that no server answered within `client.timeout`; others are answered."""


class Unreachable(ServerError):
    """A server that cannot be reached now, or that is there (not `gone`) and cannot do what it is asked now, or has
    taken all the time that there was (`late`)."""

    def __init__(self, message: str, *, gone: bool = True, late: bool = False) -> None:
        self.gone, self.late = gone, late
        super().__init__(message)


class RequestRefused(ServerError):
    """A server's answer of 4xx: `kind` is its word for the reason."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        self.status, self.kind = status, kind
        super().__init__(message)


A = TypeVar("A")
_Key = tuple[tuple[int, ...], SamplingParams, int | None]


class _Joined:
    """One request for the answers that several wait for."""

    def __init__(self) -> None:
        self.num = 0
        self.waiting: list[tuple[int, asyncio.Future[list[Choice]]]] = []
        self.task: asyncio.Task[None] | None = None


class PolicyClient:
    """Asks the servers of a pool, and counts the requests that each has in flight."""

    def __init__(self, pool: ServerPool, *, api_key: str | None, timeout_s: float) -> None:
        """`timeout_s` is what one request may take, retries included."""
        self.pool, self.timeout_s = pool, timeout_s
        self._num_in_flight: Counter[str] = Counter()
        self._timers: defaultdict[str, set[asyncio.Timeout]] = defaultdict(set)
        """Timers of the requests that each server has; they run out when it is abandoned."""
        self._answered_s = 0.0
        """When a server last answered any request, or was first asked after a pause, on the loop's clock."""
        self._joined: dict[_Key, _Joined] = {}
        """What is asked for in this turn of the loop."""
        self._has_warned = False
        """Whether the log says already that there are too many open files."""
        self._released = asyncio.Event()
        self._released.set()
        headers = {"Content-Type": "application/json", "Accept": MESSAGE_TYPE}
        headers |= {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._max_connections = raise_file_limit() * 3 // 4  # the rest is for what else the program opens

        def session(limit: int) -> aiohttp.ClientSession:
            return aiohttp.ClientSession(
                headers=headers,
                connector=aiohttp.TCPConnector(limit=limit, keepalive_timeout=60),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=min(CONNECT_TIMEOUT_S, timeout_s)),
            )

        self._session, self._control_session = session(self._max_connections), session(0)
        """Connections for requests for answers, which wait where there are too many, and for all other requests."""

    @property
    def num_in_flight(self) -> int:
        """Number of requests for answers that servers have now."""
        return self._num_in_flight.total()

    @property
    def is_crowded(self) -> bool:
        """Whether half of the connections that it may open are in use: what can be one request is to be one."""
        return 2 * self.num_in_flight >= self._max_connections

    async def close(self) -> None:
        """Closes all connections; servers drop what was in flight."""
        await self._session.close()
        await self._control_session.close()

    def hold(self) -> None:
        """Lets requests for answers that are made from now on wait until `release`."""
        self._released.clear()

    def release(self) -> None:
        """Lets requests go to the servers again, those that wait first."""
        self._released.set()

    def abandon(self, server: str, why: str) -> None:
        """Ejects an unresponsive server. Its requests for answers move to other servers; requests meant for it alone
        fail now."""
        self.pool.eject(server, why)
        for timer in self._timers.get(server, ()):
            if not timer.expired():
                timer.reschedule(asyncio.get_running_loop().time())

    # --- whichever server ---

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        params: SamplingParams,
        num: int,
        version: int | None,
        seed: int | None,
    ) -> list[Choice]:
        """Returns `num` answers of a version, or of the base model, to one prompt by the least loaded server. Where
        they follow, they begin under the newest version that it serves, `version` or a later one, and go on under each
        newer one. Raises ServerError."""
        assert params.max_tokens is not None, "who samples has resolved it"
        if seed is not None or params.max_tokens > JOINED_TOKENS or params.temperature == 0 or num > MAX_JOINED:
            return await self._answers(prompt_token_ids, params, num, version, seed)
        key = (tuple(prompt_token_ids), params, version)
        joined = self._joined.get(key)
        if joined is None or joined.num + num > MAX_JOINED:
            joined = self._joined[key] = _Joined()
            asyncio.get_running_loop().call_soon(self._send_joined, key, joined)
        joined.num += num
        future: asyncio.Future[list[Choice]] = asyncio.get_running_loop().create_future()
        joined.waiting.append((num, future))
        try:
            return await future
        finally:
            if joined.task is not None and all(one.cancelled() for _, one in joined.waiting):
                joined.task.cancel()

    def _send_joined(self, key: _Key, joined: _Joined) -> None:
        """Asks for what several wait for, if any still does."""
        if self._joined.get(key) is joined:
            del self._joined[key]
        joined.waiting = [(num, future) for num, future in joined.waiting if not future.cancelled()]
        if not joined.waiting:
            return

        async def ask() -> None:
            try:
                total = sum(num for num, _ in joined.waiting)
                prompt, params, version = key
                found = iter(await self._answers(prompt, params, total, version, None))
            except asyncio.CancelledError:
                for _, future in joined.waiting:
                    future.cancel()
            except Exception as error:
                for _, future in joined.waiting:
                    if not future.done():
                        future.set_exception(error)
            else:
                for num, future in joined.waiting:
                    own = list(islice(found, num))
                    if not future.done():
                        future.set_result(own)

        joined.task = asyncio.create_task(ask())

    async def _answers(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, num: int, version: int | None, seed: int | None
    ) -> list[Choice]:
        options = {"version": version, "n": num, "seed": seed, **msgspec.structs.asdict(params)}
        body = msgspec.json.encode(GenerateRequest(prompt_token_ids=list(prompt_token_ids), **options))

        def fault(answer: Generated) -> str | None:
            pairs = [(len(choice.token_ids), len(choice.logprobs)) for choice in answer.choices]
            if answer.version == version and len(pairs) == num and all(ids == logprobs for ids, logprobs in pairs):
                return None
            had = f"{len(pairs)} choices of version {answer.version}, of (ids, log-probabilities) {pairs}"
            return f"{had}; expected {num} of version {version}, with as many of the one as of the other"

        answer, server = await self._anywhere(
            "/policy/generate", body, Generated, fault, version=version, follows=params.follow
        )
        return [msgspec.structs.replace(choice, server=server) for choice in answer.choices]

    async def score(
        self, token_ids: Sequence[int], version: int | None, temperature: float = 1.0, adapter: str | None = None
    ) -> list[float]:
        """Returns the [L - 1] natural log-probabilities of tokens 1 to L - 1, each given those before it, at
        `temperature`, under a version (with several adapters: under one of them, None is the first) or the base model,
        by the least loaded server. Raises ServerError."""
        num = len(token_ids) - 1
        body = msgspec.json.encode(
            ScoreRequest(version=version, token_ids=[*map(int, token_ids)], temperature=temperature, adapter=adapter)
        )

        def fault(answer: Scored) -> str | None:
            if answer.version == version and len(answer.logprobs) == num:
                return None
            had = f"{len(answer.logprobs)} log-probabilities under version {answer.version}"
            return f"{had}, expected {num} under version {version}"

        return (await self._anywhere("/policy/score", body, Scored, fault, version=version))[0].logprobs

    async def score_answers(
        self,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[Sequence[int]]],
        version: int | None,
        *,
        temperature: float = 1.0,
        adapter: str | None = None,
    ) -> list[list[float]]:
        """Returns for each prompt the log-probabilities in nats of its `answers`, under a version or the base model, by
        the least loaded server, in one request. Raises ServerError."""
        body = msgspec.json.encode(
            ScoreAnswersRequest(
                version=version,
                prompts=[list(prompt) for prompt in prompts],
                answers=[[list(answer) for answer in own] for own in answers],
                temperature=temperature,
                adapter=adapter,
            )
        )
        expected = [len(own) for own in answers]

        def fault(answer: ScoredAnswers) -> str | None:
            nums = [len(logprobs) for logprobs in answer.logprobs]
            if answer.version == version and nums == expected:
                return None
            had = f"{sum(nums)} log-probabilities for {len(nums)} prompts under version {answer.version}"
            return f"{had}, expected {sum(expected)} for {len(expected)} under version {version}"

        path = "/policy/score_answers"
        return (await self._anywhere(path, body, ScoredAnswers, fault, version=version))[0].logprobs

    async def _anywhere(
        self,
        path: str,
        body: bytes,
        answer_type: type[A],
        fault: Callable[[A], str | None],
        *,
        version: int | None,
        follows: bool = False,
    ) -> tuple[A, str]:
        """Returns the answer of the least loaded server in the routing, and which server that was. A server that cannot
        be reached, has lost the version or gives an impossible answer (`fault`) is ejected, and the next one is asked;
        where none is left, the request waits for one to come back. A slow server stays: the health probes say whether
        it is there. The time that requests are held back does not count. The request is its `body`: of thousands in
        flight, each a list of its tokens, the collector would go through all."""
        clock, failed = asyncio.get_running_loop().time, Counter[str]()
        deadline_s, pause_s = clock() + self.timeout_s, MIN_PAUSE_S
        while True:
            since_s = clock()
            await self._released.wait()
            deadline_s += clock() - since_s
            if not self.pool.routed:
                await self.until_changed(deadline_s)
                continue
            # Of those that have failed this request least often. To look at a thousand takes 0.1 ms.
            server = min(self.pool.routed, key=lambda name: (failed[name], self._num_in_flight[name]))
            if self.num_in_flight == 0:
                self._answered_s = clock()
            self._num_in_flight[server] += 1
            try:
                answer = await self._ask(self._session, "POST", server, path, answer_type, body, deadline_s)
                self._answered_s = clock()
                if (wrong := fault(answer)) is None:
                    return answer, server
                raise ServerError(f"{server} answered with {wrong}; run the same release of grpo in all three programs")
            except Unreachable as error:
                failed[server] += 1
                if error.gone and not error.late:
                    self.pool.eject(server, str(error))
                if clock() + pause_s > deadline_s:
                    raise self._too_late(server, error) from error
                await asyncio.sleep(random.uniform(0.5, 1.0) * pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
            except ServerError as error:
                if not (self._has_lost(error, version, follows=follows) or self.can_do_without(server, error)):
                    raise
                self.pool.eject(server, str(error))
            finally:
                self._num_in_flight[server] -= 1

    def _too_late(self, server: str, error: Unreachable) -> ServerError:
        """Returns the error of a request that has taken all its time."""
        message = f"{server} did not answer within client.timeout = {self.timeout_s:g} s: {error}; see its log, "
        if not self.pool.routed:
            return ServersAway(message + "or raise client.timeout")
        silent_s = asyncio.get_running_loop().time() - self._answered_s
        if silent_s >= MAX_SILENT * self.timeout_s:
            return ServerError(
                f"{message}raise client.timeout, or ask for less: no request was answered in {silent_s:g} s"
            )
        return TimedOut(message + "raise client.timeout, or lower sampling.max_tokens")

    def _has_lost(self, error: ServerError, version: int | None, *, follows: bool) -> bool:
        """Whether a server does not serve a version that it had proved: it has been restarted."""
        proved = self.pool.versions
        later = follows and version is not None and any(one > version for one in proved)
        return isinstance(error, RequestRefused) and error.kind == "not_live" and (later or version in proved)

    def can_do_without(self, server: str, error: ServerError) -> bool:
        """Whether the fault may be this server's alone, and there are others in the routing."""
        ours = isinstance(error, RequestRefused) and error.kind not in ("", "unauthorized")
        return not ours and any(other != server for other in self.pool.routed)

    async def until_changed(self, deadline_s: float) -> None:
        """Returns when a server is found or readmitted. Raises ServersAway at the deadline, on the loop's clock."""
        try:
            async with asyncio.timeout_at(deadline_s):
                await self.pool.changed.wait()
        except TimeoutError:
            out = sorted(self.pool.out.items())
            why = "; ".join(reason if server in reason else f"{server}: {reason}" for server, reason in out)
            raise ServersAway(
                f"no inference server was in service within client.timeout = {self.timeout_s:g} s: "
                f"{why or self.pool.unknown or 'none is known'}; start grpo-infer, see the servers' logs, mend client."
                "base_url, or raise client.timeout"
            ) from None

    # --- one server ---

    async def info(self, server: str, *, within_s: float = math.inf) -> ServerInfo:
        """Returns what the server says about itself, at the first try. Raises ServerErrors."""
        return await self.once(server, "GET", "/policy/info", ServerInfo, within_s=within_s)

    async def once(
        self,
        server: str,
        method: str,
        path: str,
        answer_type: type[A],
        request: Record | None = None,
        *,
        within_s: float = math.inf,
    ) -> A:
        """The answer of one server at the first try, `within_s` or `client.timeout`; ends when the server is abandoned.
        Raises Unreachable, RequestRefused and ServerError."""
        body = None if request is None else msgspec.json.encode(request)
        deadline_s = asyncio.get_running_loop().time() + min(within_s, self.timeout_s)
        return await self._ask(self._control_session, method, server, path, answer_type, body, deadline_s)

    async def _ask(
        self,
        session: aiohttp.ClientSession,
        method: str,
        server: str,
        path: str,
        answer_type: type[A],
        body: bytes | None,
        deadline_s: float,
    ) -> A:
        timer, clock = asyncio.timeout_at(deadline_s), asyncio.get_running_loop().time
        since_s = clock()
        self._timers[server].add(timer)
        try:
            async with timer:
                status, data, media_type = await self._sent(session, method, server + path, body)
        except TimeoutError as error:
            abandoned = self.pool.out.get(server) if clock() < deadline_s else None
            late = str(error) or f"no answer within {clock() - since_s:.3g} s"
            over = timer.expired() and abandoned is None
            raise Unreachable(abandoned or f"{server}{path}: {late}", late=over) from None
        except aiohttp.ClientResponseError as error:
            raise _no_answer(server + path, error) from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
            raise Unreachable(f"{server}: {error or type(error).__name__}") from error
        finally:
            self._timers[server].discard(timer)
        if status != 200:
            raise self._error(server + path, status, data)
        try:
            return from_body(data, answer_type, media_type)
        except msgspec.MsgspecError as error:
            raise _no_answer(server + path, error) from error

    async def _sent(
        self, session: aiohttp.ClientSession, method: str, url: str, body: bytes | None
    ) -> tuple[int, bytes, str]:
        """Returns status, body and media type of the answer. Where this process has as many files open as it may, that
        is no fault of the server: a connection that ends is waited for."""
        while True:
            try:
                async with session.request(method, url, data=body) as response:
                    return response.status, await response.read(), response.content_type
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                if not self._has_warned:
                    log.warning("requests wait until files can be opened: %s; raise the limit (ulimit -n)", error)
                self._has_warned = True
                await asyncio.sleep(MAX_PAUSE_S)

    def _error(self, where: str, status: int, data: bytes) -> ServerError:
        kind, message = _error_of(data)
        text = f"{where} answered {status}: {message}"
        alone = len(self.pool.servers) == 1
        if kind == "engine_ended" or (kind == "engine" and not alone):  # what has ended may be started again
            return Unreachable(text)
        if status in RETRIED_STATUS and kind not in ("engine", "deadline"):
            return Unreachable(text, gone=False)
        if status == 401:
            text += "; set the variable that client.api_key_var names to the server's API key"
        return RequestRefused(status, kind, text) if 400 <= status < 500 else ServerError(text)


def _no_answer(where: str, error: Exception) -> ServerError:
    return ServerError(f"{where} answered something else than expected: {error}; is it a grpo-infer?")


def _error_of(data: bytes) -> tuple[str, str]:
    """Kind and message of an error's body."""
    try:
        error = msgspec.json.decode(data)["error"]
        return (str(error["type"]), str(error["message"])) if isinstance(error, dict) else ("", str(error))
    except (msgspec.MsgspecError, KeyError, TypeError):
        return "", data[:500].decode(errors="replace") or "nothing"

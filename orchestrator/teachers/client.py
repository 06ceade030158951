"""Asking a teacher over HTTP: a bounded number of requests at a time, retries with growing pauses, deadlines.

A teacher may be down, slow, overloaded or confused for as long as it likes: a row then has a failure with its reason
after at most `timeout_s`, and is counted. One that cannot be reached, itself or behind its proxy, is tried until then,
however often that is: it may be starting again, rows that fail cost their rollouts, and the run must not outpace its
teacher.
"""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import aiohttp
import msgspec

from orchestrator.teachers.answers import BYTES_BESIDE, BYTES_PER_TOKEN, TryAgain, body_of, of_status, text_of
from orchestrator.teachers.endpoints import Endpoint, decoded
from orchestrator.teachers.rows import TeacherCounts, score_rows
from orchestrator.teachers.scoring import FailureReason, Scored, TeacherFailure, TeacherRefused
from orchestrator.teachers.vocabulary import Probe, check_probe
from transport.records import Float32, Int32

FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 10.0
CONNECT_TIMEOUT_S = 10.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    method: str
    path: str
    body: bytes | None = None
    limit_bytes: int = BYTES_BESIDE
    """Of the answer."""


class _Tokenized(msgspec.Struct):
    tokens: list[int]
    token_strs: list[str] | None = None


def pause_s(num_failed: int, *, first_s: float, asked_s: float, draw: float) -> float:
    """Before the try after `num_failed` failed ones: `first_s`, and twice as long each time, of which between half and
    all by `draw` in 0 to 1; at least what the server asks for; never more than MAX_PAUSE_S."""
    growing = min(first_s * 2.0 ** min(num_failed - 1, 16), MAX_PAUSE_S) * (0.5 + 0.5 * draw)
    return min(max(growing, asked_s), MAX_PAUSE_S)


class HttpTeacher:
    """A TeacherClient over one server or several that serve the same teacher."""

    def __init__(
        self,
        servers: Sequence[str] | Callable[[], Sequence[str]],
        endpoint: Endpoint,
        *,
        api_key: str | None = None,
        timeout_s: float = 120.0,
        try_s: float = 60.0,
        retries: int = 4,
        first_pause_s: float = FIRST_PAUSE_S,
        num_parallel: int = 32,
    ) -> None:
        """`servers`: addresses with or without /v1, or a function that gives those in service. `timeout_s`: for a row
        that has its turn, all tries included, and for those that wait for one while nobody gets an answer; `try_s`: for
        one request; what fails for a reason that may pass is tried `retries` times more, first after `first_pause_s`,
        and what cannot be reached until `timeout_s` is over. `num_parallel`: requests at a time, of all calls
        together."""
        if not (timeout_s > 0 and try_s > 0 and retries >= 0 and num_parallel >= 1):
            raise ValueError(
                f"timeout_s, try_s, retries and num_parallel are {timeout_s:g}, {try_s:g}, {retries} and "
                f"{num_parallel}, expected more than 0 twice, at least 0, and at least 1"
            )
        self._servers = servers if callable(servers) else lambda: servers
        known = self._known()
        bad = [server for server in known if not server.startswith(("http://", "https://"))]
        if bad or not (known or callable(servers)):
            raise ValueError(f"the teacher's servers are {known}, expected addresses such as http://127.0.0.1:8000/v1")
        self._endpoint, self._timeout_s, self._try_s, self._retries = endpoint, timeout_s, try_s, retries
        self._first_pause_s = first_pause_s
        self._turns = asyncio.Semaphore(num_parallel)
        self._waiting: set[asyncio.Timeout] = set()
        """Of rows without a turn."""
        self._extended_s = -math.inf
        """When these were last put off."""
        self._num_in_flight: Counter[str] = Counter()
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {api_key}"} if api_key else {}
        )
        self._opened: aiohttp.ClientSession | None = None
        self._longest: int | None = None
        self.counts = TeacherCounts()

    @property
    def name(self) -> str:
        """The model's name, where it has one, and where it is served."""
        model, servers = self._endpoint.model, ", ".join(self._known()) or "no server"
        return f"the teacher at {servers}" if model is None else f"the teacher {model} at {servers}"

    @property
    def longest(self) -> int | None:
        """Tokens of the longest row that all servers can score, by what `inspect` found; None where they do not
        tell."""
        return self._longest

    def metrics(self) -> dict[str, float]:
        """See TeacherClient."""
        return self.counts.metrics()

    async def close(self) -> None:
        """Closes all connections."""
        if self._opened is not None:
            await self._opened.close()
            self._opened = None

    # --- before the run ---

    async def inspect(self) -> None:
        """Asks every server what it serves, and keeps the length of the longest row that all of them can score. Raises
        TeacherRefused for a server that does not have the teacher or does not answer within `timeout_s`."""
        lengths = [
            await self._asked_before(server, _Request(method="GET", path=self._endpoint.about), self._endpoint.longest)
            for server in self._known()
        ]
        self._longest = min((one for one in lengths if one is not None), default=None)

    async def check_vocabulary(self, probes: Sequence[Probe]) -> None:
        """Has every server read the probes, at /tokenize. Raises TeacherRefused where one reads other tokens than the
        policy, does not have that route, or does not answer."""
        for server in self._known():
            for probe in probes:
                wanted = {"prompt": probe.text, "add_special_tokens": False, "return_token_strs": True}
                model = self._endpoint.model
                body = msgspec.json.encode(wanted if model is None else wanted | {"model": model})
                request = _Request(method="POST", path="/tokenize", body=body)
                try:
                    found = await self._asked_before(server, request, lambda data: decoded(data, _Tokenized))
                except TeacherRefused as error:
                    if error.reason in ("refused", "nonsense"):
                        raise TeacherRefused(
                            "other_vocabulary",
                            f"whether the teacher has the policy's tokenizer cannot be told: {error}; name the folder "
                            "of the teacher's tokenizer instead",
                        ) from error
                    raise
                check_probe(probe, found.tokens, found.token_strs, f"the teacher at {server}")

    async def check_scoring(self, token_ids: Int32, temperatures: Sequence[float]) -> None:
        """Has every server score a row at each temperature. Raises TeacherRefused where one cannot."""
        for server in self._known():
            for temperature in temperatures:
                request = self._scoring(token_ids, temperature)
                await self._asked_before(server, request, lambda data: self._endpoint.read(data, token_ids))

    async def _asked_before(self, server: str, request: _Request, read: Callable[[bytes], T]) -> T:
        answer = await self._tried(request, read, servers=lambda: [server])
        if isinstance(answer, TeacherFailure):
            raise TeacherRefused(answer.reason, answer.message)
        return answer

    # --- during the run ---

    async def score(self, rows: Sequence[Int32], temperatures: Sequence[float], *, adapter: int = 0) -> list[Scored]:
        """See TeacherClient."""
        return await score_rows(rows, temperatures, self.counts, self._row)

    async def _row(self, token_ids: Int32, temperature: float) -> Float32 | TeacherFailure:
        if self._longest is not None and len(token_ids) > self._longest:
            return self._failure(
                "too_long", f"a row has {len(token_ids)} tokens, and it scores at most {self._longest}; lower seq_len"
            )
        try:
            request = self._scoring(token_ids, temperature)
        except TeacherRefused as error:
            return self._failure(error.reason, str(error))
        self.counts.num_tokens += len(token_ids)
        return await self._tried(request, lambda data: self._endpoint.read(data, token_ids), servers=self._known)

    def _scoring(self, token_ids: Int32, temperature: float) -> _Request:
        """Raises TeacherRefused for a temperature that cannot be had."""
        body = self._endpoint.request(token_ids, temperature)
        limit_bytes = BYTES_BESIDE + BYTES_PER_TOKEN * len(token_ids)
        return _Request(method="POST", path=self._endpoint.path, body=body, limit_bytes=limit_bytes)

    async def _tried(
        self, request: _Request, read: Callable[[bytes], T], *, servers: Callable[[], list[str]]
    ) -> T | TeacherFailure:
        """The answer as `read` gives it, once there is a turn for it."""
        waiting = asyncio.timeout(self._timeout_s)
        self._waiting.add(waiting)
        try:
            async with waiting:
                await self._turns.acquire()
        except TimeoutError:
            return self._failure("slow", f"no turn, and no answer to anyone within {self._timeout_s:g} s")
        finally:
            self._waiting.discard(waiting)
        try:
            answer = await self._in_turn(request, read, servers)
        finally:
            self._turns.release()
        if not isinstance(answer, TeacherFailure):
            self._let_others_wait()
        return answer

    def _let_others_wait(self) -> None:
        """Who waits for a turn may do so as long as others get answers: the queue may be longer than a deadline."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._extended_s + self._timeout_s / 10:
            return
        self._extended_s = now_s
        for waiting in self._waiting:
            if not waiting.expired():
                waiting.reschedule(now_s + self._timeout_s)

    async def _in_turn(
        self, request: _Request, read: Callable[[bytes], T], servers: Callable[[], list[str]]
    ) -> T | TeacherFailure:
        """The answer, by whichever of `servers` has failed it least and is least loaded, after as many tries as are
        allowed within `timeout_s`. What one server refuses, the others are asked too."""
        failed: Counter[str] = Counter()
        refused: set[str] = set()
        num_tries = 0
        last: TryAgain | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    left = [one for one in servers() if one not in refused]
                    server = min(left, key=lambda one: (failed[one], self._num_in_flight[one]), default=None)
                    try:
                        if server is None:
                            raise TryAgain("down", "none of its servers is in service")
                        return read(await self._once(server, request))
                    except TeacherRefused as error:
                        refused.add(server or "")
                        if not set(servers()) - refused:
                            return self._failure(error.reason, str(error), server)
                        continue
                    except TryAgain as error:
                        last = error
                        failed[server or ""] += 1
                        num_tries += error.reason != "down"
                        if num_tries > self._retries:
                            return self._failure(error.reason, f"{failed.total()} tries, the last: {error}", server)
                    self.counts.num_retries += 1
                    first_s, draw = self._first_pause_s, random.random()
                    await asyncio.sleep(pause_s(failed.total(), first_s=first_s, asked_s=last.pause_s, draw=draw))
        except TimeoutError:
            why = "nothing came" if last is None else f"the last of {failed.total()} tries: {last}"
            return self._failure(
                "slow" if last is None else last.reason, f"no answer within {self._timeout_s:g} s: {why}"
            )

    async def _once(self, server: str, request: _Request) -> bytes:
        """The body of an answer of 200. Raises TryAgain and TeacherRefused."""
        self.counts.num_requests += 1
        self._num_in_flight[server] += 1
        try:
            async with (
                asyncio.timeout(self._try_s),
                self._session().request(
                    request.method, server + request.path, data=request.body, allow_redirects=False
                ) as response,
            ):
                data = await body_of(response, request.limit_bytes)
                if response.status != 200:
                    raise of_status(response.status, request.path, data, response.headers.get("Retry-After"))
                return data
        except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as error:
            raise TryAgain("down", text_of(error)) from None
        except TimeoutError:
            raise TryAgain("slow", f"no answer within {self._try_s:g} s") from None
        except (aiohttp.ClientResponseError, aiohttp.InvalidURL) as error:
            raise TeacherRefused("nonsense", f"it does not answer as HTTP would: {text_of(error)}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise TryAgain("cut_off", text_of(error)) from None
        finally:
            self._num_in_flight[server] -= 1

    def _failure(self, reason: FailureReason, message: str, server: str | None = None) -> TeacherFailure:
        where = self.name if server is None or len(self._known()) < 2 else f"{self.name} ({server})"
        return TeacherFailure(reason=reason, message=f"{where}: {message}")

    def _known(self) -> list[str]:
        return [server.rstrip("/").removesuffix("/v1") for server in self._servers()]

    def _session(self) -> aiohttp.ClientSession:
        if self._opened is None:
            self._opened = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=min(CONNECT_TIMEOUT_S, self._try_s)),
            )
        return self._opened

"""One teacher behind an OpenAI-compatible API: asked politely, and never trusted."""

import asyncio
import json
import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, Literal

import aiohttp

from orchestrator.disagreement.actions import Action, Call
from orchestrator.disagreement.budget import Budget, Price, Reserved, Usage
from orchestrator.disagreement.pacing import Clock, Rest, TokenBucket, pause_s

Sleep = Callable[[float], Awaitable[None]]
Addresses = Callable[[], Sequence[str]]
"""Of servers that serve the same, as they are now."""

Reason = Literal[
    "timeout",
    "unreachable",
    "rate_limited",
    "over_rate",
    "server_error",
    "unauthorized",
    "refused",
    "nonsense",
    "cut_short",
    "withheld",
    "resting",
    "over_budget",
    "broken",
]
"""Why a teacher has no action.

- `timeout`: no answer within its deadline, all tries taken together.
- `unreachable`: nobody there, or the connection was cut.
- `rate_limited`: it wants fewer requests.
- `over_rate`: its rate allows no request before the deadline.
- `server_error`: it says that it failed.
- `unauthorized`: it does not know the key, or the model.
- `refused`: it does not take this question.
- `nonsense`: it answered what is no chat completion.
- `cut_short`: its answer ran into `max_tokens`.
- `withheld`: it gave no answer, by a content filter for example.
- `resting`: it failed too often in a row, and is asked again later.
- `over_budget`: the question may cost more than what is left.
- `broken`: a fault of this program; the message has it.
"""

MAX_ECHO = 300
"""Characters of a provider's answer that a message repeats."""
MAX_ANSWER_BYTES = 4 * 1024 * 1024
TRY_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""HTTP statuses that may be others a moment later."""
_FAULTS: dict[int, Reason] = {401: "unauthorized", 403: "unauthorized", 404: "unauthorized", 429: "rate_limited"}
_NOT_ITS_FAULT = frozenset[Reason]({"over_rate", "refused", "cut_short", "withheld", "over_budget", "broken"})
"""Reasons that say nothing against the provider."""
_OURS = frozenset({"model", "messages", "tools", "stream", "n", "temperature", "max_tokens", "max_completion_tokens"})
"""Fields of a request that have settings of their own, or none."""
_FINISHED = frozenset({"stop", "tool_calls", "function_call", None})


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherEndpoint:
    """Who is asked, and how. Example: ``TeacherEndpoint(name="a", base_url="http://127.0.0.1:8000/v1", model="m")``"""

    name: str
    """In pairs, prices and metrics."""
    base_url: str | Addresses
    """Several are asked in turn."""
    model: str
    api_key_var: str | None = None
    """The environment variable that has the key."""
    temperature: float | None = 0.0
    """None: the provider's own; some take no other."""
    max_tokens: int = 1024
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """What the API calls it."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What else goes into every request."""
    tool_role: Literal["user", "tool"] = "user"
    """As whom tools speak where the policy's calls are in its text: hosted APIs take `tool` only behind calls of their
    own format."""
    price: Price = field(default_factory=Price)
    timeout_s: float = 60.0
    """Deadline of one question, all tries and pauses included."""
    num_retries: int = 3
    first_pause_s: float = 0.5
    max_pause_s: float = 30.0
    requests_per_s: float = 8.0
    burst: int = 8
    failure_threshold: int = 5
    """Failures in a row, after which it rests."""
    cooldown_s: float = 60.0

    def __post_init__(self) -> None:
        if isinstance(self.base_url, str) and not self.base_url.startswith(("http://", "https://")):
            raise ValueError(
                f"teacher {self.name} has base_url {self.base_url!r}, expected an address such as "
                "http://127.0.0.1:8000/v1"
            )
        if not (self.timeout_s > 0 and self.num_retries >= 0 and self.max_tokens >= 1):
            raise ValueError(
                f"teacher {self.name} has timeout_s {self.timeout_s}, num_retries {self.num_retries} and max_tokens "
                f"{self.max_tokens}, expected above 0, at least 0 and at least 1"
            )
        if not 0 < self.first_pause_s <= self.max_pause_s:
            raise ValueError(
                f"teacher {self.name} has pauses of {self.first_pause_s} to {self.max_pause_s} s, expected rising ones "
                "above 0"
            )
        if own := sorted(_OURS & self.extra.keys()):
            raise ValueError(f"teacher {self.name} has {own[0]} in extra, which is for other fields; remove it")
        if self.api_key_var is not None and not os.environ.get(self.api_key_var):
            raise ValueError(
                f"the environment variable {self.api_key_var} is not set, expected the key of teacher {self.name}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What a teacher would do."""

    action: Action
    cost: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NotAnswered:
    """Why it is not known what a teacher would do. Example: ``NotAnswered(reason="timeout", message="...")``"""

    reason: Reason
    message: str
    cost: float = 0.0


class _Failed(Exception):
    """One try came to nothing."""

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        again: bool,
        least_s: float = 0.0,
        billed: bool,
        usage: Usage | None = None,
    ) -> None:
        """`again`: worth another try, `least_s` seconds later at the earliest. `billed`: it may have cost something."""
        super().__init__(message)
        self.reason, self.again, self.least_s, self.billed, self.usage = reason, again, least_s, billed, usage


class Teacher:
    """Asks one endpoint. Its promise: `ask` answers within the deadline, and raises nothing."""

    def __init__(
        self,
        endpoint: TeacherEndpoint,
        session: aiohttp.ClientSession,
        *,
        budget: Budget,
        clock: Clock = time.monotonic,
        sleep: Sleep = asyncio.sleep,
        seed: int = 0,
    ) -> None:
        """`seed` of the jitter."""
        self.endpoint = endpoint
        self._session, self._budget, self._sleep = session, budget, sleep
        fixed = endpoint.base_url
        self._where = f"{fixed.rstrip('/')}/chat/completions" if isinstance(fixed, str) else "the run's own servers"
        self._key = os.environ[endpoint.api_key_var] if endpoint.api_key_var else None
        self._bucket = TokenBucket(endpoint.requests_per_s, burst=endpoint.burst, clock=clock)
        self._rest = Rest(after=endpoint.failure_threshold, cooldown_s=endpoint.cooldown_s, clock=clock)
        self._draw = random.Random(f"{seed}/{endpoint.name}")
        self.num_requests = 0
        """Tries that were sent."""

    @property
    def resting(self) -> bool:
        """Whether it failed so often in a row that it is left alone for now."""
        return self._rest.resting

    async def ask(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        trace: str,
    ) -> Answered | NotAnswered:
        """Its action after `messages`; `trace` is the rollout whose budget pays."""
        if (begun := self._rest.begin()) is None:
            return NotAnswered(
                reason="resting", message=f"{self._where} failed too often in a row, and is asked again later"
            )
        well: bool | None = None
        try:
            answer = await self._within_deadline(messages, tools, trace)
            well = True if isinstance(answer, Answered) else None if answer.reason in _NOT_ITS_FAULT else False
        finally:
            self._rest.end(begun, well)
        return answer

    async def _within_deadline(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, trace: str
    ) -> Answered | NotAnswered:
        costs: list[float] = []
        deadline_s = asyncio.get_running_loop().time() + self.endpoint.timeout_s
        try:
            async with asyncio.timeout_at(deadline_s):
                return await self._tries(self._body(messages, tools), trace, costs, deadline_s)
        except TimeoutError:
            message = f"{self._where}: no answer within {self.endpoint.timeout_s:g} s"
            return NotAnswered(reason="timeout", message=message, cost=sum(costs))
        except _Failed as error:
            return NotAnswered(reason=error.reason, message=self._told(error), cost=sum(costs))
        except Exception as error:  # nothing that a teacher does may end a training
            return NotAnswered(reason="broken", message=f"{type(error).__name__}: {self._told(error)}", cost=sum(costs))

    async def _tries(self, body: bytes, trace: str, costs: list[float], deadline_s: float) -> Answered:
        """Raises _Failed."""
        for tries in range(1, self.endpoint.num_retries + 2):
            await self._turn(deadline_s)
            try:
                action = await self._paid(body, trace, costs)
                return Answered(action=action, cost=sum(costs))
            except _Failed as error:
                if error.least_s:
                    self._bucket.hold(error.least_s)
                if not error.again or tries > self.endpoint.num_retries:
                    raise
                wait_s = pause_s(
                    tries, first_s=self.endpoint.first_pause_s, most_s=self.endpoint.max_pause_s, draw=self._draw
                )
                if asyncio.get_running_loop().time() + max(wait_s, error.least_s) > deadline_s:
                    raise
                await self._sleep(wait_s)
        raise AssertionError("the last try neither answered nor failed")

    async def _turn(self, deadline_s: float) -> None:
        """Returns when the provider's rate allows a request. Raises _Failed where that is after the deadline."""
        if asyncio.get_running_loop().time() + self._bucket.wait_s > deadline_s:
            wait_s = self._bucket.wait_s
            message = f"the rate allows a request in {wait_s:.1f} s, which is after the deadline"
            raise _Failed("over_rate", message, again=False, billed=False)
        if wait_s := self._bucket.take():
            await self._sleep(wait_s)

    async def _paid(self, body: bytes, trace: str, costs: list[float]) -> Action:
        """One try. A request has at most as many prompt tokens as bytes. What ends half-way may have been billed."""
        url = self._url()
        at_most = Usage(prompt_tokens=len(body), completion_tokens=self.endpoint.max_tokens)
        if (reserved := self._budget.reserve(self.endpoint.name, trace, at_most)) is None:
            message = "what is left of the budget does not cover another question, or the rollout is done with"
            raise _Failed("over_budget", message, again=False, billed=False)
        self.num_requests += 1
        settled = _Settled(self._budget, reserved, costs)
        with settled:
            try:
                action, settled.usage = await self._post(url, body)
                return action
            except _Failed as error:
                settled.usage, settled.billed = error.usage, error.billed
                raise

    def _url(self) -> str:
        """Raises _Failed where there is none now."""
        base_url = self.endpoint.base_url
        if not isinstance(base_url, str):
            if not (addresses := base_url()):
                raise _Failed("unreachable", "none of them is in service", again=True, billed=False)
            base_url = addresses[self.num_requests % len(addresses)]
        return f"{base_url.rstrip('/')}/chat/completions"

    def _body(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> bytes:
        told = [_as_told(message, self.endpoint.tool_role) for message in messages]
        body: dict[str, Any] = {
            "model": self.endpoint.model,
            "messages": told,
            self.endpoint.max_tokens_field: self.endpoint.max_tokens,
        }
        if self.endpoint.temperature is not None:
            body["temperature"] = self.endpoint.temperature
        if tools:
            body["tools"] = list(tools)
        return json.dumps(body | dict(self.endpoint.extra)).encode()

    async def _post(self, url: str, body: bytes) -> tuple[Action, Usage | None]:
        """Raises _Failed."""
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            async with self._session.post(url, data=body, headers=headers, allow_redirects=False) as response:
                data = await _read(response)
                if response.status != 200:
                    raise _status_failed(response.status, data, response.headers.get("Retry-After"))
        except aiohttp.ClientConnectorError as error:
            raise _Failed("unreachable", str(error), again=True, billed=False) from error
        except (aiohttp.ClientError, OSError) as error:
            raise _Failed("unreachable", f"{type(error).__name__}: {error}", again=True, billed=True) from error
        return _understood(data)

    def _told(self, error: BaseException) -> str:
        """A message, in which a provider's echo of the key is no key any more."""
        text = f"{self._where}: {error}"
        return text if self._key is None else text.replace(self._key, "***")


class _Settled:
    """Settles what a try cost, however it ends."""

    def __init__(self, budget: Budget, reserved: Reserved, costs: list[float]) -> None:
        self._budget, self._reserved, self._costs = budget, reserved, costs
        self.usage: Usage | None = None
        self.billed = True

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self._costs.append(self._budget.settle(self._reserved, self.usage, billed=self.billed))


# --- what goes out and comes in ---


def _as_told(message: Mapping[str, Any], tool_role: str) -> dict[str, Any]:
    if message.get("role") == "tool" and "tool_call_id" not in message:
        return {**message, "role": tool_role}
    return dict(message)


async def _read(response: aiohttp.ClientResponse) -> bytes:
    data = bytearray()
    async for chunk in response.content.iter_chunked(65536):
        data += chunk
        if len(data) > MAX_ANSWER_BYTES:
            raise _Failed("nonsense", f"an answer of more than {MAX_ANSWER_BYTES} bytes", again=False, billed=True)
    return bytes(data)


def _status_failed(status: int, data: bytes, retry_after: str | None) -> _Failed:
    again = status in TRY_AGAIN
    reason = _FAULTS.get(status, "server_error" if status >= 500 or again else "refused")
    if 300 <= status < 400:
        reason = "nonsense"
    message = f"status {status}: {data[: 4 * MAX_ECHO].decode(errors='replace')[:MAX_ECHO]}"
    least_s = retry_after_s(retry_after, now_s=time.time()) if again else 0.0
    return _Failed(reason, message, again=again, least_s=least_s, billed=False)


def retry_after_s(header: str | None, *, now_s: float) -> float:
    """Seconds that a `Retry-After` header asks for, as a number or as a date (RFC 9110, 10.2.3); 0 where it has
    neither. `now_s` on the wall clock."""
    if not header:
        return 0.0
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(header).timestamp() - now_s
        except (ValueError, OverflowError):
            return 0.0
    return min(max(0.0, seconds), 86400.0) if seconds == seconds else 0.0


def _understood(data: bytes) -> tuple[Action, Usage | None]:
    """The action and what it used. Raises _Failed."""
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError):
        raise _nonsense(data, "no JSON") from None
    if not isinstance(answer, dict):
        raise _nonsense(data, "no object")
    usage = _usage(answer.get("usage"))
    if answer.get("error"):
        raise _Failed("server_error", _echo(answer["error"]), again=True, billed=usage is not None, usage=usage)
    try:
        choice = answer["choices"][0]
        message, finish_reason = choice["message"], choice.get("finish_reason")
        text, calls = message.get("content"), message.get("tool_calls")
        action = Action(text=_checked_text(text), tool_calls=tuple(_call(call) for call in calls or ()))
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise _nonsense(data, str(error) or type(error).__name__, usage) from None
    if finish_reason == "length":
        raise _Failed("cut_short", "the answer ran into max_tokens", again=False, billed=True, usage=usage)
    if finish_reason not in _FINISHED or message.get("refusal"):
        told = f"the answer was withheld: {_echo(message.get('refusal') or finish_reason)}"
        raise _Failed("withheld", told, again=False, billed=True, usage=usage)
    return action, usage


def _checked_text(text: Any) -> str:
    if text is None:
        return ""
    if not isinstance(text, str):
        raise TypeError(f"its content is a {type(text).__name__}")
    text.encode()  # half of a surrogate pair raises
    return text


def _call(call: Any) -> Call:
    function = call["function"]
    name, written = function["name"], function["arguments"]
    arguments = json.loads(written or "{}") if isinstance(written, str) else written
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise TypeError("a tool call is without a name, or its arguments are no object")
    json.dumps([name, arguments], ensure_ascii=False, allow_nan=False).encode()
    return Call(name=name, arguments=arguments)


def _usage(told: Any) -> Usage | None:
    if not isinstance(told, dict):
        return None
    numbers = [told.get("prompt_tokens"), told.get("completion_tokens")]
    if not all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in numbers):
        return None
    return Usage(prompt_tokens=told["prompt_tokens"], completion_tokens=told["completion_tokens"])


def _nonsense(data: bytes, why: str, usage: Usage | None = None) -> _Failed:
    told = f"no chat completion ({why[:MAX_ECHO]}): {data[: 4 * MAX_ECHO].decode(errors='replace')[:MAX_ECHO]}"
    return _Failed("nonsense", told, again=True, billed=True, usage=usage)


def _echo(value: Any) -> str:
    return str(value)[:MAX_ECHO]

"""An OpenAI-compatible endpoint: judges, teachers that are asked for their action, models that write hints.

`openai.AsyncOpenAI` speaks to it, with its retries, its back-off and its reading of Retry-After. What it leaves open is
settled by the transport below it: no redirect is followed, no answer is longer than MAX_ANSWER_BYTES on the wire or
behind it, nothing but what the question needs goes out, and the rate of the requests is limited.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import httpx
import msgspec
import openai
from aiolimiter import AsyncLimiter

MAX_ANSWER_BYTES = 4 * 1024 * 1024
MAX_ECHO = 300
"""Characters of a provider's answer that a message repeats."""
CONNECT_TIMEOUT_S = 10.0
_SENT_HEADERS = ("host", "content-type", "content-length", "accept", "user-agent")
"""No telemetry, no cookies, and no organisation or header that OPENAI_* variables of this machine would add."""

Addresses = Callable[[], Sequence[str]]
"""Base addresses of servers that serve the same, as they are now."""
Reason = Literal[
    "timeout",
    "unreachable",
    "rate_limited",
    "server_error",
    "unauthorized",
    "refused",
    "nonsense",
    "cut_short",
    "withheld",
]
"""Why there is no answer, after all retries.

- `timeout`: none within the deadline of a request; `unreachable`: nobody there, or the connection was cut.
- `rate_limited`: it wants fewer requests; `server_error`: it says that it failed.
- `unauthorized`: it does not know the key, or the model; `refused`: it does not take this question.
- `nonsense`: its answer is no chat completion, is too long or compressed, or leads to another address.
- `cut_short`: the answer ran into `max_tokens`; `withheld`: by a content filter, for example.
"""


class EndpointError(Exception):
    """An endpoint gave no answer. The message is for people, names the endpoint and holds no key."""

    def __init__(self, reason: Reason, message: str, usage: "Usage | None" = None) -> None:
        """`usage` of an answer that cannot be used, where there was one that told."""
        super().__init__(message)
        self.reason: Reason = reason
        self.usage = usage


class Unacceptable(openai.OpenAIError):
    """An answer that no retry mends: openai passes its own errors on as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one request. Example: ``Usage(prompt_tokens=900, completion_tokens=40)``"""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call apart from the text. Example: ``ToolCall(name="look_up", arguments='{"word": "cat"}')``"""

    name: str
    arguments: str
    """As it was sampled; seldom, but at times, no JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """One answer. Example: ``ChatAnswer(text="LOOKUP[cat]")``"""

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    usage: Usage | None = None
    """None where the endpoint does not tell."""


class BoundedTransport(httpx.AsyncBaseTransport):
    """One request and its whole answer within a deadline; no redirect, and no header that only this machine has."""

    def __init__(
        self,
        *,
        api_key: str | None,
        timeout_s: float,
        max_bytes: int = MAX_ANSWER_BYTES,
        num_parallel: int | None = None,
        limiter: AsyncLimiter | None = None,
    ) -> None:
        """`timeout_s` begins when the request may go, by `num_parallel` at a time and by the `limiter`."""
        self._api_key, self._timeout_s, self._max_bytes, self._limiter = api_key, timeout_s, max_bytes, limiter
        self._turns = None if num_parallel is None else asyncio.Semaphore(num_parallel)
        logging.getLogger("httpx").setLevel(logging.WARNING)  # otherwise a line for each request
        self._inner = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=None, keepalive_expiry=60.0))
        self.num_requests = 0
        """Requests that were sent."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Raises httpx.TransportError and Unacceptable."""
        async with nullcontext() if self._turns is None else self._turns:
            if self._limiter is not None:
                await self._limiter.acquire()
            sent = self._ours(request)
            self.num_requests += 1
            try:
                async with asyncio.timeout(self._timeout_s):
                    response = await self._inner.handle_async_request(sent)
                    try:
                        body = await self._body(response)
                    finally:
                        await response.aclose()
            except TimeoutError:
                raise httpx.ReadTimeout(f"no answer within {self._timeout_s:g} s") from None
        return httpx.Response(response.status_code, headers=response.headers, content=body, request=request)

    def url_of(self, request: httpx.Request) -> httpx.URL:
        """Where a request goes. Raises httpx.TransportError."""
        return request.url

    def _ours(self, request: httpx.Request) -> httpx.Request:
        """The request with what it needs and nothing else."""
        url = self.url_of(request)
        headers = {name: request.headers[name] for name in _SENT_HEADERS if name in request.headers}
        headers |= {"host": url.netloc.decode("ascii"), "accept-encoding": "identity"}
        if self._api_key is not None:
            headers["authorization"] = f"Bearer {self._api_key}"
        return httpx.Request(
            request.method, url, headers=headers, content=request.content, extensions=request.extensions
        )

    async def _body(self, response: httpx.Response) -> bytes:
        """The bytes on the wire, which nothing unpacks. Raises Unacceptable where they are too many or compressed."""
        if (encoding := response.headers.get("content-encoding", "identity")) != "identity":
            raise Unacceptable(f"its answer is compressed ({encoding[:20]}), although identity was asked for")
        data = bytearray()
        async for chunk in response.aiter_raw():
            data += chunk
            if len(data) > self._max_bytes:
                raise Unacceptable(f"its answer is longer than {self._max_bytes} bytes")
        return bytes(data)

    async def aclose(self) -> None:
        """Closes all connections."""
        await self._inner.aclose()


class _ChatTransport(BoundedTransport):
    """Servers that take turns."""

    def __init__(self, addresses: Addresses, **settings: Any) -> None:
        super().__init__(**settings)
        self._addresses = addresses

    def url_of(self, request: httpx.Request) -> httpx.URL:
        if not (addresses := self._addresses()):
            raise httpx.ConnectError("none of the servers is in service")
        base = httpx.URL(addresses[self.num_requests % len(addresses)])
        return base.copy_with(path=f"{base.path.rstrip('/')}/chat/completions")


class Endpoint:
    """One model behind `/chat/completions`. It belongs to the event loop in which it is asked first.

    Example: ``await Endpoint("https://api.example.com/v1", "large", api_key_var="A_KEY").chat(messages)``
    """

    def __init__(
        self,
        base_url: str | Addresses,
        model: str,
        *,
        name: str | None = None,
        api_key_var: str | None = None,
        timeout_s: float = 60.0,
        retries: int = 3,
        requests_per_s: float | None = None,
        num_parallel: int = 32,
    ) -> None:
        """`base_url`: an address, or who tells those of servers that take turns. `name`: for people, None for the
        address. `api_key_var`: the environment variable that has the key. `timeout_s`: of one request; what fails for a
        reason that may pass is tried `retries` times more. `requests_per_s`: on average, bursts of a second included;
        None for any. `num_parallel`: requests at a time. Raises ValueError for what cannot be an address, and where the
        key is missing.
        """
        if isinstance(base_url, str):
            _check_address(base_url)
        if not timeout_s > 0 or retries < 0 or num_parallel < 1:
            raise ValueError(
                f"timeout_s, retries and num_parallel are {timeout_s}, {retries} and {num_parallel}, expected more "
                "than 0, at least 0, and at least 1"
            )
        self.name = name or (base_url if isinstance(base_url, str) else "the run's own servers")
        if api_key_var is not None and not os.environ.get(api_key_var):
            raise ValueError(f"the environment variable {api_key_var} is not set, expected the key of {self.name}")
        self._key = os.environ[api_key_var] if api_key_var else None
        self.model = model
        burst = max(1.0, requests_per_s or 0.0)
        self._transport = _ChatTransport(
            (lambda: (base_url,)) if isinstance(base_url, str) else base_url,
            api_key=self._key,
            timeout_s=timeout_s,
            num_parallel=num_parallel,
            limiter=None if requests_per_s is None else AsyncLimiter(burst, burst / requests_per_s),
        )
        self._client = openai.AsyncOpenAI(
            base_url="http://endpoint.invalid",  # the transport knows where
            api_key="unused",  # the transport has it
            max_retries=retries,
            timeout=httpx.Timeout(None, connect=min(CONNECT_TIMEOUT_S, timeout_s)),
            http_client=httpx.AsyncClient(transport=self._transport, follow_redirects=False, trust_env=False),
        )

    @property
    def num_requests(self) -> int:
        """Requests that were sent, retries included."""
        return self._transport.num_requests

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> ChatAnswer:
        """The answer to `messages`. `options` are further fields of the request, such as `temperature` and
        `max_tokens`; those that are None are left out. Raises EndpointError."""
        body = {"model": self.model, "messages": list(messages), "tools": list(tools) if tools else None} | options
        body = {name: value for name, value in body.items() if value is not None}
        try:
            response = await self._client.post("/chat/completions", cast_to=httpx.Response, body=body)
            return _understood(self._masked(response.content))
        except EndpointError as error:
            raise EndpointError(error.reason, self._told(error), error.usage) from None
        except Unacceptable as error:
            raise EndpointError("nonsense", self._told(error)) from None
        except openai.APITimeoutError as error:
            raise EndpointError("timeout", self._told(error.__cause__ or error)) from None
        except openai.APIConnectionError as error:
            raise EndpointError("unreachable", self._told(error.__cause__ or error)) from None
        except openai.APIStatusError as error:
            told = f"status {error.status_code}: {_shown(self._masked(error.response.content))}"
            raise EndpointError(_reason(error.status_code), self._told(told)) from None
        except (TypeError, ValueError, RecursionError, openai.OpenAIError) as error:
            raise EndpointError("refused", self._told(f"{type(error).__name__}: {error}")) from None

    async def close(self) -> None:
        """Closes all connections."""
        await self._client.close()

    def _told(self, error: object) -> str:
        return f"{self.name}: {error}" if str(error) else f"{self.name}: {type(error).__name__}"

    def _masked(self, data: bytes) -> bytes:
        """An answer in which an echo of the key is no key any more."""
        return data if self._key is None else data.replace(self._key.encode(), b"***")


def _check_address(base_url: str) -> None:
    """Raises ValueError. What may be a secret is not repeated."""
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL:
        url = httpx.URL("")
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"base_url is {base_url!r}, expected an address such as http://127.0.0.1:8000/v1")
    if url.userinfo or url.query or url.fragment:
        raise ValueError(
            f"the base_url at {url.host} has a user, a query or a fragment, expected an address such as "
            "http://127.0.0.1:8000/v1; give a key by api_key_var"
        )


def _shown(data: bytes) -> str:
    return data[: 4 * MAX_ECHO].decode(errors="replace")[:MAX_ECHO]


def _reason(status: int) -> Reason:
    if status in (401, 403, 404):
        return "unauthorized"
    if status == 429:
        return "rate_limited"
    if status < 400:
        return "nonsense"
    return "server_error" if status >= 500 or status in (408, 409, 425) else "refused"


# --- the answer ---


class _Function(msgspec.Struct):
    name: str
    arguments: str = "{}"


class _Call(msgspec.Struct):
    function: _Function


class _Message(msgspec.Struct):
    content: str | None = None
    tool_calls: list[_Call] | None = None
    refusal: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: Any = None


def _understood(data: bytes) -> ChatAnswer:
    """Raises EndpointError."""
    try:
        completion = msgspec.json.decode(data, type=_Completion)
        choice = completion.choices[0]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, IndexError) as error:
        raise EndpointError("nonsense", f"no chat completion ({str(error)[:MAX_ECHO]}): {_shown(data)}") from None
    message, usage = choice.message, _usage(completion.usage)
    if choice.finish_reason == "length":
        raise EndpointError("cut_short", "the answer ran into max_tokens", usage)
    if choice.finish_reason not in ("stop", "tool_calls", "function_call", None) or message.refusal:
        why = (message.refusal or choice.finish_reason or "")[:MAX_ECHO]
        raise EndpointError("withheld", f"it withheld its answer: {why}", usage)
    return ChatAnswer(
        text=message.content or "",
        tool_calls=tuple(
            ToolCall(name=one.function.name, arguments=one.function.arguments) for one in message.tool_calls or ()
        ),
        usage=usage,
    )


def _usage(told: Any) -> Usage | None:
    try:
        numbers = msgspec.convert(told, dict[str, Any])
        prompt, completion = numbers["prompt_tokens"], numbers["completion_tokens"]
    except (msgspec.ValidationError, KeyError):
        return None
    if not all(type(number) is int and number >= 0 for number in (prompt, completion)):
        return None
    return Usage(prompt_tokens=prompt, completion_tokens=completion)

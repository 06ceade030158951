"""Models behind HTTP that are not the run's own: judges, teachers, models that write hints.

`openai.AsyncOpenAI` speaks to them, with its retries, its back-off and its reading of Retry-After. Below it, each try
has a deadline and keeps to a rate, sends no header that only concerns this machine, follows no redirect, and goes to
one of the servers that serve the same, in turn, leaving out those that have just failed.
"""

import asyncio
import itertools
import json
import logging
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import httpx
from aiolimiter import AsyncLimiter
from grpo.configs.auxiliary import ApiSettings
from grpo.orchestrator.rollouts.messages import ModelResponse

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion

MAX_ECHO = 300
"""An error message repeats so many characters of a server's answer."""
CONNECT_TIMEOUT_S = 10.0
PASSED_OVER_S = 5.0
"""A server that has failed is left out so long if others serve the same."""
NUM_PARALLEL = 32
MAX_REQUESTS_PER_S = 1e6
_ANY = "http://any.invalid"
"""Stands for the address until `send` chooses one."""
_SENT_HEADERS = ("content-type", "content-length", "accept", "accept-encoding", "user-agent")
"""Leaves out telemetry, cookies, and what openai would add from OPENAI_* variables of this machine."""

A = TypeVar("A")
Addresses = Callable[[], Sequence[str]]
"""Returns the base addresses, without /v1, of the servers that serve the same now."""
Reason = Literal["timeout", "unreachable", "error", "refused", "nonsense", "withheld", "over_budget"]
"""Why there is no answer, after all retries.

- `timeout`: none within the deadline of a request; `unreachable`: nobody there, or the connection was cut.
- `error`: it says that it failed, or wants fewer requests; `refused`: it does not take this key, model or question.
- `nonsense`: its answer is not what was asked for, or leads to another address.
- `withheld`: the answer ran into `max_tokens`, or a content filter kept it back.
- `over_budget`: the ceiling of the costs has been reached, and nobody was asked.
"""


class EndpointError(Exception):
    """An endpoint gave no answer. The message names the endpoint and holds no key."""

    def __init__(self, reason: str, message: str) -> None:
        """`reason`: a `Reason`, or one of the caller's own."""
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True, kw_only=True)
class Costs:
    """Spending so far and its ceiling, in the currency of the prices. Nothing is asked once the ceiling is reached.
    Requests in flight when it is reached may still exceed it."""

    ceiling: float = math.inf
    spent: float = 0.0


class ApiClient(httpx.AsyncClient):
    """Requests to servers that serve the same. Every failure is an EndpointError whose message does not hold the key.

    openai's client sends each of its tries through this one.
    """

    def __init__(
        self,
        addresses: Addresses,
        *,
        api_key: str | None,
        retries: int,
        timeout_s: float,
        num_parallel: int = NUM_PARALLEL,
        requests_per_s: float = MAX_REQUESTS_PER_S,
    ) -> None:
        """`timeout_s` is for one try with its whole answer. It begins when the try may be sent: `num_parallel` are sent
        at a time, and `requests_per_s` on average, with bursts of a second's."""
        from openai import AsyncOpenAI  # here, because it takes half a second, and most runs ask nobody

        super().__init__(
            timeout=httpx.Timeout(None, connect=min(CONNECT_TIMEOUT_S, timeout_s)),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=60.0),
            trust_env=False,
        )
        for name in ("httpx", "openai"):
            logging.getLogger(name).setLevel(logging.WARNING)  # otherwise a line for each request
        self._addresses, self._key, self._timeout_s = addresses, api_key, timeout_s
        self._slots, burst = asyncio.Semaphore(num_parallel), max(1.0, requests_per_s)
        self._limiter = AsyncLimiter(burst, burst / requests_per_s)
        self._failed_s: defaultdict[str, float] = defaultdict(lambda: -math.inf)
        """Time of the last failure by address."""
        self.num_requests = 0
        """Requests that were sent, retries included."""
        self.newest_failure = ""
        """Address and reason of the newest failed try, for people."""
        self._openai = AsyncOpenAI(
            base_url=_ANY,
            api_key="unused",  # `send` adds the key
            max_retries=retries,
            timeout=self.timeout,
            http_client=self,
        )

    async def fetch(self, url: str, *, retries: int) -> bytes:
        """Returns what is at `url`, a whole address. Raises EndpointError."""
        request = self._openai.get(url, cast_to=httpx.Response, options={"max_retries": retries})
        return (await self._understood(request)).content

    async def ask(self, path: str, body: Mapping[str, Any], cast_to: type[A]) -> A:
        """Posts `body` to any of the servers and returns the answer. Raises EndpointError."""
        return await self._understood(self._openai.post(_ANY + path, cast_to=cast_to, body=body))

    def shown(self, text: object) -> str:
        """Returns the beginning of a server's text for an error message, without the key."""
        return (str(text) if self._key is None else str(text).replace(self._key, "***"))[:MAX_ECHO]

    async def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        """Sends one try of openai's. Raises httpx.TransportError."""
        async with self._slots, self._limiter:
            address = str(request.url)
            if request.url.host == httpx.URL(_ANY).host:
                address = self._next_address()
                request.url = httpx.URL(address.rstrip("/") + request.url.raw_path.decode("ascii"))
            headers = {name: request.headers[name] for name in _SENT_HEADERS if name in request.headers}
            headers["host"] = request.url.netloc.decode("ascii")
            if self._key is not None:
                headers["authorization"] = f"Bearer {self._key}"
            request.headers = httpx.Headers(headers)
            self.num_requests += 1
            try:
                async with asyncio.timeout(self._timeout_s):
                    response = await super().send(request, **options)
            except (TimeoutError, httpx.TransportError) as error:
                late = isinstance(error, TimeoutError)
                failure = httpx.ReadTimeout(f"no answer within {self._timeout_s:g} s") if late else error
                self._failed(address, f"{type(failure).__name__}: {failure}")
                raise failure from None
            if response.status_code >= 500:
                self._failed(address, f"status {response.status_code}: {self.shown(response.text)}")
            return response

    def _next_address(self) -> str:
        if not (addresses := self._addresses()):
            raise httpx.ConnectError("none of the servers is in service")
        since_s = time.monotonic() - PASSED_OVER_S
        healthy = [one for one in addresses if self._failed_s[one] < since_s] or addresses
        return healthy[self.num_requests % len(healthy)]

    def _failed(self, address: str, reason: str) -> None:
        self._failed_s[address], self.newest_failure = time.monotonic(), f"{address}: {reason}"

    async def _understood(self, request: Awaitable[A]) -> A:
        import openai

        try:
            return await request
        except openai.APIConnectionError as error:
            reason = "timeout" if isinstance(error, openai.APITimeoutError) else "unreachable"
            message = f"{type(error.__cause__).__name__}: {error.__cause__}"
        except openai.APIStatusError as error:
            code, message = error.status_code, f"status {error.status_code}: {self.shown(error.response.text)}"
            passing = code >= 500 or code in (408, 409, 425, 429)
            reason = "nonsense" if code < 400 else "error" if passing else "refused"
        except (ValueError, RecursionError, openai.OpenAIError) as error:
            reason, message = "nonsense", f"its answer cannot be read: {self.shown(repr(error))}"
        raise EndpointError(reason, message)


class ApiModel:
    """One model behind `/chat/completions`. It belongs to the event loop that uses it first.

    Example: ``await ApiModel(ApiSettings(name="a", base_url="https://a.example.com/v1", model="large")).ask(messages)``
    """

    def __init__(
        self,
        settings: ApiSettings,
        costs: Costs | None = None,
        *,
        num_parallel: int = NUM_PARALLEL,
        own_servers: Addresses = tuple,
        own_key_var: str | None = None,
        own_model: str = "",
    ) -> None:
        """`num_parallel`: requests at a time. Without a `base_url` the run's `own_servers` are asked for the base model
        `own_model`, with the key in `own_key_var`. Raises ValueError for what cannot be an address, and for a missing
        key."""
        self.settings, self.name, self.costs = settings, settings.name, costs or Costs()
        self.num: Counter[str] = Counter()
        """Questions that were `asked`, `answered`, or failed, by reason."""
        self._own_model = own_model
        base_url = settings.base_url
        if base_url is not None:
            _check_address(base_url)
        key_var = own_key_var if base_url is None else settings.api_key_var
        key = os.environ.get(key_var, "").strip() if key_var is not None else None
        if key == "":
            raise ValueError(f"the environment variable {key_var} is not set, expected the key of {self.name}")
        addresses: Addresses = own_servers if base_url is None else lambda: [base_url]
        self._path = "/v1/chat/completions" if base_url is None else "/chat/completions"
        self._client = ApiClient(
            addresses,
            api_key=key,
            retries=settings.retries,
            timeout_s=settings.timeout_s,
            num_parallel=num_parallel,
            requests_per_s=settings.requests_per_s,
        )

    @property
    def num_requests(self) -> int:
        """Requests that were sent, retries included."""
        return self._client.num_requests

    async def ask(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> ModelResponse:
        """Returns the answer to `messages`. `options` replace fields of the request that the settings give, such as
        `temperature` and `max_tokens`; None leaves a field out. Raises EndpointError."""
        self.num["asked"] += 1
        settings = self.settings
        body: dict[str, Any] = {"model": settings.model or self._own_model, "messages": list(messages)}
        body |= {"tools": list(tools or ()) or None, "temperature": settings.temperature}
        body |= {settings.max_tokens_field: settings.max_tokens} | settings.extra | options
        try:
            completion = await self._completion({key: value for key, value in body.items() if value is not None})
            answer = self._chat_answer(completion)
        except EndpointError as error:
            self.num[error.reason] += 1
            raise EndpointError(error.reason, f"{self.name}: {error}") from None
        self.num["answered"] += 1
        return answer

    async def _completion(self, body: dict[str, Any]) -> "ChatCompletion":
        """Adds to the costs what the server counted, or else the most that question and answer can be: a token a byte.
        Raises EndpointError."""
        from openai.types.chat import ChatCompletion

        if self.costs.spent >= self.costs.ceiling:
            raise EndpointError("over_budget", "the ceiling of the costs has been reached")
        completion, price = await self._client.ask(self._path, body, ChatCompletion), self.settings.price
        usage = getattr(completion, "usage", None)
        prompt, sampled = getattr(usage, "prompt_tokens", None), getattr(usage, "completion_tokens", None)
        if not (isinstance(prompt, int) and isinstance(sampled, int) and min(prompt, sampled) >= 0):
            prompt, sampled = len(json.dumps(body)), self.settings.max_tokens
        self.costs.spent += (prompt * price.prompt + sampled * price.completion) / 1e6
        return completion

    def _chat_answer(self, completion: "ChatCompletion") -> ModelResponse:
        """Checks the completion, which openai reads without checking. Raises EndpointError."""
        shown = self._client.shown
        try:
            choice = completion.choices[0]
            text, refusal, finish_reason = choice.message.content or "", choice.message.refusal, choice.finish_reason
            functions: list[Any] = [vars(one)["function"] for one in choice.message.tool_calls or ()]
            calls = tuple((one.name, one.arguments or "{}") for one in functions)
            "".join([text, *itertools.chain(*calls)]).encode()
            tokens = tuple(
                (str(one.token), float(one.logprob)) for one in getattr(choice.logprobs, "content", None) or ()
            )
            token_ids = tuple(int(one) for one in getattr(choice, "token_ids", None) or ())
        except (AttributeError, KeyError, TypeError, ValueError, IndexError):  # half of a surrogate pair is no text
            raise EndpointError("nonsense", f"no chat completion: {shown(completion)}") from None
        if finish_reason not in ("stop", "tool_calls", "function_call", None) or refusal:
            raise EndpointError("withheld", f"it withheld its answer: {shown(refusal or finish_reason)}")
        return ModelResponse(text=text, tool_calls=calls, tokens=tokens, token_ids=token_ids)

    async def policy_info(self) -> dict[str, Any]:
        """Returns what a `grpo-infer` says about itself; empty for other servers."""
        server = (self.settings.base_url or "").rstrip("/").removesuffix("/v1")
        try:
            info = json.loads(await self._client.fetch(f"{server}/policy/info", retries=self.settings.retries))
        except (EndpointError, ValueError):
            return {}
        return info if isinstance(info, dict) else {}

    async def close(self) -> None:
        """Closes all connections."""
        await self._client.aclose()


def _check_address(base_url: str) -> None:
    """Raises ValueError, whose message repeats nothing that may be a secret."""
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL:
        url = httpx.URL("")
    if not url.host or url.userinfo or url.query or url.fragment:
        raise ValueError(
            f"a base_url, of the host {url.host!r}, is no address, or has a user, a query or a fragment; expected one "
            "such as http://127.0.0.1:8000/v1, and a key by api_key_var"
        )

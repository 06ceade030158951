"""Models beside the policy: judges, revisers, opponents. They belong to rubrics and episodes, and are never trained."""

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from orchestrator.episodes.arena import Arena, CallFailed, current_arena
from orchestrator.episodes.messages import Message, checked_messages

if TYPE_CHECKING:
    import aiohttp

FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
TRY_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
"""HTTP statuses that may be others a moment later."""
MAX_ECHO = 300
"""Characters of a server's answer that an error repeats."""


class InferenceClient(ABC):
    """Someone who answers messages."""

    @abstractmethod
    async def complete(
        self, messages: Sequence[Message], *, temperature: float = 0.0, max_tokens: int | None = None
    ) -> str:
        """The answer's text. Raises CallFailed."""

    async def close(self) -> None:  # noqa: B027 (most hold nothing)
        """Gives back what it holds."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class MockClient(InferenceClient):
    """Says what it was given, for tests and for trying things out.

    Example: ``MockClient(["yes", "no"])`` says yes, no, yes, ...; ``MockClient(lambda messages: "yes")``
    """

    def __init__(self, responses: Sequence[str] | Callable[[list[dict[str, Any]]], str]) -> None:
        """`responses` in turn, from the first again after the last, or a function of the messages."""
        if not callable(responses) and (isinstance(responses, str) or not responses):
            raise ValueError(f"responses are {responses!r}, expected a list of at least one text, or a function")
        self._responses = responses
        self.asked: list[list[dict[str, Any]]] = []
        """All messages that it was given."""

    async def complete(
        self, messages: Sequence[Message], *, temperature: float = 0.0, max_tokens: int | None = None
    ) -> str:
        self.asked.append(checked_messages(messages))
        if callable(self._responses):
            return self._responses(self.asked[-1])
        return self._responses[(len(self.asked) - 1) % len(self._responses)]


class OwnClient(InferenceClient):
    """The model that is trained, by our own servers: as it was before training (`base`), or as it is now (`policy`)."""

    def __init__(self, arena: Arena | None = None, model: Literal["base", "policy"] = "base") -> None:
        """`arena`: None for that of the rollout whose code asks."""
        if model not in ("base", "policy"):
            raise ValueError(f"model is {model!r}, expected base or policy")
        self._arena, self._model = arena, model

    async def complete(
        self, messages: Sequence[Message], *, temperature: float = 0.0, max_tokens: int | None = None
    ) -> str:
        arena = self._arena or current_arena.get(None)
        if arena is None:
            raise CallFailed(
                f"the model {self._model} was asked outside of an episode; give the environment an episode, such as "
                "SingleTurnEpisode, or ask another model"
            )
        return await arena.ask(messages, model=self._model, temperature=temperature, max_tokens=max_tokens)


class OpenAIClient(InferenceClient):
    """Any server that speaks OpenAI's chat completions.

    Example: ``OpenAIClient("https://api.openai.com/v1", "gpt-4o-mini", api_key_var="OPENAI_API_KEY")``
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key_var: str | None = None,
        timeout_s: float = 60.0,
        retries: int = 3,
        num_parallel: int = 32,
    ) -> None:
        """`api_key_var`: the environment variable that has the key. `timeout_s`: for one try; what fails for a reason
        that may pass is tried `retries` times more, with growing pauses. `num_parallel`: requests at a time; others
        wait for their turn first, which is no part of `timeout_s`, but of the run's `reward_timeout_s`.

        Raises ValueError for what cannot be an address, and where the key is missing.
        """
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url is {base_url!r}, expected an address such as http://127.0.0.1:8000/v1")
        if not timeout_s > 0 or retries < 0 or num_parallel < 1:
            raise ValueError(
                f"timeout_s, retries and num_parallel are {timeout_s}, {retries} and {num_parallel}, expected more "
                "than 0, at least 0, and at least 1"
            )
        if api_key_var is not None and not os.environ.get(api_key_var):
            raise ValueError(f"the environment variable {api_key_var} is not set, expected the key for {base_url}")
        self._url, self._model = f"{base_url.rstrip('/')}/chat/completions", model
        self._headers = {"Authorization": f"Bearer {os.environ[api_key_var]}"} if api_key_var else {}
        self._timeout_s, self._retries, self._num_parallel = timeout_s, retries, num_parallel
        self._session: aiohttp.ClientSession | None = None
        self._turns = asyncio.Semaphore(num_parallel)

    async def complete(
        self, messages: Sequence[Message], *, temperature: float = 0.0, max_tokens: int | None = None
    ) -> str:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": checked_messages(messages),
            "temperature": temperature,
        }
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        pause_s, problem = FIRST_PAUSE_S, ""
        for tries_left in range(self._retries, -1, -1):
            try:
                return _text_of(await self._post(body), self._url)
            except _TryAgain as error:
                problem, least_s = str(error), error.pause_s
            if tries_left:
                await asyncio.sleep(min(max(pause_s, least_s), MAX_PAUSE_S))
                pause_s *= 2
        raise CallFailed(f"{self._url} failed {self._retries + 1} times, the last time so: {problem}")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session, self._turns = None, asyncio.Semaphore(self._num_parallel)  # another loop may come

    async def _post(self, body: Mapping[str, Any]) -> Any:
        """The server's JSON. Raises _TryAgain and CallFailed."""
        import aiohttp

        try:
            async with self._turns, self._opened().post(self._url, json=body) as response:
                if response.status == 200:
                    return await response.json(content_type=None)
                text = (await response.text(errors="replace"))[:MAX_ECHO]
                problem = f"status {response.status}: {text}"
                if response.status not in TRY_AGAIN:
                    raise CallFailed(f"{self._url}: {problem}")
                raise _TryAgain(problem, _seconds(response.headers.get("Retry-After")))
        except TimeoutError:
            raise _TryAgain(f"no answer within {self._timeout_s:g} s") from None
        except (aiohttp.ClientError, ValueError) as error:
            raise _TryAgain(f"{type(error).__name__}: {error}") from None

    def _opened(self) -> "aiohttp.ClientSession":
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=self._timeout_s),
                connector=aiohttp.TCPConnector(limit=0),  # a wait in there would count as the server's
            )
        return self._session


class _TryAgain(Exception):
    def __init__(self, message: str, pause_s: float = 0.0) -> None:
        """`pause_s`: what the server asks for."""
        super().__init__(message)
        self.pause_s = pause_s


def client_of(args: Mapping[str, Any] | str) -> InferenceClient:
    """The client that an environment's arguments name: `base`, `policy`, `{"mock": ["yes", "no"]}`, or
    `{"base_url": "http://127.0.0.1:8000/v1", "model": "judge", "api_key_var": "JUDGE_KEY"}`, with what else
    OpenAIClient takes. Raises ValueError."""
    if args == "base" or args == "policy":
        return OwnClient(model="base" if args == "base" else "policy")
    if isinstance(args, Mapping) and set(args) == {"mock"}:
        return MockClient(args["mock"])
    if isinstance(args, Mapping) and {"base_url", "model"} <= set(args):
        try:
            return OpenAIClient(**args)
        except TypeError as error:
            raise ValueError(f"a model is {dict(args)!r}: {error}") from None
    raise ValueError(f"a model is {args!r}, expected base, policy, a mapping with base_url and model, or one with mock")


def _text_of(answer: Any, url: str) -> str:
    try:
        content = answer["choices"][0]["message"]["content"]
    except (TypeError, KeyError, IndexError):
        content = None
    if not isinstance(content, str):
        raise CallFailed(f"{url} answered {str(answer)[:MAX_ECHO]}, expected choices with a message's content")
    return content


def _seconds(header: str | None) -> float:
    try:
        return max(0.0, float(header or 0))
    except ValueError:
        return 0.0

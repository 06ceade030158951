"""Models beside the policy: judges, revisers, opponents. They belong to rubrics and episodes, and are never trained."""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from grpo.orchestrator.rollouts.clock import waiting
from grpo.orchestrator.rollouts.context import CallFailed, RolloutContext, current_context
from grpo.orchestrator.rollouts.messages import Message, ModelResponse, checked_messages


class InferenceClient(ABC):
    """A model that answers messages."""

    @abstractmethod
    async def complete(
        self, messages: Sequence[Message], *, temperature: float = 0.0, max_tokens: int | None = None
    ) -> str:
        """Returns the answer's text. Raises CallFailed."""

    async def respond(
        self, messages: Sequence[Message], *, temperature: float = 0.0, max_tokens: int | None = None
    ) -> ModelResponse:
        """Returns the answer with its tokens and the policy's version, as far as they are known. Raises CallFailed."""
        return ModelResponse(text=await self.complete(messages, temperature=temperature, max_tokens=max_tokens))

    async def close(self) -> None:  # noqa: B027 (most hold nothing)
        """Closes its connections."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class MockClient(InferenceClient):
    """Gives prepared answers, for tests and for trying things out.

    Example: ``MockClient(["yes", "no"])`` says yes, no, yes, ...; ``MockClient(lambda messages: "yes")``
    """

    def __init__(self, responses: Sequence[str] | Callable[[list[dict[str, Any]]], str]) -> None:
        """`responses` in turn, from the first again after the last, or a function of the messages."""
        if not callable(responses) and (isinstance(responses, str) or not responses):
            raise ValueError(f"responses are {responses!r}, expected a list of at least one text, or a function")
        self._responses = responses
        self.asked: list[list[dict[str, Any]]] = []
        """The messages of each question."""

    async def complete(
        self, messages: Sequence[Message], *, temperature: float = 0.0, max_tokens: int | None = None
    ) -> str:
        self.asked.append(checked_messages(messages))
        if callable(self._responses):
            return self._responses(self.asked[-1])
        return self._responses[(len(self.asked) - 1) % len(self._responses)]


class OwnClient(InferenceClient):
    """Asks our own servers for the model that is trained: before training (`base`), or as it is now (`policy`)."""

    def __init__(self, ctx: RolloutContext | None = None, model: Literal["base", "policy"] = "base") -> None:
        """`ctx`: None takes that of the rollout whose code asks."""
        if model not in ("base", "policy"):
            raise ValueError(f"model is {model!r}, expected base or policy")
        self._ctx, self._model = ctx, model

    async def complete(
        self, messages: Sequence[Message], *, temperature: float = 0.0, max_tokens: int | None = None
    ) -> str:
        ctx = self._ctx or current_context.get(None)
        if ctx is None:
            raise CallFailed(
                f"the model {self._model} was asked outside of a rollout; ask it in an episode or a reward function"
            )
        return await ctx.ask(messages, model=self._model, temperature=temperature, max_tokens=max_tokens)


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
        """`api_key_var`: the environment variable that has the key. `timeout_s`: for one try; what may pass is tried up
        to `retries` times more, with growing pauses. `num_parallel`: requests at a time; others wait for their turn.
        Neither counts as the environment's time.

        Raises ValueError for what cannot be an address, and for a missing key.
        """
        from grpo.configs.auxiliary import ApiSettings  # these take most of a worker's start
        from grpo.orchestrator.endpoints import ApiModel

        settings = ApiSettings(
            name=re.sub(r"[^\w.-]+", "-", urlsplit(base_url).hostname or "model"),
            base_url=base_url,
            model=model,
            api_key_var=api_key_var,
            timeout_s=timeout_s,
            retries=retries,
            requests_per_s=1e6,
        )
        self._open = partial(ApiModel, settings, num_parallel=num_parallel)
        self._endpoint: ApiModel = self._open()
        self._may_be_ours = True
        """Whether the server may be a grpo-infer."""

    @classmethod
    def for_local(cls, port: int = 8000, model: str = "default", **options: Any) -> Self:
        """Asks a server on this machine, such as `grpo-infer`, with the key in VLLM_API_KEY if that is set."""
        key_var = "VLLM_API_KEY" if os.environ.get("VLLM_API_KEY") else None
        return cls(f"http://127.0.0.1:{port}/v1", model, api_key_var=key_var, **options)

    @classmethod
    def for_openrouter(cls, model: str = "openai/gpt-4o-mini", **options: Any) -> Self:
        """Asks OpenRouter, with the key in OPENROUTER_API_KEY. Raises ValueError if there is none."""
        return cls("https://openrouter.ai/api/v1", model, api_key_var="OPENROUTER_API_KEY", **options)

    @classmethod
    def for_openai(cls, model: str = "gpt-4o-mini", **options: Any) -> Self:
        """Asks OpenAI, with the key in OPENAI_API_KEY. Raises ValueError if there is none."""
        return cls("https://api.openai.com/v1", model, api_key_var="OPENAI_API_KEY", **options)

    async def complete(
        self, messages: Sequence[Message], *, temperature: float = 0.0, max_tokens: int | None = None
    ) -> str:
        return (await self._ask(messages, temperature=temperature, max_tokens=max_tokens)).text

    async def respond(
        self, messages: Sequence[Message], *, temperature: float = 0.0, max_tokens: int | None = None
    ) -> ModelResponse:
        version = await self.policy_version()
        own = {} if version is None else {"return_token_ids": True}  # others may refuse what they do not know
        answer = await self._ask(messages, temperature=temperature, max_tokens=max_tokens, logprobs=True, **own)
        return replace(answer, version=version)

    async def policy_version(self) -> int | None:
        """Returns the newest policy version that a `grpo-infer` serves; None for other servers."""
        if not self._may_be_ours:
            return None
        live = (await self._endpoint.policy_info()).get("live")
        self._may_be_ours = isinstance(live, dict)
        return max(map(int, live), default=0) if isinstance(live, dict) else None

    async def _ask(self, messages: Sequence[Message], **options: Any) -> ModelResponse:
        from grpo.orchestrator.endpoints import EndpointError

        checked = checked_messages(messages)
        try:
            with waiting():
                return await self._endpoint.ask(checked, **options)
        except EndpointError as error:
            raise CallFailed(str(error)) from None

    async def close(self) -> None:
        closed, self._endpoint = self._endpoint, self._open()  # for another event loop
        await closed.close()


def client_of(args: Mapping[str, Any] | str) -> InferenceClient:
    """Returns the client that an environment's arguments name: `base`, `policy`, `{"mock": ["yes", "no"]}`, or
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

"""An OpenAI-compatible endpoint for each rollout: agents of any framework see a server, and the policy answers them.

It listens on 127.0.0.1 in the environment's worker. Each rollout has an address and a key of its own; what is sampled
through them are calls of the rollout's context, so that tokens, masks and versions are recorded as always.
"""

import asyncio
import contextvars
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from grpo.orchestrator.rollouts.clock import together
from grpo.orchestrator.rollouts.context import ContextFull, RolloutContext
from grpo.orchestrator.rollouts.messages import shown, text_of
from grpo.orchestrator.rollouts.parsers import Parser
from grpo.orchestrator.rollouts.state import Reply
from grpo.orchestrator.rollouts.tool_calls import UNKNOWN_TOOL, parse_tagged

if TYPE_CHECKING:
    from aiohttp import web

SPEAKER_HEADER = "X-Session-ID"
"""Which of a rollout's speakers asks; see `Endpoint.speakers`."""
KEY_HEADER = "X-Grpo-Key"
"""Has the key where a client cannot put it into `Authorization`."""
CONTEXT_FULL = "context_length_exceeded"
"""The error code that clients of OpenAI's API know."""
SHARED = "all"
MAX_BODY_BYTES = 1 << 28
MAX_ANSWERS = 128
"""Answers of one request."""

_HEEDED = {"messages", "prompt", "tools", "tool_choice", "n", "max_tokens", "max_completion_tokens", "temperature"}
_HEEDED |= {"logprobs", "stream", "stream_options"}
_SILENT = {"model", "seed", "user", "metadata", "store", "service_tier", "safety_identifier"}
_SILENT |= {"prompt_cache_key", "prompt_cache_retention"}
"""Keys that do not change the answer's words."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "typical_p": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "best_of": (1,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "skip_special_tokens": (True,),
    "add_generation_prompt": (True,),
}
"""Keys that would change the distribution or the form of answers, and the values with which they do not."""

_OF_TEMPLATE = ("chat_template_kwargs", "enable_thinking", "reasoning_effort")
"""Keys that would change how messages are written, which the run's settings say for all requests."""

THINKING = Parser()


class BadRequest(ValueError):
    """A request that cannot be served."""


@dataclass(slots=True, kw_only=True)
class Endpoint:
    """The address of the policy for agents of one rollout. Example: ``AsyncOpenAI(base_url=..., api_key=...)``"""

    base_url: str
    """`http://127.0.0.1:PORT/NUMBER/v1`"""
    api_key: str
    ctx: RolloutContext
    role: str
    """The role that answers."""
    speakers: dict[str, str | None] = field(default_factory=dict)
    """The roles of others, by what their requests have for `X-Session-ID`; for rollouts with several agents. None: the
    policy answers, and nothing of it is trained."""
    failure: BaseException | None = None
    """The error of the newest call that failed. An episode may raise it if the agent says nothing about it."""
    full: bool = False
    """The context had no room for another answer."""
    answering: "set[asyncio.Task[Any]]" = field(default_factory=set)
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    """The rollout's own, whose clock stands still while it waits for an answer."""
    _num_untrained: int = 0
    _written: dict[tuple[str, tuple[str, ...]], str] = field(default_factory=dict)
    """Answers as they were sampled, by the text and the ids of calls that stand for them in a client's history."""
    _texts: list[list[dict[str, str]]] = field(default_factory=list)
    """Raw prompts with their answers."""

    async def chat(self, body: Mapping[str, Any], role: str | None) -> dict[str, Any]:
        """Returns the answer of `/chat/completions`. Raises BadRequest, and what the context raises."""
        if not isinstance(body.get("messages"), list) or not body["messages"]:
            raise BadRequest("the request has no messages")
        if body.get("tool_choice") not in (None, "auto", "none"):
            raise BadRequest(f"the request has tool_choice = {body['tool_choice']!r}, expected auto or none")
        messages = [self._plain(message) for message in body["messages"]]
        tools = None if body.get("tool_choice") == "none" else body.get("tools") or None
        replies = await self._sampled(body, role, messages, tools=tools, raw=False)
        choices = [self._chat_choice(reply, place, tools is not None) for place, reply in enumerate(replies)]
        return {"object": "chat.completion", "choices": choices, "usage": _usage(replies)}

    async def complete(self, body: Mapping[str, Any], role: str | None) -> dict[str, Any]:
        """Returns the answer of `/completions`. Raises BadRequest, and what the context raises."""
        prompt = body.get("prompt")
        if not isinstance(prompt, str) or not prompt:
            raise BadRequest(f"the request has prompt = {str(prompt)[:200]!r}, expected a text")
        if role is None:
            raise BadRequest("an agent that is not trained asks for a raw completion; ask in messages")
        known = max((one for one in self._texts if prompt.startswith(_joined(one))), key=len, default=[])
        messages = [*known, {"role": "user", "content": prompt[len(_joined(known)) :]}]
        replies = await self._sampled(body, role, messages, tools=None, raw=True)
        self._texts += [[*messages, {"role": "assistant", "content": reply.text}] for reply in replies]
        choices = [
            {
                "index": place,
                "text": reply.text,
                "finish_reason": reply.finish_reason,
                "logprobs": _text_logprobs(reply),
            }
            for place, reply in enumerate(replies)
        ]
        return {"object": "text_completion", "choices": choices, "usage": _usage(replies)}

    async def _sampled(
        self,
        body: Mapping[str, Any],
        role: str | None,
        messages: list[dict[str, str]],
        *,
        tools: list[dict[str, Any]] | None,
        raw: bool,
    ) -> list[Reply]:
        """Returns as many answers as the request wants, all sampled at the same time."""
        _check(body)
        max_tokens, temperature = body.get("max_completion_tokens") or body.get("max_tokens"), body.get("temperature")
        if role is None:
            if tools is not None:
                raise BadRequest("an agent that is not trained has tools, which only a trained role can call")
            answers = [
                self.ctx.ask(messages, model="policy", temperature=temperature or 0.0, max_tokens=max_tokens)
                for _ in range(body.get("n") or 1)
            ]
            first, texts = self._num_untrained + 1, await together(answers)
            self._num_untrained += len(texts)
            return [
                Reply(role="", messages=(), text=text, finish_reason="stop", num_tokens=0, index=-number)
                for number, text in enumerate(texts, first)
            ]
        return await together(
            self.ctx.sample(
                role,
                messages,
                tools=tools,
                max_tokens=max_tokens,
                temperature=temperature,
                raw=raw,
                logprobs=body.get("logprobs") not in (None, False),
            )
            for _ in range(body.get("n") or 1)
        )

    # --- chat messages ---

    def _chat_choice(self, reply: Reply, place: int, with_tools: bool) -> dict[str, Any]:
        content, calls = self._calls(reply) if with_tools else (reply.text, [])
        self._written[content, tuple(call["id"] for call in calls)] = reply.text
        logprobs = [
            {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
            for token, logprob in reply.tokens
        ]
        return {
            "index": place,
            "message": {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {}),
            "finish_reason": "tool_calls" if calls else reply.finish_reason,
            "logprobs": {"content": logprobs} if logprobs else None,
        }

    def _calls(self, reply: Reply) -> tuple[str, list[dict[str, Any]]]:
        """The answer without its calls, and these. What is no well-formed call stays in the text and is marked; one
        that is only thought of stays there too."""
        said = THINKING.behind(reply).lstrip()
        parsed = parse_tagged(said, {})
        wrong = next((call for call in parsed.errors if call.error_kind != UNKNOWN_TOOL), None)
        if wrong is not None:
            self.ctx.state.mark_error(wrong.error_kind, wrong.error_kind, wrong.message, index=reply.index)
            return reply.text, []
        calls = [_call_of(call.text, f"call_{reply.index}_{place}") for place, call in enumerate(parsed.calls)]
        return (reply.text[: len(reply.text) - len(said)] + parsed.content, calls) if calls else (reply.text, [])

    def _plain(self, message: Any) -> dict[str, str]:
        """A client's message as chat templates have it: an answer of ours as it was sampled, its calls in its text."""
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise BadRequest(f"a message is {str(message)[:200]}, expected an object with role and content")
        content, calls = text_of(message.get("content")), message.get("tool_calls") or []
        if message["role"] != "assistant":
            return {"role": message["role"].replace("developer", "system"), "content": content}
        written = self._written.get((content, tuple(str(call.get("id")) for call in calls)))
        return {"role": "assistant", "content": _as_written(content, calls) if written is None else written}


def _check(body: Mapping[str, Any]) -> None:
    for name, value in body.items():
        if (
            name in _HEEDED | _SILENT
            or value is None
            or value in NEUTRAL.get(name, ())
            or (name not in NEUTRAL and not value)
        ):
            continue
        mend = "leave it out, and set chat_template_kwargs of the run" if name in _OF_TEMPLATE else "leave it out"
        raise BadRequest(
            f"the request sets {name} = {str(value)[:200]}, which the policy cannot be sampled and trained with; {mend}"
        )
    if not isinstance(num := body.get("n") or 1, int) or not 1 <= num <= MAX_ANSWERS:
        raise BadRequest(f"the request asks for n = {shown(num)} answers, expected 1 to {MAX_ANSWERS}")
    if not isinstance(body.get("stream_options") or {}, Mapping):
        raise BadRequest(f"the request has stream_options = {shown(body['stream_options'])}, expected an object")


def _call_of(written: str, call_id: str) -> dict[str, Any]:
    """A call in OpenAI's form, of one that was found to be well formed."""
    call = json.loads(written.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    about = {"name": call["name"], "arguments": json.dumps(call.get("arguments", {}))}
    return {"id": call_id, "type": "function", "function": about}


def _as_written(content: str, calls: Sequence[Mapping[str, Any]]) -> str:
    """An answer that was not sampled here, such as one of an example in a prompt."""
    written = [
        f'<tool_call>\n{{"name": {json.dumps(call["function"]["name"])}, "arguments": {call["function"]["arguments"]}}}'
        "\n</tool_call>"
        for call in calls
    ]
    return "\n".join([*([content] if content else []), *written])


def _joined(messages: Sequence[Mapping[str, str]]) -> str:
    return "".join(message["content"] for message in messages)


def _usage(replies: Sequence[Reply]) -> dict[str, int]:
    prompt, completion = replies[0].num_prompt_tokens, sum(reply.num_tokens for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _text_logprobs(reply: Reply) -> dict[str, Any] | None:
    if not reply.tokens:
        return None
    tokens, logprobs = [token for token, _ in reply.tokens], [logprob for _, logprob in reply.tokens]
    offsets = [sum(map(len, tokens[:place])) for place in range(len(tokens))]
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}


# --- HTTP ---


class _Server:
    """The endpoints of this process, for as long as there are any."""

    def __init__(self) -> None:
        self.endpoints: dict[str, Endpoint] = {}
        self.num_served, self.num_users = 0, 0
        self.key = secrets.token_urlsafe(24)
        from aiohttp import web  # most workers serve no agents

        self._web = web
        self._app = web.Application(client_max_size=MAX_BODY_BYTES)
        self._app.router.add_post("/{number}/v1/{kind:chat/completions|completions}", self._answer)
        self._runner = web.AppRunner(
            self._app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True
        )  # who has gone receives no answer, and what nobody received is not trained
        self._starting = asyncio.get_running_loop().create_task(self._start(), context=contextvars.Context())

    async def address(self) -> str:
        """Returns the address, once the server listens."""
        await asyncio.shield(self._starting)
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _start(self) -> None:
        await self._runner.setup()
        await self._web.TCPSite(self._runner, "127.0.0.1", 0).start()

    async def stop(self) -> None:
        await asyncio.wait([self._starting])
        await self._runner.cleanup()

    def _asked(self, request: "web.Request") -> Endpoint | None:
        """The endpoint that a request is for, where its key is right."""
        number, speaker = request.match_info["number"], request.headers.get(SPEAKER_HEADER, "")
        if number == SHARED:
            endpoint = next((one for one in self.endpoints.values() if speaker in one.speakers), None)
        else:
            endpoint = self.endpoints.get(number)
        key = request.headers.get(KEY_HEADER) or request.headers.get("Authorization", "").removeprefix("Bearer ")
        expected = self.key if number == SHARED or endpoint is None else endpoint.api_key
        is_right = secrets.compare_digest(key.encode(errors="surrogateescape"), expected.encode())
        return endpoint if is_right else None

    async def _answer(self, request: "web.Request") -> "web.Response":
        if (endpoint := self._asked(request)) is None:
            return _refused(401, "the api_key is not that of a running rollout at this base_url", "invalid_api_key")
        try:
            body = await request.json()
            assert isinstance(body, dict)
        except (ValueError, AssertionError, RecursionError, LookupError):  # LookupError: an unknown charset
            return _refused(400, "the request's body is no JSON object", "invalid_json")
        role = endpoint.speakers.get(request.headers.get(SPEAKER_HEADER, ""), endpoint.role)
        make = endpoint.chat if request.match_info["kind"] == "chat/completions" else endpoint.complete
        answering = asyncio.get_running_loop().create_task(make(body, role), context=endpoint.context)
        endpoint.answering.add(answering)
        try:
            made = await answering
        except ContextFull as error:
            endpoint.full = True
            return _refused(400, f"{CONTEXT_FULL}: {error}", CONTEXT_FULL)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            endpoint.failure = error
            return _refused(400, f"{type(error).__name__}: {error}", "not_answered")
        finally:
            endpoint.answering.discard(answering)
        made |= {"id": f"cmpl-{secrets.token_hex(8)}", "created": int(time.time()), "model": body.get("model", "")}
        if not body.get("stream"):
            return self._web.json_response(made)
        with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        events = [json.dumps(event) for event in _events(made, with_usage)]
        return self._web.Response(
            text="".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]), content_type="text/event-stream"
        )


def _refused(status: int, message: str, code: str) -> "web.Response":
    """Not to be tried again, which a status of 500 and above would tell clients to do."""
    from aiohttp import web

    error = {"message": message, "type": "invalid_request_error", "code": code}
    return web.json_response({"error": error}, status=status)


def _events(made: Mapping[str, Any], with_usage: bool) -> Iterator[dict[str, Any]]:
    """An answer as the events of a stream: each choice whole, then why it ended."""
    is_chat = made["object"] == "chat.completion"
    about = {**made, "object": "chat.completion.chunk" if is_chat else made["object"], "usage": None}
    for choice in made["choices"]:
        begun = {key: value for key, value in choice.items() if key != "message"} | {"finish_reason": None}
        ended = {"index": choice["index"], "finish_reason": choice["finish_reason"]}
        if is_chat:
            calls = [{"index": n, **call} for n, call in enumerate(choice["message"].get("tool_calls", []))]
            begun["delta"] = {**choice["message"], **({"tool_calls": calls} if calls else {})}
        yield {**about, "choices": [begun]}
        ended["delta" if is_chat else "text"] = {} if is_chat else ""
        yield {**about, "choices": [ended]}
    if with_usage:
        yield {**about, "choices": [], "usage": made["usage"]}


_servers: dict[asyncio.AbstractEventLoop, _Server] = {}


@asynccontextmanager
async def _server() -> AsyncIterator[_Server]:
    loop = asyncio.get_running_loop()
    if (server := _servers.get(loop)) is None:
        server = _servers[loop] = _Server()
    server.num_users += 1
    try:
        yield server
    finally:
        server.num_users -= 1
        if not server.num_users:
            del _servers[loop]
            await server.stop()


@asynccontextmanager
async def endpoint_of(ctx: RolloutContext, role: str | None = None) -> AsyncIterator[Endpoint]:
    """An OpenAI-compatible endpoint of one rollout, for as long as it is entered, for agents that take a `base_url` and
    an `api_key`. Its answers are those of `ctx.sample`, for `role` (None: the first).

    Example::

        async with endpoint_of(ctx) as endpoint:
            client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    """
    async with _server() as server:
        server.num_served += 1
        number = str(server.num_served)
        endpoint = server.endpoints[number] = Endpoint(
            base_url="",
            api_key=secrets.token_urlsafe(24),
            ctx=ctx,
            role=role or next(iter(ctx.roles)),
        )
        try:
            endpoint.base_url = f"{await server.address()}/{number}/v1"
            yield endpoint
        finally:
            del server.endpoints[number]
            left = list(endpoint.answering)
            for task in left:
                task.cancel()
            if left:
                await asyncio.wait(left)  # their answers are withdrawn before the rollout can end


@asynccontextmanager
async def shared_endpoint() -> AsyncIterator[tuple[str, dict[str, str]]]:
    """One `base_url` for all rollouts of this process, and the headers that a request needs: for libraries whose agents
    cannot have an address for each rollout. A request names one of a running rollout's `endpoint_of(...).speakers` in
    its header `X-Session-ID`; whose it is says which rollout it belongs to."""
    async with _server() as server:
        yield f"{await server.address()}/{SHARED}/v1", {KEY_HEADER: server.key}

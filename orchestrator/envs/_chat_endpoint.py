"""Chat completions on a local port for other people's programs: they see an OpenAI-compatible server, and what answers
them is a rollout's ctx.

Knows nothing about who asks: a request names its seat in a header, and a seat belongs to one rollout.
"""

import asyncio
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from orchestrator.rollouts.context import ContextFull, RolloutContext
from orchestrator.rollouts.state import EpisodeState
from orchestrator.rollouts.tool_calls import UNKNOWN_TOOL, parse_tagged

SEAT_HEADER = "X-Session-ID"
KEY_HEADER = "X-Grpo-Key"
CONTEXT_FULL = "context_length_exceeded"
"""The error code that clients of OpenAI's API know."""

_MAX_BODY_BYTES = 1 << 28
_SERVED = frozenset(
    [
        "messages",
        "tools",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "stream",
        "stream_options",
        "n",
        "tool_choice",
        "model",
        "seed",
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
    ]
)
"""What is heeded or checked, and what says nothing of the answer's words."""
_DISTRIBUTION: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "typical_p": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
}
"""What would change the distribution that answers are drawn from, and the values with which it does not."""
_FORM: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "skip_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "length_penalty": (1,),
    "best_of": (1,),
}
"""What would change an answer's form in a way that nothing here can, and the values with which it does not."""
NEUTRAL = _DISTRIBUTION | _FORM
"""Of the settings that are refused, the values that say nothing."""
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class BadRequest(ValueError):
    """A request that no seat can answer."""


@dataclass(slots=True, kw_only=True)
class Seat:
    """One participant of one rollout, whose messages are answered by the policy."""

    role: str
    trained: bool
    """Otherwise the policy answers, and nothing of it is trained."""
    ctx: RolloutContext
    state: EpisodeState
    failure: BaseException | None = None
    """Why a call came to nothing."""
    full: bool = False
    """The context had no room for another answer."""
    num_asked: int = 0
    answering: set[asyncio.Task[Any]] = field(default_factory=set)
    _written: dict[tuple[str, tuple[str, ...]], str] = field(default_factory=dict)
    """Answers as they were sampled, by the text and the ids of calls that stand for them in a client's history."""

    async def answer(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A chat completion. Raises BadRequest, and what the ctx raises."""
        _check(body)
        messages = [self._plain(message) for message in body["messages"]]
        tools, max_tokens = body.get("tools") or None, body.get("max_completion_tokens") or body.get("max_tokens")
        text, finish_reason, num_tokens, index = await self._sampled(messages, tools, max_tokens, body)
        content, calls = (text, []) if tools is None else self._calls(text, index)
        self._written[content, tuple(call["id"] for call in calls)] = text
        message = {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else finish_reason}
        usage = {"prompt_tokens": 0, "completion_tokens": num_tokens, "total_tokens": num_tokens}
        return {"choices": [choice], "usage": usage}

    async def _sampled(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        max_tokens: int | None,
        body: Mapping[str, Any],
    ) -> tuple[str, str, int, int]:
        """(text, why it ended, its tokens, its place in the trajectory)."""
        if self.trained:
            reply = await self.ctx.sample(self.role, messages, tools=tools, max_tokens=max_tokens)
            return reply.text, reply.finish_reason, reply.num_tokens, reply.index
        if tools is not None:
            raise BadRequest(f"{self.role} is not trained and has tools, which only a trained role can call")
        temperature = body.get("temperature")
        text = await self.ctx.ask(
            messages,
            model="policy",
            temperature=0.0 if temperature is None else float(temperature),
            max_tokens=max_tokens,
        )
        self.num_asked += 1
        return text, "stop", 0, -self.num_asked

    def _plain(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A client's message as chat templates have it: an answer of ours as it was sampled, its calls in its text."""
        content = text_of(message.get("content"))
        calls = message.get("tool_calls") or []
        if message["role"] != "assistant":
            return {"role": message["role"], "content": content}
        written = self._written.get((content, tuple(str(call.get("id")) for call in calls)))
        return {"role": "assistant", "content": _as_written(content, calls) if written is None else written}

    def _calls(self, text: str, index: int) -> tuple[str, list[dict[str, Any]]]:
        """The answer without its calls, and these. What is no well-formed call stays in the text and is marked."""
        parsed = parse_tagged(text, {})
        wrong = next((call for call in parsed.errors if call.error_kind != UNKNOWN_TOOL), None)
        if wrong is not None:
            self.state.mark_error(wrong.error_kind, wrong.error_kind, wrong.message, index=index)
            return text, []
        calls = [_call_of(call.text, f"call_{index}_{place}") for place, call in enumerate(parsed.calls)]
        return (parsed.content, calls) if calls else (text, [])


def text_of(content: Any) -> str:
    """The text of a message's content, which may come in parts. Raises BadRequest for what is no text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and all(
        isinstance(part, Mapping) and part.get("type") == "text" for part in content
    ):
        return "".join(str(part["text"]) for part in content)
    raise BadRequest(
        f"a message's content is {str(content)[:200]}, expected text; images and sound cannot be trained on"
    )


def _check(body: Mapping[str, Any]) -> None:
    if not isinstance(body.get("messages"), list) or not body["messages"]:
        raise BadRequest("the request has no messages")
    for name, value in body.items():
        if name in _SERVED or value is None or value in NEUTRAL.get(name, ()) or (name not in NEUTRAL and not value):
            continue
        why = "what is trained cannot be sampled with" if name in _DISTRIBUTION else "cannot be served here"
        raise BadRequest(f"the request sets {name} = {str(value)[:200]}, which {why}; leave it out")
    if body.get("n") not in (None, 1):
        raise BadRequest(f"the request asks for n = {body['n']} answers, expected 1")
    if body.get("tool_choice") not in (None, "auto"):
        raise BadRequest(f"the request has tool_choice = {body['tool_choice']!r}, expected auto")


def _call_of(written: str, call_id: str) -> dict[str, Any]:
    """A call in OpenAI's form, of one that was found to be well formed."""
    call = json.loads(written.removeprefix(_OPEN).removesuffix(_CLOSE))
    about = {"name": call["name"], "arguments": json.dumps(call.get("arguments", {}))}
    return {"id": call_id, "type": "function", "function": about}


def _as_written(content: str, calls: Sequence[Mapping[str, Any]]) -> str:
    """An answer that was not sampled here, such as one of an example in a prompt."""
    written = [_call_as_written(call["function"]) for call in calls]
    return "\n".join([*([content] if content else []), *written])


def _call_as_written(function: Mapping[str, Any]) -> str:
    return f'{_OPEN}\n{{"name": {json.dumps(function["name"])}, "arguments": {function["arguments"]}}}\n{_CLOSE}'


class ChatEndpoint:
    """`POST /v1/chat/completions` on 127.0.0.1, for those who hold its key."""

    def __init__(self) -> None:
        self.key = secrets.token_urlsafe(16)
        self._seats: dict[str, Seat] = {}
        self.base_url = ""
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Binds a free port."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_post("/v1/chat/completions", self._complete)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.base_url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    def take(self, seat_id: str, seat: Seat) -> None:
        """Requests whose `SEAT_HEADER` is `seat_id` are the seat's from now on."""
        self._seats[seat_id] = seat

    def leave(self, seat_id: str) -> None:
        """Answers no more of the seat's requests, and ends what is being answered: a client that is gone would leave it
        running."""
        for task in self._seats.pop(seat_id).answering:
            task.cancel()

    async def close(self) -> None:
        """Ends what is being answered."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _complete(self, request: web.Request) -> web.Response:
        if not secrets.compare_digest(request.headers.get(KEY_HEADER, ""), self.key):
            return _refused(401, f"{KEY_HEADER} is missing or wrong", "unauthorized")
        body = await request.json()
        seat = self._seats.get(request.headers.get(SEAT_HEADER, ""))
        if seat is None:
            return _refused(400, f"{SEAT_HEADER} names no running rollout", "unknown_seat")
        task = asyncio.current_task()
        assert task is not None
        seat.answering.add(task)
        try:
            made = await seat.answer(body)
        except asyncio.CancelledError:
            raise
        except ContextFull as error:
            seat.full = True
            return _refused(400, f"{CONTEXT_FULL}: {error}", CONTEXT_FULL)
        except BaseException as error:  # the rollout raises it, where its client cannot go on without an answer
            seat.failure = error
            return _refused(400, f"{type(error).__name__}: {error}", "not_answered")
        finally:
            seat.answering.discard(task)
        about = {"id": f"chatcmpl-{secrets.token_hex(8)}", "created": int(time.time()), "model": body.get("model", "")}
        if body.get("stream"):
            return web.Response(body=_events(about, made), content_type="text/event-stream")
        return web.json_response({**about, "object": "chat.completion", **made})


def _refused(status: int, message: str, code: str) -> web.Response:
    """Not to be tried again, which a status of 500 and above would tell clients to do."""
    error = {"message": message, "type": "invalid_request_error", "code": code}
    return web.json_response({"error": error}, status=status)


def _events(about: Mapping[str, Any], made: Mapping[str, Any]) -> bytes:
    """A completion as server-sent events: all of the answer in one of them."""
    choice = made["choices"][0]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(delta["tool_calls"])]
    parts: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
        {"choices": [], "usage": made["usage"]},
    ]
    events = [json.dumps({**about, "object": "chat.completion.chunk", **part}) for part in parts]
    return "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]).encode()

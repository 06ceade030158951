"""A fake server of chat completions that says what it is told to say, and otherwise what its model would do."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

Say = Callable[[web.Request], Awaitable[web.StreamResponse]]


class FakeChatServer:
    """Every model is another one."""

    def __init__(self) -> None:
        self.does: dict[str, Callable[[list[dict[str, Any]]], str]] = defaultdict(lambda: lambda messages: "X")
        """What a model does after messages."""
        self.says: defaultdict[str, list[Say]] = defaultdict(list)
        """What a model says before that, one by one."""
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []
        """Headers and body of each."""
        self.base_url = ""

    def num_requests(self, model: str) -> int:
        """Requests to that model."""
        return sum(body["model"] == model for _, body in self.requests)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """The route."""
        body = await request.json()
        self.requests.append((dict(request.headers), body))
        if says := self.says[body["model"]]:
            return await says.pop(0)(request)
        return completion(self.does[body["model"]](body["messages"]))


def completion(content: Any, *, finish_reason: str | None = "stop", **message: Any) -> web.Response:
    """An answer that took 100,000 tokens to read and 10,000 to write."""
    choice = {"message": {"role": "assistant", "content": content, **message}, "finish_reason": finish_reason}
    return web.json_response(
        {"choices": [choice], "usage": {"prompt_tokens": 100_000, "completion_tokens": 10_000, "total_tokens": 110_000}}
    )


def says(response: Callable[[], web.Response]) -> Say:
    """A response."""

    async def say(request: web.Request) -> web.StreamResponse:
        return response()

    return say


def status(number: int, text: str = "", **headers: str) -> Say:
    """A status with a text; `Retry_After="1"` is a header."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return says(lambda: web.Response(status=number, text=text, headers=named))


def text(written: str) -> Say:
    """A text as if it were JSON."""
    return says(lambda: web.Response(text=written, content_type="application/json"))


async def slow(request: web.Request) -> web.StreamResponse:
    """Nothing for long."""
    await asyncio.sleep(30)
    return completion("late")


async def dripping(request: web.Request) -> web.StreamResponse:
    """A byte at a time."""
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b" ")
        await asyncio.sleep(0.01)


async def cut(request: web.Request) -> web.StreamResponse:
    """Half an answer, and the connection ends."""
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"choices": [{"mess')
    assert request.transport is not None
    request.transport.close()
    return response


@asynccontextmanager
async def chat_serving() -> AsyncIterator[FakeChatServer]:
    """The server, at its `base_url`."""
    fake, app = FakeChatServer(), web.Application()
    app.router.add_post("/v1/chat/completions", fake.answer)
    async with TestServer(app) as running:
        fake.base_url = f"http://127.0.0.1:{running.port}/v1"
        yield fake

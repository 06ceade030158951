"""A fake server of teachers that says what it is told to say, and otherwise what its model would do."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from orchestrator.disagreement.channel import DisagreementChannel
from orchestrator.disagreement.teachers import TeacherEndpoint
from tests.orchestrator.fakes import until

Say = Callable[[web.Request], Awaitable[web.StreamResponse]]


class FakeTeachers:
    """Speaks chat completions. Every model is another teacher."""

    def __init__(self) -> None:
        self.does: dict[str, Callable[[list[dict[str, Any]]], str]] = defaultdict(lambda: lambda messages: "X")
        """What a model does after messages."""
        self.says: defaultdict[str, list[Say]] = defaultdict(list)
        """What a model says before that, one by one."""
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.base_url = ""

    def num_requests(self, model: str) -> int:
        return sum(body["model"] == model for _, body in self.requests)

    def endpoint(self, name: str, **settings: Any) -> TeacherEndpoint:
        """Of the model with that name, with pauses that no test waits for."""
        known: dict[str, Any] = {"base_url": self.base_url, "model": name, "timeout_s": 5.0, "requests_per_s": 10_000.0}
        return TeacherEndpoint(name=name, **(known | {"first_pause_s": 0.001, "max_pause_s": 0.002} | settings))

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append((dict(request.headers), body))
        if says := self.says[body["model"]]:
            return await says.pop(0)(request)
        return completion(self.does[body["model"]](body["messages"]))


def completion(content: Any, *, finish_reason: str | None = "stop", **message: Any) -> web.Response:
    choice = {"message": {"role": "assistant", "content": content, **message}, "finish_reason": finish_reason}
    return web.json_response(
        {"choices": [choice], "usage": {"prompt_tokens": 100_000, "completion_tokens": 10_000, "total_tokens": 110_000}}
    )


def says(response: Callable[[], web.Response]) -> Say:
    async def say(request: web.Request) -> web.StreamResponse:
        return response()

    return say


def status(number: int, text: str = "", **headers: str) -> Say:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return says(lambda: web.Response(status=number, text=text, headers=named))


def text(written: str) -> Say:
    return says(lambda: web.Response(text=written, content_type="application/json"))


async def slow(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(30)
    return completion("late")


async def cut(request: web.Request) -> web.StreamResponse:
    """Half an answer, and the connection ends."""
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"choices": [{"mess')
    assert request.transport is not None
    request.transport.close()
    return response


async def hung_up(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


@asynccontextmanager
async def teachers_serving() -> AsyncIterator[FakeTeachers]:
    fake, app = FakeTeachers(), web.Application()
    app.router.add_post("/v1/chat/completions", fake.answer)
    async with TestServer(app) as running:
        fake.base_url = f"http://127.0.0.1:{running.port}/v1"
        yield fake


async def drained(channel: DisagreementChannel) -> None:
    """Returns when nothing is left to be asked."""
    await until(lambda: not channel.num_turns_waiting)

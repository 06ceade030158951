"""A stand-in for a teacher's server, and everything that one may do instead of answering."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Self

from aiohttp import web
from grpo.transport.ports import free_port

Fault = Callable[[web.Request], Awaitable[web.StreamResponse | None]]
"""Another answer than the good one, or None for the good one after all."""


class FakeTeacher:
    """A server whose log-probability of a token is -token / 100: a grpo-infer, or a vLLM that serves the teacher by the
    name of `model`; with the routes of both where `ours` is None."""

    def __init__(self, *, ours: bool | None = None, **changes: Any) -> None:
        self.ours = ours
        self.fault: Fault | None = None
        """Of requests for scores."""
        self.asked: list[dict[str, Any]] = []
        self.info: dict[str, Any] = {"max_model_len": 16}
        self.model = "large"
        self.api_key: str | None = None
        self.num_busy = 0
        """So many of the next requests of any kind are answered with 503."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        for name, value in changes.items():
            assert hasattr(self, name)
            setattr(self, name, value)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Self]:
        """Listens meanwhile."""
        app = web.Application(middlewares=[self._guarded])
        if self.ours is not False:
            app.add_routes([web.get("/policy/info", self._info), web.post("/policy/score", self._counted)])
        if self.ours is not True:
            app.add_routes([web.get("/v1/models", self._models), web.post("/v1/completions", self._counted)])
        runner = web.AppRunner(app, shutdown_timeout=0.05)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        yield self
        await runner.cleanup()

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.num_busy > 0:
            self.num_busy -= 1
            return web.Response(status=503, text="loading the model")
        if self.api_key is not None and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        response: web.StreamResponse = await handler(request)
        return response

    async def _info(self, _: web.Request) -> web.Response:
        return web.json_response(self.info)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.model, "max_model_len": 16}]})

    async def _counted(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.asked.append(body)
        answer = await self.fault(request) if self.fault else None
        return answer or self._score(body)

    def _score(self, body: dict[str, Any]) -> web.Response:
        if "token_ids" in body:
            scores = [-token / 100 for token in body["token_ids"][1:]]
            return web.json_response({"version": body["version"], "logprobs": scores})
        entries = [None] + [{str(token): {"logprob": -token / 100, "rank": 1}} for token in body["prompt"][1:]]
        choice = {"prompt_logprobs": entries, "prompt_token_ids": body["prompt"]}
        return web.json_response({"choices": [choice]})


# --- instead of scores ---


def answering(status: int, **more: Any) -> Fault:
    async def fault(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, **more)

    return fault


def in_turn(*faults: Fault | None) -> Fault:
    """One for each of the first requests, None for a good answer; good answers from then on."""
    left = list(faults)

    async def next_one(request: web.Request) -> web.StreamResponse | None:
        fault = left.pop(0) if left else None
        return None if fault is None else await fault(request)

    return next_one

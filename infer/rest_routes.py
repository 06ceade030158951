"""/policy/rest and /policy/wake, and that every other request finds the engine awake. Errors: see `answers.py`."""

import dataclasses
import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from infer.answers import answer_to, answering, as_error, as_json, decode, require
from infer.in_place import InPlaceTable
from infer.policies import PolicyTable
from infer.rest import Rests

MAX_TIMEOUT_S = 600.0
TRY_AGAIN_LATER = 1013
"""A WebSocket's code for it."""
QUIET = frozenset(
    (
        *("/health", "/ping", "/version", "/metrics", "/metrics/", "/load", "/v1/models"),
        *("/policy/info", "/policy/rest", "/policy/wake"),
    )
)
"""What is answered without the engine."""


class RestBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /policy/rest. `run_id`: of whoever asks; `timeout_s`: how long what is in flight is waited for."""

    run_id: str | None = None
    timeout_s: float = 0.0


class WakeBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /policy/wake."""


class WakeFirst:
    """Around vLLM's application: a request that may need the engine wakes it, and keeps it awake to its end."""

    def __init__(self, app: ASGIApp, rests: Rests) -> None:
        self._app = app
        self._rests = rests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in QUIET:
            await self._app(scope, receive, send)
            return
        served = False
        try:
            async with self._rests.awake(f"{scope.get('method', 'WebSocket')} {scope['path']}"):
                served = True
                await self._app(scope, receive, send)
        except Exception as error:
            response = None if served else answer_to(error)
            if response is None:
                raise
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": TRY_AGAIN_LATER})
            else:
                await response(scope, receive, send)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RestRoutes:
    """The handlers of one server. Its versions stay live while it rests."""

    rests: Rests | None
    """None where the server was started without `sleep_mode`."""
    table: PolicyTable | InPlaceTable

    def attach(self, app: Any) -> None:
        """Add the routes to vLLM's application."""
        app.add_route("/policy/rest", answering(self.rest), methods=["POST"])
        app.add_route("/policy/wake", answering(self.wake), methods=["POST"])

    async def rest(self, request: Request) -> Response:
        """Let the server rest until it is woken or anything is asked of it."""
        body = decode(await request.body(), RestBody)
        require(0 <= body.timeout_s <= MAX_TIMEOUT_S, f"timeout_s is {body.timeout_s}, expected 0 to {MAX_TIMEOUT_S:g}")
        if self.rests is None:
            return as_error(409, "cannot_rest", "this server was started without sleep_mode; set sleep_mode: true")
        served = self.table.run_id
        if body.run_id is not None and served is not None and body.run_id != served:
            return as_error(409, "stale_run", f"run {body.run_id} was named, this server has versions of run {served}")
        started_s = time.monotonic()
        freed_bytes = await self.rests.rest(timeout_s=body.timeout_s)
        return as_json({"rested": True, "freed_bytes": freed_bytes, "rest_s": time.monotonic() - started_s})

    async def wake(self, request: Request) -> Response:
        """Let it rest no more; without effect where it does not."""
        decode(await request.body() or b"{}", WakeBody)
        started_s = time.monotonic()
        woken = self.rests is not None and await self.rests.wake()
        return as_json({"woken": woken, "wake_s": time.monotonic() - started_s})

"""Sleep mode: the orchestrator puts the engine to sleep before a batch leaves for the trainer, and wakes it afterwards.

Knows nothing of vLLM. While the engine sleeps, requests that need it are answered with 503 `asleep`, at which clients
try again.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from infer.answers import as_error
from transport.errors import DeadlineError

log = logging.getLogger(__name__)

ANSWERED_ASLEEP = frozenset(
    (
        *("/health", "/ping", "/version", "/metrics", "/metrics/", "/load", "/v1/models"),
        *("/policy/info", "/policy/sleep", "/policy/wake"),
    )
)
"""What needs no engine."""
TRY_AGAIN_LATER = 1013
"""A WebSocket's code for it."""


class Sleeper(Protocol):
    """What of the engine is needed here."""

    async def sleep(self) -> None:
        """Frees the device's memory once no request is left. Raises EngineError."""

    async def wake(self) -> None:
        """Raises EngineError."""


@dataclass(slots=True, kw_only=True)
class SleepMode:
    """Whether one engine sleeps. From when it is told to until it is awake again it takes no requests."""

    engine: Sleeper
    timeout_s: float
    """For falling asleep or waking: `canary_timeout_s`."""
    asleep: bool = False
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def sleep(self) -> float:
        """Returns when the engine sleeps: for how many seconds that took. Requests in flight are answered first. Raises
        DeadlineError and what the engine raises; then it is to be woken."""
        async with self._changing, self._timed("asleep") as started_s:
            if not self.asleep:
                self.asleep = True
                await self.engine.sleep()
            return time.monotonic() - started_s

    async def wake(self) -> float:
        """Returns when the engine is awake: for how many seconds that took. Raises what `sleep` raises; then it sleeps
        on."""
        async with self._changing, self._timed("awake") as started_s:
            if self.asleep:
                await self.engine.wake()
                self.asleep = False
            return time.monotonic() - started_s

    @contextlib.asynccontextmanager
    async def _timed(self, what: str) -> AsyncIterator[float]:
        started_s = time.monotonic()
        try:
            async with asyncio.timeout(self.timeout_s):
                yield started_s
        except TimeoutError:
            raise DeadlineError(
                f"the engine was not {what} within canary_timeout_s = {self.timeout_s:g} s; set that higher, or start "
                "the server again if its engine hangs"
            ) from None
        log.info("%s after %.2f s", what, time.monotonic() - started_s)


class SleepGuard:
    """The application around vLLM's that answers 503 while the engine sleeps."""

    def __init__(self, app: ASGIApp, mode: SleepMode) -> None:
        self._app, self._mode = app, mode

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._mode.asleep or scope["type"] == "lifespan" or scope["path"] in ANSWERED_ASLEEP:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": TRY_AGAIN_LATER})
        else:
            message = "this server sleeps while the trainer makes a step (sleep_mode); try again"
            await as_error(503, "asleep", message)(scope, receive, send)

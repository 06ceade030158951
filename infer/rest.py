"""When the server rests: gives the memory of its KV cache back, and takes it again for the next request.

awake → falling_asleep → resting → waking → awake. Only an engine without work falls asleep. Whoever needs it wakes it
first, so that resting can keep nobody waiting for ever; a request that comes while it falls asleep waits for the end
of that, and wakes it then.

Knows nothing of HTTP or vLLM.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

log = logging.getLogger(__name__)

State = Literal["awake", "falling_asleep", "resting", "waking"]
T = TypeVar("T")


class Busy(RuntimeError):
    """The engine has work, so it cannot rest now; nothing has changed."""


class RestError(RuntimeError):
    """The memory could not be given back or taken again. Every later request tries to take it again."""


class Memory(Protocol):
    """What of the engine is needed here."""

    async def give_back(self) -> int:
        """Of an engine without requests; the bytes that others can have now. Raises RestError."""

    async def take_back(self) -> None:
        """All that is missing, also after a `give_back` that has failed or was broken off. Raises RestError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestFigures:
    """What is told of the rests so far: `{"state": "resting", "num_rests": 3, …}`."""

    state: State
    num_rests: int
    rested_s: float
    """Seconds, of all rests that have ended."""
    num_woken_by_requests: int
    """Rests that a request ended which did not ask for that."""
    num_failed: int
    """Times that the memory could not be given back or taken again."""
    freed_bytes: int
    """By the newest rest."""


@dataclass(slots=True, kw_only=True)
class Rests:
    """One engine's way between awake and resting. Each change goes to its end, also when its caller is cancelled."""

    memory: Memory
    timeout_s: float
    """For one change."""
    on_change: Callable[[State], None] = lambda state: None
    state: State = "awake"
    freed_bytes: int = 0
    _num_in_use: int = 0
    _idle: asyncio.Event = field(default_factory=asyncio.Event)
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    _all_given: bool = False
    """Not so where only a part could be given back or taken again."""
    _since_s: float | None = None
    """When this rest began."""
    _num_rests: int = 0
    _rested_s: float = 0.0
    _num_woken_by_requests: int = 0
    _num_failed: int = 0

    def __post_init__(self) -> None:
        self._idle.set()

    @property
    def figures(self) -> RestFigures:
        """Of now."""
        return RestFigures(
            state=self.state,
            num_rests=self._num_rests,
            rested_s=self._rested_s,
            num_woken_by_requests=self._num_woken_by_requests,
            num_failed=self._num_failed,
            freed_bytes=self.freed_bytes,
        )

    @contextlib.asynccontextmanager
    async def awake(self, what: str) -> AsyncIterator[None]:
        """Within it the engine is awake and stays so. It wakes for `what`, which is counted. Raises what taking the
        memory back raises; then the engine rests on, and the next one tries again."""
        self._num_in_use += 1
        self._idle.clear()
        try:
            if self.state != "awake":
                await self._to_its_end(self._wake(what))
            yield
        finally:
            self._num_in_use -= 1
            if not self._num_in_use:
                self._idle.set()

    async def rest(self, *, timeout_s: float = 0.0) -> int:
        """Fall asleep, without effect if it rests; the bytes that others can have. What is in flight is waited for up
        to `timeout_s`, while new requests are served.

        Raises Busy, and what giving the memory back raises; then the engine is awake again, or wakes for the next
        request.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        return await self._to_its_end(self._fall_asleep())

    async def wake(self) -> bool:
        """Take the memory again; False where it was awake. Raises what that raises; then the engine rests on."""
        if self.state == "awake":
            return False
        return await self._to_its_end(self._wake(None))

    async def _to_its_end(self, change: Coroutine[Any, Any, T]) -> T:
        """Its result. It goes on also when this call is cancelled."""
        task = asyncio.ensure_future(change)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # looked at, or asyncio complains where the caller was cancelled

    async def _fall_asleep(self) -> int:
        async with self._changing:
            if self._num_in_use:
                raise Busy(f"requests in flight: {self._num_in_use}; the server rests only without any")
            if self._all_given:
                return self.freed_bytes
            self._set("falling_asleep")
            try:
                self.freed_bytes = await self._in_time(self.memory.give_back(), "giving the KV cache's memory back")
            except Exception as error:
                log.error("falling asleep has failed: %s", error)
                self._num_failed += 1
                with contextlib.suppress(Exception):  # then it is tried again for the next request
                    await self._take_back()
                raise
            self._all_given = True
            if self._since_s is None:
                self._num_rests += 1
                self._since_s = time.monotonic()
            self._set("resting")
            log.info("resting: %d bytes have been given back", self.freed_bytes)
            return self.freed_bytes

    async def _wake(self, by_request: str | None) -> bool:
        async with self._changing:
            if self.state == "awake":
                return False
            await self._take_back()
            if self._since_s is not None:
                self._rested_s += time.monotonic() - self._since_s
                self._since_s = None
                self._num_woken_by_requests += by_request is not None
                log.info("awake, %s", "as asked" if by_request is None else f"for {by_request}")
            return True

    async def _take_back(self) -> None:
        self._set("waking")
        self._all_given = False
        try:
            await self._in_time(self.memory.take_back(), "taking the KV cache's memory again")
        except BaseException as error:
            log.error("waking has failed: %s", error)
            self._num_failed += 1
            self._set("resting")
            raise
        self._set("awake")

    async def _in_time(self, work: Coroutine[Any, Any, T], what: str) -> T:
        try:
            async with asyncio.timeout(self.timeout_s):
                return await work
        except TimeoutError:
            raise RestError(f"{what} took longer than {self.timeout_s:g} s; the engine did not get to it") from None

    def _set(self, state: State) -> None:
        self.state = state
        self.on_change(state)

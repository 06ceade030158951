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
    """The engine has work, or is to be awake, so it cannot rest now; nothing has changed."""


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
    """For one change; the setting `canary_timeout_s`."""
    on_change: Callable[[State], None] = lambda state: None
    state: State = "awake"
    freed_bytes: int = 0
    _num_in_use: int = 0
    _num_wakes: int = 0
    """That were asked for, of an engine that is awake, too."""
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    """Of what a rest waits for: no requests any more, or a wake. Each has its own event."""
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
        try:
            if self.state != "awake":
                await self._to_its_end(self._wake(what))
            yield
        finally:
            self._num_in_use -= 1
            if not self._num_in_use:
                self._tell()

    async def rest(self, *, timeout_s: float = 0.0) -> int:
        """Fall asleep, without effect if it rests; the bytes that others can have. A moment without requests is waited
        for up to `timeout_s`, while new requests are served.

        Raises Busy, also where a wake is asked for before it begins, and what giving the memory back raises; then the
        engine is awake again, or wakes for the next request.
        """
        clock, num_wakes = asyncio.get_running_loop().time, self._num_wakes
        deadline_s = clock() + timeout_s
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline_s):
                    while self._num_in_use and self._num_wakes == num_wakes:
                        await self._news.wait()
            try:
                return await self._to_its_end(self._fall_asleep(num_wakes))
            except Busy:  # the next request was faster, or the end of the waiting
                if self._num_wakes > num_wakes or clock() >= deadline_s:
                    raise

    async def wake(self) -> bool:
        """Take the memory again, and end the rests that have not begun; False where it was awake. Raises what taking it
        raises; then the engine rests on."""
        self._num_wakes += 1
        self._tell()
        if self.state == "awake":
            return False
        return await self._to_its_end(self._wake(None))

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

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

    async def _fall_asleep(self, num_wakes: int) -> int:
        """`num_wakes`: of when it was asked for."""
        async with self._changing:
            if self._num_wakes > num_wakes:
                raise Busy("a wake has ended this rest before it began; ask again for one that is to come after it")
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
            raise RestError(
                f"{what} took longer than canary_timeout_s = {self.timeout_s:g} s; set canary_timeout_s in infer.yaml "
                "higher, or start the server again if its engine has stopped"
            ) from None

    def _set(self, state: State) -> None:
        self.state = state
        self.on_change(state)

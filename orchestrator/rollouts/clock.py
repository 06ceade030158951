"""Deadlines on an environment's own time, and threads for its blocking code.

While a rollout waits for something on our side (a model, a judge through our client, a slot of the sandbox, a free
thread), its own time stands still.
"""

import asyncio
import contextlib
import contextvars
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

from grpo.orchestrator import background

P = ParamSpec("P")
T = TypeVar("T")

NUM_THREADS = 16
"""Blocking calls of user code that run at a time in a process."""


class OwnTimeout:
    """Works as `asyncio.timeout`, without the time that is spent in `waiting`."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s, self._left_s, self._num_waits = limit_s, limit_s, 0

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._timeout = await asyncio.timeout(None).__aenter__()
        self._token = _clocks.set((*_clocks.get(), self))
        self._deadline_s = self._loop.time() + self._limit_s
        self._timer: asyncio.TimerHandle | None = self._loop.call_at(self._deadline_s, self._look)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _clocks.reset(self._token)
        if self._timer is not None:
            self._timer.cancel()
        self._num_waits += 1  # what it left behind may go on, and resume
        await self._timeout.__aexit__(kind, error, trace)

    def expired(self) -> bool:
        """Returns whether the time was up."""
        return self._timeout.expired()

    def pause(self) -> None:
        """Stops the time until each `pause` has its `resume`."""
        if not self._num_waits:
            self._left_s = self._deadline_s - self._loop.time()
        self._num_waits += 1

    def resume(self, *, restart: bool) -> None:
        """Lets the time go on; with `restart` all of it is there again."""
        self._num_waits -= 1
        if restart:
            self._left_s = self._limit_s
        if not self._num_waits:
            self._deadline_s = self._loop.time() + self._left_s
            if self._timer is None:
                self._timer = self._loop.call_at(self._deadline_s, self._look)

    def _look(self) -> None:
        """Runs when the deadline was, as it was known. Pauses only put it off, and need no timer of their own."""
        self._timer = None
        if self._num_waits:
            return
        if self._loop.time() < self._deadline_s:
            self._timer = self._loop.call_at(self._deadline_s, self._look)
        else:
            self._timeout.reschedule(self._loop.time())


_clocks: contextvars.ContextVar[tuple[OwnTimeout, ...]] = contextvars.ContextVar("own_time", default=())
"""The deadlines of the rollout whose code runs."""


@contextlib.contextmanager
def waiting(*, restart: bool = False) -> Iterator[None]:
    """Stops the time of the rollout's deadlines meanwhile. With `restart` all of it is there again afterwards.

    Example: ``with waiting(): await slots.acquire()``
    """
    clocks = _clocks.get()
    for clock in clocks:
        clock.pause()
    try:
        yield
    finally:
        for clock in clocks:
            clock.resume(restart=restart)


async def together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Returns the results of all, which run at the same time. If one raises, the others are cancelled, and it is raised
    here."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(no_exit(one)) for one in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [one.result() for one in running]


async def no_exit(coroutine: Coroutine[Any, Any, T]) -> T:
    """Raises RuntimeError for what would end the event loop from within a task."""
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"user code raised {error!r}") from error


class _Slots:
    """Blocking calls of one event loop."""

    def __init__(self) -> None:
        self.free = asyncio.Semaphore(NUM_THREADS)
        self.left: set[object] = set()
        """Calls that still run although nobody waits for them any more."""

    def over(self, call: object) -> None:
        """A call has ended."""
        self.free.release()
        self.left.discard(call)


_slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Slots] = weakref.WeakKeyDictionary()


def _slots_of_loop() -> _Slots:
    loop = asyncio.get_running_loop()
    if (slots := _slots.get(loop)) is None:
        slots = _slots[loop] = _Slots()
    return slots


def num_left_calls() -> int:
    """Returns how many blocking calls of this event loop were cancelled and have not ended."""
    return len(_slots_of_loop().left)


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Returns the result of blocking code. `NUM_THREADS` calls run at a time; the wait for a turn is not the rollout's
    own time. A call that is cancelled goes on in its thread, and nobody waits for it. Raises MemoryError if no thread
    can be started."""
    slots = _slots_of_loop()
    if slots.free.locked():
        with waiting():
            await slots.free.acquire()
    else:
        await slots.free.acquire()
    run: Callable[[], T] = partial(contextvars.copy_context().run, function, *args, **kwargs)
    try:
        call = background.start_in_thread(run, partial(slots.over, run))
    except RuntimeError as error:
        slots.free.release()
        raise MemoryError(f"{error}; raise env[].memory_gb") from None
    try:
        return await call
    finally:
        if call.cancelled():
            slots.left.add(run)

"""An environment's own time, which its deadlines are about, and threads for its blocking code.

What a rollout waits for on our side (a model, a judge through our client, a slot of the sandbox, a free thread) is not
its own time.
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
"""Blocking calls that run at a time in a process."""


class OwnTimeout:
    """As `asyncio.timeout`, without the time that is spent in `waiting`."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s, self._left_s, self._num_waits = limit_s, limit_s, 0

    async def __aenter__(self) -> Self:
        self._timeout = await asyncio.timeout(self._limit_s).__aenter__()
        self._token = _clocks.set((*_clocks.get(), self))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _clocks.reset(self._token)
        await self._timeout.__aexit__(kind, error, trace)

    def expired(self) -> bool:
        """Whether the time was up."""
        return self._timeout.expired()

    def pause(self) -> None:
        """The deadline stands still until each `pause` has its `resume`."""
        self._num_waits += 1
        if self._num_waits == 1 and (when_s := self._timeout.when()) is not None:
            self._left_s = when_s - asyncio.get_running_loop().time()
            self._reschedule(None)

    def resume(self, *, anew: bool) -> None:
        """`anew`: with all of its time again."""
        self._num_waits -= 1
        if anew:
            self._left_s = self._limit_s
        if not self._num_waits:
            self._reschedule(asyncio.get_running_loop().time() + self._left_s)

    def _reschedule(self, when_s: float | None) -> None:
        with contextlib.suppress(RuntimeError):  # it is over already, and a task that it left behind goes on
            self._timeout.reschedule(when_s)


_clocks: contextvars.ContextVar[tuple[OwnTimeout, ...]] = contextvars.ContextVar("own_time", default=())
"""Those of the rollout whose code runs."""


@contextlib.contextmanager
def waiting(*, anew: bool = False) -> Iterator[None]:
    """While it is entered, the rollout's deadlines stand still. `anew`: afterwards it has all of its time again.

    Example: ``with waiting(): await slots.acquire()``
    """
    clocks = _clocks.get()
    for clock in clocks:
        clock.pause()
    try:
        yield
    finally:
        for clock in clocks:
            clock.resume(anew=anew)


async def together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results, all awaited at the same time. Where one raises, the others are cancelled, and it goes on."""
    try:
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(no_exit(one)) for one in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [one.result() for one in asked]


async def no_exit(coroutine: Coroutine[Any, Any, T]) -> T:
    """What would end the event loop from within a task ends a rollout only."""
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"user code raised {error!r}") from error


class _Slots:
    """Blocking calls of one event loop."""

    def __init__(self) -> None:
        self.free = asyncio.Semaphore(NUM_THREADS)
        self.left: set[asyncio.Future[Any]] = set()
        """Calls that run and that nobody waits for any more."""


_slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Slots] = weakref.WeakKeyDictionary()


def _slots_of_loop() -> _Slots:
    loop = asyncio.get_running_loop()
    if (slots := _slots.get(loop)) is None:
        slots = _slots[loop] = _Slots()
    return slots


def num_left_calls() -> int:
    """Blocking calls of this event loop that were cancelled and have not ended."""
    return len(_slots_of_loop().left)


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of blocking code, of which `NUM_THREADS` calls run at a time; the wait for a turn is not the rollout's
    own time. A call that is cancelled goes on in its thread, and nobody waits for it."""
    slots = _slots_of_loop()
    if slots.free.locked():
        with waiting():
            await slots.free.acquire()
    else:
        await slots.free.acquire()
    try:
        call = background.start_in_thread(partial(contextvars.copy_context().run, function, *args, **kwargs))
    except RuntimeError as error:
        slots.free.release()
        raise MemoryError(f"{error}; raise env[].memory_gb") from None
    call.add_done_callback(lambda _: slots.free.release())
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        if not call.done():
            slots.left.add(call)
            call.add_done_callback(slots.left.discard)
        raise

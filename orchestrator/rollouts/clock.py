"""An environment's own time, which its deadlines are about, and threads for its blocking code.

What a rollout waits for on our side (a model, a judge through our client, a slot of the sandbox, a free thread) is not
its own time.
"""

import asyncio
import contextlib
import contextvars
import queue
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

NUM_THREADS = 16
"""Blocking calls that run at a time in a process."""


class _Clock:
    """A deadline that stands still while somebody waits."""

    def __init__(self, timeout: asyncio.Timeout, limit_s: float) -> None:
        self._timeout, self._limit_s, self._left_s = timeout, limit_s, limit_s
        self._num_waits = 0

    def pause(self) -> None:
        self._num_waits += 1
        if self._num_waits == 1 and (when_s := self._timeout.when()) is not None:
            self._left_s = when_s - asyncio.get_running_loop().time()
            self._reschedule(None)

    def resume(self, *, anew: bool) -> None:
        self._num_waits -= 1
        if anew:
            self._left_s = self._limit_s
        if not self._num_waits:
            self._reschedule(asyncio.get_running_loop().time() + self._left_s)

    def _reschedule(self, when_s: float | None) -> None:
        with contextlib.suppress(RuntimeError):  # it is over already, and a task that it left behind goes on
            self._timeout.reschedule(when_s)


_clocks: contextvars.ContextVar[tuple[_Clock, ...]] = contextvars.ContextVar("own_time", default=())
"""Those of the rollout whose code runs."""


@contextlib.asynccontextmanager
async def own_timeout(limit_s: float) -> AsyncIterator[asyncio.Timeout]:
    """As `asyncio.timeout`, without the time that is spent in `waiting`."""
    async with asyncio.timeout(limit_s) as timeout:
        token = _clocks.set((*_clocks.get(), _Clock(timeout, limit_s)))
        try:
            yield timeout
        finally:
            _clocks.reset(token)


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
            asked = [tasks.create_task(_no_exit(one)) for one in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [one.result() for one in asked]


async def _no_exit(coroutine: Coroutine[Any, Any, T]) -> T:
    """What would end the event loop from within a task ends a rollout only."""
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"user code raised {error!r}") from error


class _Threads:
    """Daemon threads that take work from a queue. One that never ends its work is replaced by another one."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock, self._num_free = threading.Lock(), 0

    def start(self, work: Callable[[], None]) -> None:
        with self._lock:
            self._num_free -= 1
            needs_another = self._num_free < 0
            self._num_free += needs_another
        if needs_another:
            threading.Thread(target=self._serve, daemon=True, name="user code").start()
        self._work.put(work)

    def _serve(self) -> None:
        while True:
            self._work.get()()
            with self._lock:
                self._num_free += 1


class _Places:
    """How many blocking calls of one event loop may run, and how many run that nobody waits for any more."""

    def __init__(self) -> None:
        self.free, self.num_left = asyncio.Semaphore(NUM_THREADS), 0


_threads = _Threads()
_places: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Places] = weakref.WeakKeyDictionary()


def num_left_calls() -> int:
    """Blocking calls of this event loop that were cancelled and have not ended."""
    places = _places.get(asyncio.get_running_loop())
    return 0 if places is None else places.num_left


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of blocking code, of which `NUM_THREADS` calls run at a time; the wait for a turn is not the rollout's
    own time. A call that is cancelled goes on in its thread, and nobody waits for it."""
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    places = _places.setdefault(loop, _Places())
    if places.free.locked():
        with waiting():
            await places.free.acquire()
    else:
        await places.free.acquire()
    done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def work() -> None:
        try:
            outcome: tuple[Any, BaseException | None] = context.run(function, *args, **kwargs), None
        except BaseException as error:  # who waits decides what it means
            outcome = None, error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(end, outcome)

    def end(outcome: tuple[Any, BaseException | None]) -> None:
        places.free.release()
        if done.cancelled():
            places.num_left -= 1
        else:
            done.set_result(outcome)

    try:
        _threads.start(work)
    except RuntimeError as error:
        places.free.release()
        raise MemoryError(f"{error}; raise env[].memory_gb") from None
    try:
        value, raised = await done
    except asyncio.CancelledError:
        places.num_left += done.cancelled()
        raise
    if raised is not None:
        raise raised
    result: T = value
    return result

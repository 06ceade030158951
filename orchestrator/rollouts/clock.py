"""An environment's own time, which its deadlines are about, and threads for its blocking code.

What a rollout waits for on our side (a model, a judge through our client, a slot of the sandbox, a free thread) is not
its own time.
"""

import asyncio
import contextlib
import contextvars
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

NUM_THREADS = 16
"""Blocking calls that run at a time in a process."""
STACK_BYTES = 2 << 20
"""Of a thread. All of it counts as allocated from the beginning, which `memory_gb` limits."""


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


class NoThreadLeft(RuntimeError):
    """All threads are held by blocking calls that are past their deadline."""


class Threads:
    """Runs blocking code, `NUM_THREADS` calls at a time, in threads that keep no program alive.

    A thread that has work wakes another one where more is waiting, so that short calls cost no wake-up each and a call
    that blocks stops nobody.
    """

    def __init__(self) -> None:
        self._work: deque[Callable[[], None]] = deque()
        self._wake_ups: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_waking = False
        self._ended: deque[tuple[asyncio.Future[Any], Any]] = deque()
        self._is_telling = False
        self._num_started, self._num_busy = 0, 0
        self._queue: deque[asyncio.Future[None]] = deque()
        self.num_left = 0
        """Calls that nobody waits for any more and that have not ended."""

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The function's result. One that is cancelled goes on in its thread, and nobody waits for it."""
        loop = asyncio.get_running_loop()
        self._give_up_where_none_is_left()
        if self._num_busy >= NUM_THREADS:
            await self._turn(loop)
        else:
            self._num_busy += 1
        done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
        context = contextvars.copy_context()

        def work() -> None:
            try:
                outcome: tuple[Any, BaseException | None] = context.run(function, *args, **kwargs), None
            except BaseException as error:  # the one who waits decides what it means
                outcome = None, error
            self._tell(loop, done, outcome)

        try:
            self._start(work)
            value, error = await done
        except asyncio.CancelledError:
            self.num_left += done.cancelled()
            with contextlib.suppress(NoThreadLeft):
                self._give_up_where_none_is_left()
            raise
        if error is not None:
            raise error
        result: T = value
        return result

    def _give_up_where_none_is_left(self) -> None:
        """No thread would ever become free. Raises NoThreadLeft, here and where threads are waited for."""
        if self.num_left < NUM_THREADS:
            return
        error = NoThreadLeft(
            f"{self.num_left} blocking calls are past their deadline and have not ended; give what they wait for a "
            "deadline of its own"
        )
        waiters, self._queue = self._queue, deque()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(error)
        raise error

    async def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        waiter = loop.create_future()
        self._queue.append(waiter)
        with waiting():
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._release()
                raise

    def _release(self) -> None:
        """Passes the place on to whoever has waited longest."""
        while self._queue:
            if not (waiter := self._queue.popleft()).done():
                waiter.set_result(None)
                return
        self._num_busy -= 1

    # --- threads ---

    def _start(self, work: Callable[[], None]) -> None:
        if self._num_started < self._num_busy:
            usual = threading.stack_size()
            try:
                threading.stack_size(usual or STACK_BYTES)
                threading.Thread(target=self._serve, daemon=True, name="user code").start()
                self._num_started += 1
            except RuntimeError:
                self._release()
                raise MemoryError("there is no room for another thread; raise env[].memory_gb") from None
            finally:
                threading.stack_size(usual)
        self._work.append(work)
        self._wake()

    def _wake(self) -> None:
        if not self._is_waking:
            self._is_waking = True
            self._wake_ups.put(None)

    def _serve(self) -> None:
        while True:
            self._wake_ups.get()
            self._is_waking = False
            with contextlib.suppress(IndexError):  # nothing is left
                while True:
                    work = self._work.popleft()
                    if self._work:
                        self._wake()
                    work()

    def _tell(self, loop: asyncio.AbstractEventLoop, done: "asyncio.Future[Any]", outcome: Any) -> None:
        self._ended.append((done, outcome))
        if not self._is_telling:
            self._is_telling = True
            try:
                loop.call_soon_threadsafe(self._take_ended)
            except RuntimeError:  # the loop is closed: nobody waits any more
                self._take_ended()

    def _take_ended(self) -> None:
        self._is_telling = False
        while self._ended:
            done, outcome = self._ended.popleft()
            self._release()
            if done.cancelled():
                self.num_left -= 1
            elif not done.get_loop().is_closed():
                done.set_result(outcome)


threads = Threads()
"""Of this process."""

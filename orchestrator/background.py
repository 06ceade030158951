"""Small helpers for asyncio: waking waiters, blocking calls, and what really went wrong."""

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Bell(asyncio.Event):
    """Wakes all who wait. Whoever checks a condition and then waits, without awaiting in between, misses nothing."""

    def ring(self) -> None:
        """Wakes all."""
        self.set()
        self.clear()


class NoThread(RuntimeError):
    """The machine gives this process no thread more."""


class _Threads:
    """Threads that do one call after the other. To start one for each call would hold up the event loop until it runs.
    None keeps an ending program alive, as those of asyncio.to_thread would."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock, self._num_idle = threading.Lock(), 0

    def submit(self, call: Callable[[], None]) -> None:
        """Has a thread do it at once: one that is idle, or a new one."""
        with self._lock:
            is_idle = self._num_idle > 0
            self._num_idle -= is_idle
        if not is_idle:
            try:
                threading.Thread(target=self._work, daemon=True).start()
            except RuntimeError as error:
                raise NoThread(str(error)) from None
        self._calls.put(call)

    def _work(self) -> None:
        while True:
            self._calls.get()()
            with self._lock:
                self._num_idle += 1


_threads = _Threads()


class _Results:
    """What threads have done for one event loop, which is woken once for all that is done at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._lock = weakref.ref(loop), threading.Lock()
        self._settlers: list[Callable[[], None]] = []

    def add(self, settle: Callable[[], None]) -> None:
        """Has the event loop call `settle`. From any thread."""
        with self._lock:
            self._settlers.append(settle)
            is_first = len(self._settlers) == 1
        if is_first and (loop := self._loop()) is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        with self._lock:
            settlers, self._settlers = self._settlers, []
        for settle in settlers:
            settle()


_results: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Results] = weakref.WeakKeyDictionary()


def start_in_thread(function: Callable[[], T], *, ended: Callable[[], None] = lambda: None) -> asyncio.Future[T]:
    """The result of a blocking call, which goes on where nobody waits for it any more. `ended` is called on the event
    loop when it has ended. Raises NoThread."""
    loop = asyncio.get_running_loop()
    if (results := _results.get(loop)) is None:
        results = _results[loop] = _Results(loop)
    result: asyncio.Future[T] = loop.create_future()

    def call() -> None:
        value, raised = None, None
        try:
            value = function()
        except BaseException as error:  # delivered to whoever awaits
            raised = RuntimeError(repr(error)) if isinstance(error, StopIteration) else error

        def settle() -> None:
            ended()
            if result.cancelled():
                return
            if raised is None:
                result.set_result(value)  # type: ignore[arg-type]
            else:
                result.set_exception(raised)

        results.add(settle)

    _threads.submit(call)
    return result


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of a blocking call."""
    return await start_in_thread(partial(function, *args, **kwargs))


def root_cause(error: BaseException) -> BaseException:
    """The first exception that is no group, in a group of those that a task group raised."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

"""Small helpers for asyncio: waking waiters, blocking calls, and what really went wrong."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

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
        self._num_idle = threading.Semaphore(0)

    def submit(self, call: Callable[[], None]) -> None:
        """Has a thread do it at once: one that is idle, or a new one."""
        if not self._num_idle.acquire(blocking=False):
            try:
                threading.Thread(target=self._work, daemon=True).start()
            except RuntimeError as error:
                raise NoThread(str(error)) from None
        self._calls.put(call)

    def _work(self) -> None:
        while True:
            self._calls.get()()
            self._num_idle.release()


_threads = _Threads()


def start_in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
    """The result of a blocking call, which goes on where nobody waits for it any more. Raises NoThread."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if result.cancelled():
            return
        if error is None:
            result.set_result(value)
        else:
            result.set_exception(RuntimeError(repr(error)) if isinstance(error, StopIteration) else error)

    def call() -> None:
        value, raised = None, None
        try:
            value = function(*args, **kwargs)
        except BaseException as error:  # delivered to whoever awaits
            raised = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, value, raised)

    _threads.submit(call)
    return result


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of a blocking call."""
    return await start_in_thread(function, *args, **kwargs)


def root_cause(error: BaseException) -> BaseException:
    """The first exception that is no group, in a group of those that a task group raised."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

"""Small helpers for asyncio: blocking calls, and what really went wrong."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class _Threads:
    """Runs calls in threads, and starts one more where all are busy. No thread keeps an ending program alive, as those
    of asyncio.to_thread would. An Executor with its futures costs half of a short call's time."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._idle: SimpleQueue[None] = SimpleQueue()
        """Has an item for each thread that waits."""

    def start(self, call: Callable[[], None]) -> None:
        """Raises RuntimeError where the machine gives this process no thread more."""
        try:
            self._idle.get_nowait()
        except Empty:
            threading.Thread(target=self._work, daemon=True).start()
        self._calls.put(call)

    def _work(self) -> None:
        while True:
            self._calls.get()()
            self._idle.put(None)


_threads = _Threads()


def start_in_thread(function: Callable[[], T], over: Callable[[], None] = lambda: None) -> asyncio.Future[T]:
    """Starts a blocking call, which goes on where nobody waits for it any more. `over` is called on the event loop when
    it ends. Raises RuntimeError where the machine gives this process no thread more."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def end(settle: Callable[[Any], None], outcome: Any) -> None:
        over()
        if not future.done():  # it is where nobody waits any more
            settle(outcome)

    def call() -> None:
        settle: Callable[[Any], None] = future.set_result
        try:
            outcome: Any = function()
        except BaseException as error:  # delivered to whoever awaits
            settle = future.set_exception
            outcome = RuntimeError(repr(error)) if isinstance(error, StopIteration) else error  # which no future takes
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(end, settle, outcome)

    _threads.start(call)
    return future


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Returns the result of a blocking call."""
    return await start_in_thread(partial(function, *args, **kwargs))


def root_cause(error: BaseException) -> BaseException:
    """Returns the first exception that is no group, of those that a task group raised."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

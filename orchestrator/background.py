"""Small helpers for asyncio: blocking calls, and what really went wrong."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class _DaemonExecutor(Executor):
    """Runs calls in threads, and starts one more where all are busy. No thread keeps an ending program alive, as those
    of asyncio.to_thread would."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._idle = threading.Semaphore(0)

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> "Future[T]":
        """Raises RuntimeError where the machine gives this process no thread more."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # it goes on where nobody waits for it any more

        def call() -> None:
            try:
                future.set_result(function(*args, **kwargs))
            except StopIteration as error:  # which no asyncio.Future takes
                future.set_exception(RuntimeError(repr(error)))
            except BaseException as error:  # delivered to whoever awaits
                future.set_exception(error)

        if not self._idle.acquire(blocking=False):
            threading.Thread(target=self._work, daemon=True).start()
        self._calls.put(call)
        return future

    def _work(self) -> None:
        while True:
            self._calls.get()()
            self._idle.release()


_executor = _DaemonExecutor()


def start_in_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """Starts a blocking call, which goes on where nobody waits for it any more. Raises RuntimeError where the machine
    gives this process no thread more."""
    return asyncio.get_running_loop().run_in_executor(_executor, function)


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Returns the result of a blocking call."""
    return await start_in_thread(partial(function, *args, **kwargs))


def root_cause(error: BaseException) -> BaseException:
    """Returns the first exception that is no group, of those that a task group raised."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

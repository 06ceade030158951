"""Small helpers for asyncio: waking waiters, blocking calls, and what really went wrong."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Bell:
    """Wakes all who wait. Whoever checks a condition and then waits, without awaiting in between, misses nothing."""

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def ring(self) -> None:
        """Wakes all."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        """Returns at the next ring."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter


class BusyClock:
    """Seconds during which at least one of many overlapping things was going on."""

    def __init__(self) -> None:
        self._num_busy = 0
        self._since_s = 0.0
        self._total_s = 0.0

    def __enter__(self) -> None:
        if self._num_busy == 0:
            self._since_s = time.monotonic()
        self._num_busy += 1

    def __exit__(self, *_: object) -> None:
        self._num_busy -= 1
        if self._num_busy == 0:
            self._total_s += time.monotonic() - self._since_s

    @property
    def total_s(self) -> float:
        """Until now."""
        return self._total_s + (time.monotonic() - self._since_s if self._num_busy else 0.0)


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of a blocking call. Unlike asyncio.to_thread, the thread does not keep an ending program alive."""
    loop, result = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def deliver(value: T | None, error: BaseException | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)

    def work() -> None:
        value, error = None, None
        try:
            value = function(*args, **kwargs)
        except BaseException as caught:  # delivered to whoever awaits
            error = caught
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, value, error)

    threading.Thread(target=work, daemon=True).start()
    value: T = await result
    return value


def root_cause(error: BaseException) -> BaseException:
    """The first exception that is no group, in a group of those that a task group raised."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

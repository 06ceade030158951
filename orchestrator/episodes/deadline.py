"""A deadline for what shares its event loop with code that may hold it up."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

NUM_PARTS = 8
"""Into which a limit is cut: what of it is counted at once, however long the loop was held up meanwhile."""


@contextlib.asynccontextmanager
async def patient_timeout(limit_s: float) -> AsyncIterator[asyncio.Timeout]:
    """As `asyncio.timeout`, but for time in which others held up the event loop: no more than an eighth of `limit_s` is
    counted each time. What has arrived meanwhile is taken before the limit is said to be over."""
    loop, num_left = asyncio.get_running_loop(), NUM_PARTS
    timer: asyncio.TimerHandle

    def count() -> None:
        nonlocal num_left, timer
        num_left -= 1
        if num_left:
            timer = loop.call_later(limit_s / NUM_PARTS, count)
        else:
            deadline.reschedule(loop.time())

    async with asyncio.timeout(None) as deadline:
        timer = loop.call_later(limit_s / NUM_PARTS, count)
        try:
            yield deadline
        finally:
            timer.cancel()

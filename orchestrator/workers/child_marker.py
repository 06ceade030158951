"""Whose code runs: the number of a rollout in memory that another process can read, even while that code blocks."""

import asyncio
import contextvars
import mmap
import os
from collections.abc import Coroutine, Generator
from typing import Any

from orchestrator.workers.wire import NOBODY, RUNNING_VAR, Beat


class UserExit(Exception):
    """User code raised SystemExit or KeyboardInterrupt in a task, which would end the event loop."""


class Marker:
    """Writes the number of the rollout whose code runs, and `NOBODY` in between."""

    def __init__(self, descriptor: int | None) -> None:
        """`descriptor` of at least 8 bytes, which is closed; None where nobody reads."""
        self._memory = mmap.mmap(-1, 8) if descriptor is None else mmap.mmap(descriptor, 8)
        if descriptor is not None:
            os.close(descriptor)
        self._place = memoryview(self._memory).cast("q")
        self._place[0] = NOBODY
        self._num_steps = [0]
        self._rollout: contextvars.ContextVar[int] = contextvars.ContextVar("rollout", default=NOBODY)

    @classmethod
    def from_environment(cls) -> "Marker":
        """As the one who started this process says; what user code starts does not inherit it."""
        descriptor = os.environ.pop(RUNNING_VAR, None)
        return cls(None if descriptor is None else int(descriptor))

    def start(
        self, loop: asyncio.AbstractEventLoop, rollout: int, coroutine: Coroutine[Any, Any, None]
    ) -> asyncio.Task[None]:
        """A task that belongs to a rollout, as do all tasks that it starts."""
        context = contextvars.copy_context()
        context.run(self._rollout.set, rollout)
        return loop.create_task(coroutine, context=context)

    def make_task(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
        *,
        context: contextvars.Context | None = None,
        **options: Any,
    ) -> asyncio.Task[Any]:
        """A task factory for `loop`."""
        rollout = self._rollout.get() if context is None else context.get(self._rollout, NOBODY)
        if rollout != NOBODY and isinstance(coroutine, Coroutine):
            coroutine = _Marked(coroutine, rollout, self._place, self._num_steps)
        return asyncio.Task(coroutine, loop=loop, context=context, **options)

    def beat(self) -> Beat:
        """What runs now."""
        return Beat(running=self._place[0], num_steps=self._num_steps[0])


class _Marked(Coroutine[Any, Any, Any]):
    """A coroutine that says whose it is while it runs."""

    __slots__ = ("_coroutine", "_num_steps", "_place", "_rollout", "_send")

    def __init__(
        self, coroutine: Coroutine[Any, Any, Any], rollout: int, place: memoryview, num_steps: list[int]
    ) -> None:
        self._coroutine, self._rollout, self._place, self._num_steps = coroutine, rollout, place, num_steps
        self._send = coroutine.send

    def send(self, value: Any) -> Any:
        self._num_steps[0] += 1
        self._place[0] = self._rollout
        try:
            return self._send(value)
        except (SystemExit, KeyboardInterrupt) as error:
            raise UserExit(repr(error)) from error
        finally:
            self._place[0] = NOBODY

    def throw(self, *error: Any) -> Any:
        self._num_steps[0] += 1
        self._place[0] = self._rollout
        try:
            return self._coroutine.throw(*error)
        except (SystemExit, KeyboardInterrupt) as exit_:
            raise UserExit(repr(exit_)) from exit_
        finally:
            self._place[0] = NOBODY

    def __getattr__(self, name: str) -> Any:
        """What else coroutines have, such as `cr_frame`, by which others tell in what state they are."""
        return getattr(self._coroutine, name)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()

"""An environment's own time, which its deadlines are about, and threads for its blocking code.

What a rollout waits for on our side (a model, a judge through our client, a slot of the sandbox, a free thread) is not
its own time.
"""

import asyncio
import contextlib
import contextvars
import weakref
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator
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


BOARD_BYTES = 4 * (NUM_THREADS + 1)
current_job: contextvars.ContextVar[int] = contextvars.ContextVar("current_job", default=0)
"""Number of the rollout whose code runs, where it has one."""


class _Slots:
    """Blocking calls of one event loop."""

    def __init__(self) -> None:
        self.free, self.places = asyncio.Semaphore(NUM_THREADS), list(range(NUM_THREADS))
        self.board = memoryview(bytearray(BOARD_BYTES)).cast("i")
        self.left: set[int] = set()
        """Places of those that run and that nobody waits for any more."""


_slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Slots] = weakref.WeakKeyDictionary()


def _slots_here() -> _Slots:
    loop = asyncio.get_running_loop()
    if (slots := _slots.get(loop)) is None:
        slots = _slots[loop] = _Slots()
    return slots


def show_on(board: memoryview) -> None:
    """Writes from now on to `board` [NUM_THREADS + 1], of int32, whose code runs: the numbers of the rollouts whose
    blocking calls run, and last the one whose code the event loop runs; 0 for none. Who shares the memory can tell who
    was at work when this process ended."""
    _slots_here().board = board
    asyncio.get_running_loop().set_task_factory(
        lambda loop, coroutine, **options: asyncio.Task(_Shown(coroutine, board), loop=loop, **options)
    )


class _Shown(Coroutine[Any, Any, T]):
    """The coroutine of a task; while it goes on, up to where it waits again, the board shows whose it is."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], board: memoryview) -> None:
        self._coroutine, self._board = coroutine, board

    def send(self, value: Any) -> Any:
        return self._go_on(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        return self._go_on(self._coroutine.throw, *error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, T]:
        return self._coroutine.__await__()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coroutine, name)  # libraries ask tasks' coroutines how far they are

    def _go_on(self, step: Callable[..., Any], *given: Any) -> Any:
        self._board[NUM_THREADS] = current_job.get()
        try:
            return step(*given)
        finally:
            self._board[NUM_THREADS] = 0


def num_left_calls() -> int:
    """Blocking calls of this event loop that were cancelled and have not ended."""
    return len(_slots_here().left)


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of blocking code, of which `NUM_THREADS` calls run at a time; the wait for a turn is not the rollout's
    own time. A call that is cancelled goes on in its thread, and nobody waits for it."""
    slots = _slots_here()
    if slots.free.locked():
        with waiting():
            await slots.free.acquire()
    else:
        await slots.free.acquire()
    place, context, job = slots.places.pop(), contextvars.copy_context(), current_job.get()

    def work() -> T:
        slots.board[place] = job
        try:
            return context.run(function, *args, **kwargs)
        finally:
            slots.board[place] = 0

    def end() -> None:
        slots.places.append(place)
        slots.left.discard(place)
        slots.free.release()

    try:
        call = background.start_in_thread(work, ended=end)
    except background.NoThread as error:
        end()
        raise MemoryError(f"{error}; raise env[].memory_gb") from None
    try:
        return await call
    except asyncio.CancelledError:
        if place not in slots.places:
            slots.left.add(place)
        raise

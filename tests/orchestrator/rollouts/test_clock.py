"""An environment's own time, and threads for its blocking code."""

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest
from grpo.orchestrator import background
from grpo.orchestrator.rollouts.clock import NUM_THREADS, OwnTimeout, in_thread, num_left_calls, waiting

from tests.orchestrator.fakes import until

LIMIT_S = 10.0
Advance = Callable[[float], Awaitable[None]]


async def test_only_own_time_counts(advance: Advance) -> None:
    async def rollout() -> None:
        async with OwnTimeout(LIMIT_S):
            with waiting():
                with waiting():
                    await advance(100)
                await advance(100)
            await advance(6)
            with waiting():
                await advance(100)
            in_time.set()
            await advance(5)

    in_time = asyncio.Event()
    with pytest.raises(TimeoutError):
        await rollout()
    assert in_time.is_set()


async def test_after_a_model_has_answered_all_of_the_time_is_there_again(advance: Advance) -> None:
    async with OwnTimeout(LIMIT_S):
        for _ in range(3):
            await advance(9)
            with waiting(restart=True):
                await advance(100)


async def test_code_that_a_rollout_left_behind_may_wait_after_its_end(advance: Advance) -> None:
    over = asyncio.Event()

    async def left_behind() -> None:
        with waiting():
            await over.wait()

    async with OwnTimeout(LIMIT_S):
        task = asyncio.create_task(left_behind())
        await advance(0)
    over.set()
    await task


async def test_the_wait_for_a_thread_does_not_count_and_the_call_does(advance: Advance) -> None:
    gate, never = threading.Event(), threading.Event()

    async def in_time(event: threading.Event) -> bool:
        async with OwnTimeout(LIMIT_S):
            return await in_thread(event.wait)

    busy = [asyncio.create_task(in_thread(gate.wait)) for _ in range(NUM_THREADS)]
    await advance(0)
    late = asyncio.create_task(in_time(gate))
    await advance(0)
    await advance(100)
    gate.set()
    assert await asyncio.gather(late, *busy) == [True] * (NUM_THREADS + 1)
    late = asyncio.create_task(in_time(never))
    await advance(0)
    await advance(11)
    with pytest.raises(TimeoutError):
        await late
    assert num_left_calls() == 1  # a thread that nobody waits for
    never.set()
    await until(lambda: num_left_calls() == 0)


async def test_what_a_thread_raises_arrives() -> None:
    def stops() -> None:
        raise StopIteration

    def exits() -> None:
        raise SystemExit

    with pytest.raises(RuntimeError, match="StopIteration"):  # which would end a coroutine without a word
        await in_thread(stops)
    with pytest.raises(SystemExit):
        await in_thread(exits)


async def test_threads_are_used_again_also_after_a_call_that_was_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    gate, before = threading.Event(), threading.active_count()
    call = asyncio.create_task(background.in_thread(gate.wait))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait([call])
    await asyncio.sleep(0)
    gate.set()
    for _ in range(50):
        await background.in_thread(int)
    assert threading.active_count() - before < 25
    assert not failed

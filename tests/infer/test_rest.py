"""The way between awake and resting: every pair of rests, wakes, requests, failures and cancellations."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from infer.rest import Busy, RestError, Rests, State


class FakeMemory:
    """Says what is done; where `held`, each change waits for `go_on`."""

    def __init__(self) -> None:
        self.given, self.num_given, self.num_taken = False, 0, 0
        self.held = False
        self.errors: list[Exception | None] = []
        """Of the coming changes, in their order; none where it is empty."""
        self.began = asyncio.Semaphore(0)
        self.go_on = asyncio.Semaphore(0)

    async def give_back(self) -> int:
        await self._change(given=True)
        self.num_given += 1
        return 100 + self.num_given

    async def take_back(self) -> None:
        await self._change(given=False)
        self.num_taken += 1

    async def _change(self, *, given: bool) -> None:
        self.began.release()
        if self.held:
            await self.go_on.acquire()
        if self.errors and (error := self.errors.pop(0)) is not None:
            raise error
        self.given = given


class Watched:
    """A Rests over a FakeMemory, with the states that it has said."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self.memory, self.said = FakeMemory(), list[State]()
        self.rests = Rests(memory=self.memory, timeout_s=timeout_s, on_change=self.said.append)
        self.served: list[str] = []

    async def request(self, name: str, until: asyncio.Event | None = None, *, num_turns: int = 0) -> None:
        async with self.rests.awake(name):
            if until is not None:
                await until.wait()
            for _ in range(1 + num_turns):
                assert (self.rests.state, self.memory.given) == ("awake", False)
                await asyncio.sleep(0)
            self.served.append(name)


@pytest.fixture
async def watched() -> AsyncIterator[Watched]:
    """Afterwards no change is under way."""
    made = Watched()
    yield made
    assert not made.rests._tasks
    assert made.rests._num_in_use == 0


async def ended(task: "asyncio.Task[Any]") -> Any:
    return await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), 60)


def begun(work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
    return asyncio.ensure_future(work)


async def turns() -> None:
    """Enough of the event loop for whatever can go on to come to where it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_rest_gives_the_memory_back_and_waking_takes_it_again(watched: Watched) -> None:
    rests, memory = watched.rests, watched.memory
    assert await rests.rest() == 101
    assert (rests.state, memory.given) == ("resting", True)
    assert await rests.wake()
    assert (rests.state, memory.given) == ("awake", False)
    assert watched.said == ["falling_asleep", "resting", "waking", "awake"]
    figures = rests.figures
    assert (figures.num_rests, figures.num_woken_by_requests, figures.num_failed, figures.freed_bytes) == (1, 0, 0, 101)
    assert figures.rested_s > 0


async def test_what_is_so_already_costs_nothing(watched: Watched) -> None:
    assert not await watched.rests.wake()
    assert (await watched.rests.rest(), await watched.rests.rest()) == (101, 101)
    assert (await watched.rests.wake(), await watched.rests.wake()) == (True, False)
    assert (watched.memory.num_given, watched.memory.num_taken, watched.rests.figures.num_rests) == (1, 1, 1)


async def test_a_request_wakes_first_and_is_counted(watched: Watched) -> None:
    await watched.rests.rest()
    await asyncio.gather(watched.request("a"), watched.request("b"))
    assert watched.served == ["a", "b"]
    assert watched.memory.num_taken == 1
    assert watched.rests.figures.num_woken_by_requests == 1
    await watched.request("c")
    assert watched.rests.figures.num_woken_by_requests == 1


async def test_requests_in_flight_forbid_a_rest_and_nothing_changes(watched: Watched) -> None:
    done = asyncio.Event()
    tasks = [begun(watched.request(name, done)) for name in "abc"]
    await asyncio.sleep(0)
    with pytest.raises(Busy, match="requests in flight: 3"):
        await watched.rests.rest()
    assert (watched.said, watched.memory.num_given) == ([], 0)
    done.set()
    await asyncio.gather(*tasks)
    assert await watched.rests.rest() == 101


async def test_a_rest_waits_for_what_is_in_flight_as_long_as_it_may(watched: Watched) -> None:
    done = asyncio.Event()
    request = begun(watched.request("a", done))
    await asyncio.sleep(0)
    resting = begun(watched.rests.rest(timeout_s=5))
    with pytest.raises(Busy):
        await watched.rests.rest(timeout_s=0.01)
    assert not resting.done()
    await watched.request("b")  # new ones are served meanwhile
    done.set()
    assert await asyncio.wait_for(resting, 60) == 101
    await request
    assert watched.served == ["b", "a"]


async def test_a_rest_waits_on_where_the_next_request_came_before_it_could_begin(watched: Watched) -> None:
    first, second = asyncio.Event(), asyncio.Event()

    async def back_to_back() -> None:
        await watched.request("a", first)
        await watched.request("b", second)

    requests = begun(back_to_back())
    await asyncio.sleep(0)
    resting = begun(watched.rests.rest(timeout_s=5))
    first.set()
    await turns()
    assert (watched.served, resting.done()) == (["a"], False)
    second.set()
    assert await asyncio.wait_for(resting, 60) == 101
    await requests
    assert (watched.served, watched.rests.state) == (["a", "b"], "resting")


async def test_a_rest_goes_back_to_waiting_where_a_request_comes_as_it_is_about_to_begin(watched: Watched) -> None:
    resting = begun(watched.rests.rest(timeout_s=60))
    await asyncio.sleep(0)
    async with watched.rests.awake("a"):
        await turns()
        assert (watched.rests.state, resting.done()) == ("awake", False)
    assert await asyncio.wait_for(resting, 60) == 101


async def test_a_rest_that_finds_no_moment_without_requests_gives_up_at_its_deadline(watched: Watched) -> None:
    async def one_after_the_other() -> None:
        while True:
            await watched.request("a")

    requests, clock = begun(one_after_the_other()), asyncio.get_running_loop().time
    await asyncio.sleep(0)
    started_s = clock()
    with pytest.raises(Busy, match="requests in flight: 1"):
        await asyncio.wait_for(watched.rests.rest(timeout_s=0.05), 60)
    assert clock() - started_s > 0.049
    requests.cancel()
    await ended(requests)
    assert watched.said == []


async def test_a_wake_ends_the_rests_that_still_wait_for_requests(watched: Watched) -> None:
    done = asyncio.Event()
    request = begun(watched.request("a", done))
    pending = [begun(watched.rests.rest(timeout_s=60)) for _ in range(2)]
    await turns()
    assert not await watched.rests.wake()
    for resting in pending:
        with pytest.raises(Busy, match="a wake has ended this rest before it began"):
            await asyncio.wait_for(resting, 60)
    done.set()
    await request
    await turns()
    assert (watched.said, watched.memory.num_given) == ([], 0)
    assert await watched.rests.rest() == 101


async def test_a_wake_ends_a_rest_that_is_just_about_to_begin(watched: Watched) -> None:
    resting = begun(watched.rests.rest(timeout_s=60))
    await asyncio.sleep(0)
    assert not await watched.rests.wake()
    with pytest.raises(Busy, match="a wake has ended"):
        await asyncio.wait_for(resting, 60)
    assert watched.said == []


async def test_a_wake_while_one_rest_falls_asleep_ends_those_that_wait_for_it(watched: Watched) -> None:
    watched.memory.held = True
    first = begun(watched.rests.rest())
    await watched.memory.began.acquire()
    second = begun(watched.rests.rest(timeout_s=60))
    await turns()
    waking = begun(watched.rests.wake())
    await turns()
    watched.memory.held = False
    watched.memory.go_on.release()
    assert (await first, await waking) == (101, True)
    with pytest.raises(Busy, match="a wake has ended"):
        await asyncio.wait_for(second, 60)
    assert (watched.rests.state, watched.memory.num_given) == ("awake", 1)


async def test_a_request_that_ends_with_an_error_or_is_cancelled_is_in_flight_no_more(watched: Watched) -> None:
    with pytest.raises(KeyError):
        async with watched.rests.awake("a"):
            raise KeyError
    request = begun(watched.request("b", asyncio.Event()))
    await asyncio.sleep(0)
    request.cancel()
    await ended(request)
    assert await watched.rests.rest() == 101


async def test_a_request_that_comes_while_it_falls_asleep_waits_and_wakes_it(watched: Watched) -> None:
    memory = watched.memory
    memory.held = True
    resting = begun(watched.rests.rest())
    await memory.began.acquire()
    request = begun(watched.request("a"))
    waking = begun(watched.rests.wake())
    await asyncio.sleep(0)
    assert (memory.num_taken, watched.served) == (0, [])
    memory.go_on.release()
    assert await resting == 101
    await memory.began.acquire()
    assert watched.rests.state == "waking"
    late = begun(watched.request("b"))
    again = begun(watched.rests.rest())
    await asyncio.sleep(0)
    memory.go_on.release()
    with pytest.raises(Busy):  # with two requests that wait
        await again
    await asyncio.gather(request, late)
    assert not await waking
    assert watched.served == ["a", "b"]
    assert watched.said == ["falling_asleep", "resting", "waking", "awake"]


async def test_rests_at_once_give_the_memory_back_once(watched: Watched) -> None:
    assert await asyncio.gather(*(watched.rests.rest() for _ in range(3))) == [101] * 3
    assert watched.memory.num_given == 1
    assert sorted(await asyncio.gather(*(watched.rests.wake() for _ in range(3)))) == [False, False, True]


async def test_a_rest_whose_caller_is_gone_goes_to_its_end(watched: Watched) -> None:
    watched.memory.held = True
    resting = begun(watched.rests.rest())
    await watched.memory.began.acquire()
    resting.cancel()
    await ended(resting)
    assert watched.rests.state == "falling_asleep"
    watched.memory.held = False
    watched.memory.go_on.release()
    assert await watched.rests.rest() == 101
    assert (watched.memory.num_given, watched.rests.figures.num_rests) == (1, 1)
    await watched.request("a")


async def test_a_wake_whose_caller_is_gone_goes_to_its_end(watched: Watched) -> None:
    await watched.rests.rest()
    watched.memory.held = True
    await watched.memory.began.acquire()
    request = begun(watched.request("a"))
    await watched.memory.began.acquire()
    request.cancel()
    await ended(request)
    assert (watched.rests.state, watched.served) == ("waking", [])
    watched.memory.go_on.release()
    await watched.request("b")
    assert (watched.memory.num_taken, watched.rests.figures.num_woken_by_requests) == (1, 1)


async def test_a_rest_that_fails_leaves_it_awake(watched: Watched) -> None:
    watched.memory.errors = [RestError("no")]
    with pytest.raises(RestError, match="no"):
        await watched.rests.rest()
    assert watched.said == ["falling_asleep", "waking", "awake"]
    assert watched.memory.num_taken == 1  # for it may have come half-way
    await watched.request("a")
    figures = watched.rests.figures
    assert (figures.num_rests, figures.num_failed, figures.rested_s) == (0, 1, 0)
    assert await watched.rests.rest() == 101


async def test_where_all_fails_each_request_tries_again(watched: Watched) -> None:
    watched.memory.errors = [RestError("first"), RestError("second"), RestError("third"), RestError("fourth")]
    with pytest.raises(RestError, match="first"):
        await watched.rests.rest()
    assert watched.rests.state == "resting"
    with pytest.raises(RestError, match="third"):
        await watched.request("a")
    with pytest.raises(RestError, match="fourth"):
        await watched.rests.wake()
    await watched.request("b")
    assert (watched.served, watched.rests.figures.num_failed) == (["b"], 4)


async def test_what_was_no_rest_is_not_counted_as_one(watched: Watched) -> None:
    await watched.rests.rest()
    await watched.rests.wake()
    before = watched.rests.figures
    watched.memory.errors = [RestError("giving"), RestError("taking")]
    with pytest.raises(RestError, match="giving"):
        await watched.rests.rest()
    await watched.request("a")
    after = watched.rests.figures
    assert (after.num_rests, after.rested_s, after.num_woken_by_requests) == (1, before.rested_s, 0)


async def test_a_wake_that_fails_leaves_it_resting_and_all_is_given_back_again_if_asked(watched: Watched) -> None:
    """Of several workers, some may have taken theirs."""
    await watched.rests.rest()
    watched.memory.errors = [RestError("no memory")]
    with pytest.raises(RestError, match="no memory"):
        await watched.request("a")
    assert watched.rests.state == "resting"
    assert [await watched.rests.rest() for _ in range(2)] == [102, 102]
    watched.memory.errors = [ValueError("other")]
    with pytest.raises(ValueError, match="other"):  # what is not expected passes, too
        await watched.rests.wake()
    assert await watched.rests.wake()
    figures = watched.rests.figures
    assert (figures.num_rests, figures.num_failed, figures.num_woken_by_requests) == (1, 2, 0)


async def test_an_engine_that_does_not_answer_is_waited_for_only_so_long() -> None:
    watched = Watched(timeout_s=0.01)
    watched.memory.held = True
    limit = r"took longer than canary_timeout_s = 0\.01 s; set canary_timeout_s in infer\.yaml higher"
    with pytest.raises(RestError, match=rf"giving the KV cache's memory back {limit}"):
        await watched.rests.rest()
    with pytest.raises(RestError, match=rf"taking the KV cache's memory again {limit}"):
        await watched.request("a")
    watched.memory.held = False
    await watched.request("b")
    assert watched.served == ["b"]


async def test_a_wake_that_is_broken_off_is_made_up_for() -> None:
    """As at the end of the event loop, when all tasks are cancelled."""
    watched = Watched()
    await watched.rests.rest()
    watched.memory.held = True
    waking = begun(watched.rests.wake())
    for _ in ("the rest", "the wake"):
        await watched.memory.began.acquire()
    (task,) = watched.rests._tasks
    task.cancel()
    await ended(waking)
    assert watched.rests.state == "resting"
    watched.memory.held = False
    await watched.request("a")
    assert watched.served == ["a"]


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_comes_in_whatever_order_every_request_finds_it_awake_and_ends(seed: int) -> None:
    """Rests, wakes, requests and cancellations at random, over a memory that fails at random."""
    draw, watched = random.Random(seed), Watched()
    memory, counter = watched.memory, itertools.count()
    slow = FakeMemory._change

    async def change(*, given: bool) -> None:
        for _ in range(draw.randrange(4)):
            await asyncio.sleep(0)
        memory.errors = [RestError("by chance") if draw.random() < 0.4 else None]
        await slow(memory, given=given)

    memory._change = change  # type: ignore[method-assign]
    outcomes = list[str]()

    async def one() -> None:
        for _ in range(draw.randrange(400)):
            await asyncio.sleep(0)
        kinds: list[Callable[[], Coroutine[Any, Any, Any]]] = [
            lambda: watched.rests.rest(timeout_s=draw.choice((0, 60))),
            lambda: watched.rests.rest(),
            watched.rests.wake,
            lambda: watched.request(f"{next(counter)}", num_turns=draw.randrange(5)),
            lambda: watched.request(f"{next(counter)}"),
        ]
        try:
            await draw.choice(kinds)()
        except (Busy, RestError) as error:
            outcomes.append(type(error).__name__)

    tasks = [begun(one()) for _ in range(120)]
    for task in draw.sample(tasks, 40):
        for _ in range(draw.randrange(20)):
            await asyncio.sleep(0)
        task.cancel()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
    assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results), results
    await asyncio.gather(*watched.rests._tasks, return_exceptions=True)
    assert watched.rests._num_in_use == 0
    assert watched.rests.state in ("awake", "resting")
    memory._change = slow.__get__(memory)  # type: ignore[method-assign]
    memory.errors = []
    await watched.request("last")
    assert watched.served[-1] == "last"
    assert len(watched.served) > 10
    assert watched.rests.figures.num_rests > 1
    assert {"Busy", "RestError"} <= set(outcomes)

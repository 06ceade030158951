"""Asking servers how they are: those that fall silent, and what the others say about their load."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from msgspec import structs

from orchestrator.inference.client import InferenceClient
from orchestrator.inference.health import Concurrency, Health
from orchestrator.inference.weight_sync import WeightSync
from tests.orchestrator.fakes import FakeServer, until
from tests.orchestrator.inference.serving import ask, running, synced
from transport.http import ServerLoad


class Silent(FakeServer):
    """Accepts everything, and answers only while `speaks` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.speaks = asyncio.Event()
        self.speaks.set()

    async def _info(self, request: web.Request) -> web.Response:
        await self.speaks.wait()
        return await super()._info(request)

    async def _generate(self, request: web.Request) -> web.Response:
        await self.speaks.wait()
        return await super()._generate(request)

    async def _load(self, request: web.Request) -> web.Response:
        await self.speaks.wait()
        return await super()._load(request)

    async def _unload(self, request: web.Request) -> web.Response:
        await self.speaks.wait()
        return await super()._unload(request)


@asynccontextmanager
async def watched(
    *servers: FakeServer, timeout_s: float = 30
) -> AsyncIterator[tuple[InferenceClient, WeightSync, Health, list[Any]]]:
    """Servers that are asked all the time, and the rounds of their loads."""
    async with synced(*servers) as (client, sync):
        health, rounds = Health(client, interval_s=0.01, timeout_s=timeout_s), list[Any]()
        await sync.load(0)
        async with running(client, health.watch(rounds.append)):
            yield client, sync, health, rounds


async def test_what_a_server_was_asked_that_falls_silent_goes_elsewhere_and_it_returns_when_it_speaks() -> None:
    silent, sound = Silent(), FakeServer()
    async with watched(silent, sound, timeout_s=3) as (client, _, _, _):
        silent.speaks.clear()
        assert await asyncio.gather(*(ask(client) for _ in range(6))) == [1] * 6
        assert len(sound.requests) == 6
        assert list(client.pool.out) == [client.pool.servers[0]]
        silent.loads.clear()
        silent.speaks.set()
        await until(lambda: not client.pool.out)
        assert [load["version"] for load in silent.loads] == [0]


async def test_a_server_that_falls_silent_holds_up_no_version_of_the_others() -> None:
    silent, sound = Silent(), FakeServer()
    async with watched(silent, sound, timeout_s=0.3) as (client, sync, _, _), asyncio.timeout(20):
        for change in (lambda: sync.load(1), lambda: sync.keep_only({1})):
            silent.speaks.clear()
            await change()
            assert list(client.pool.out) == [client.pool.servers[0]]
            silent.speaks.set()
            await until(lambda: not client.pool.out)
        assert (silent.live, sound.live) == ({1}, {1})


async def test_a_server_that_is_slow_to_say_how_it_is_holds_up_no_other() -> None:
    silent, sound = Silent(), FakeServer()
    async with watched(silent, sound) as (client, _, _, rounds):
        silent.speaks.clear()
        await until(lambda: [len(loads) for loads in rounds[-3:]] == [1, 1, 1])
        assert not client.pool.out
        silent.speaks.set()


async def test_a_server_that_dies_between_requests_is_out_before_one_comes() -> None:
    dies, sound = FakeServer(), FakeServer()
    async with watched(dies, sound) as (client, _, _, _):
        await dies.stop()
        await until(lambda: client.pool.out)
        assert list(client.pool.out) == [client.pool.servers[0]]


async def test_metrics_are_of_the_rounds_since_the_last_ones() -> None:
    one, other = FakeServer(), FakeServer()
    async with watched(one, other) as (_, _, health, rounds):
        one.info["load"] = structs.asdict(ServerLoad(num_running=3, num_waiting=1, kv_use=0.25))
        other.info["load"] = structs.asdict(ServerLoad(num_running=5, num_waiting=0, kv_use=0.5))
        await until(lambda: {3, 5} <= {load.num_running for loads in rounds for load in loads})
        health.metrics()
        num_rounds = len(rounds)
        await until(lambda: len(rounds) > num_rounds)
        expected = {"perf/servers": 2, "perf/server_running": 8, "perf/server_waiting": 1, "perf/server_kv_use": 0.5}
        assert health.metrics() == expected
        assert health.metrics() == expected


# --- the limit of groups in flight, stepped by hand and against a server of a few lines ---

FREE = ServerLoad(num_running=20, num_waiting=2, kv_use=0.5)
QUEUES = ServerLoad(num_running=20, num_waiting=3, kv_use=0.5)
FULL = ServerLoad(num_running=20, num_waiting=0, kv_use=0.95)


def test_the_limit_grows_by_a_twentieth_and_at_least_by_one_while_it_holds_rollouts_back() -> None:
    control = Concurrency(least=10, most=1000)
    # 10 + 1, + 1, …: 20 after ten rounds; 100 · 1.05 = 105.
    assert [control.observe([FREE], num_in_flight=10 + n) for n in range(10)] == list(range(11, 21))
    larger = Concurrency(least=100, most=1000)
    assert larger.observe([FREE], num_in_flight=100) == 105


def test_a_limit_that_is_not_reached_does_not_grow() -> None:
    assert Concurrency(least=10, most=1000).observe([FREE], num_in_flight=9) == 10


@pytest.mark.parametrize("crowded", [QUEUES, FULL])
def test_one_crowded_server_is_enough_to_shrink_the_limit(crowded: ServerLoad) -> None:
    control = Concurrency(least=10, most=1000)
    for _ in range(100):
        control.observe([FREE], num_in_flight=1000)
    # 1000 · 0.85 = 850, and again 722.5.
    assert [control.observe([FREE, crowded], num_in_flight=1000) for _ in range(2)] == [850, 722]


def test_the_limit_stays_between_its_bounds() -> None:
    control = Concurrency(least=10, most=12)
    assert [control.observe([FREE], num_in_flight=12) for _ in range(4)] == [11, 12, 12, 12]
    assert [control.observe([FULL], num_in_flight=12) for _ in range(3)] == [10, 10, 10]


def test_bounds_that_leave_nothing_are_an_error() -> None:
    for least, most in ((0, 5), (6, 5)):
        with pytest.raises(ValueError, match=f"{least}"):
            Concurrency(least=least, most=most)


@pytest.mark.parametrize("places", [24, 300])
def test_the_limit_finds_what_two_servers_can_take_and_stays_there(places: int) -> None:
    control, limits = Concurrency(least=8, most=10_000), []
    for _ in range(300):
        each = control.limit / 2
        running = min(places, round(each))
        load = ServerLoad(num_running=running, num_waiting=max(0, round(each) - places), kv_use=0.9 * running / places)
        limits.append(control.observe([load, load], num_in_flight=control.limit))
    settled = limits[100:]
    # At least 0.85 of all places are used, and at most a tenth and one step more than there are is asked.
    assert min(settled) >= 0.85 * 2 * places
    assert max(settled) <= 1.17 * 2 * places

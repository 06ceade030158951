"""Asking servers how they are: those that fall silent, and what the others say about their load."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from msgspec import structs

from orchestrator.inference.client import ServerPool
from orchestrator.inference.health import Health
from orchestrator.inference.weight_sync import Relay
from orchestrator.loop import orchestrate
from orchestrator.startup import Mismatch
from tests.orchestrator.fakes import FakeServer, FakeTrainer, settings_for, until
from tests.orchestrator.inference.test_discovery import ask
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
async def watched(*servers: FakeServer, timeout_s: float = 30) -> AsyncIterator[tuple[ServerPool, Health, list[Any]]]:
    """A pool whose servers are asked all the time, and the rounds of their loads."""
    for server in servers:
        await server.start()
    pool, rounds = ServerPool([server.url for server in servers], api_key=None, timeout_s=30), list[Any]()
    relay, health = Relay(pool, run_id="run", alias="default"), Health(pool, interval_s=0.01, timeout_s=timeout_s)

    def observe(loads: Sequence[ServerLoad]) -> None:
        rounds.append(loads)

    tasks = [asyncio.create_task(one) for one in (relay.watch(), health.watch(observe))]
    await relay.load(0)
    try:
        yield pool, health, rounds
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await pool.close()
        for server in servers:
            await server.stop()


async def test_what_a_server_was_asked_that_falls_silent_goes_elsewhere_and_it_returns_when_it_speaks() -> None:
    silent, sound = Silent(), FakeServer()
    async with watched(silent, sound, timeout_s=3) as (pool, _, _):
        silent.speaks.clear()
        assert await asyncio.gather(*(ask(pool, 0) for _ in range(6))) == [1] * 6
        assert len(sound.requests) == 6
        assert list(pool.membership.out) == [pool.servers[0]]
        silent.loads.clear()
        silent.speaks.set()
        await until(lambda: not pool.membership.out)
        assert [load["version"] for load in silent.loads] == [0]


async def test_a_server_that_falls_silent_holds_up_no_version_of_the_others() -> None:
    silent, sound = Silent(), FakeServer()
    async with watched(silent, sound, timeout_s=0.3) as (pool, _, _), asyncio.timeout(20):
        relay = Relay(pool, run_id="run", alias="default")
        for change in (lambda: relay.load(1), lambda: relay.keep_only({1})):
            silent.speaks.clear()
            await change()
            assert list(pool.membership.out) == [pool.servers[0]]
            silent.speaks.set()
            await until(lambda: not pool.membership.out)
        assert (silent.live, sound.live) == ({1}, {1})


async def test_a_server_that_is_slow_to_say_how_it_is_holds_up_no_other() -> None:
    silent, sound = Silent(), FakeServer()
    async with watched(silent, sound) as (pool, _, rounds):
        silent.speaks.clear()
        await until(lambda: [len(loads) for loads in rounds[-3:]] == [1, 1, 1])
        assert not pool.membership.out
        silent.speaks.set()


async def test_a_server_that_dies_between_requests_is_out_before_one_comes() -> None:
    dies, sound = FakeServer(), FakeServer()
    async with watched(dies, sound) as (pool, _, _):
        await dies.stop()
        await until(lambda: pool.membership.out)
        assert list(pool.membership.out) == [pool.servers[0]]


async def test_metrics_are_of_the_rounds_since_the_last_ones() -> None:
    one, other = FakeServer(), FakeServer()
    async with watched(one, other) as (_, health, rounds):
        one.info["load"] = structs.asdict(ServerLoad(num_running=3, num_waiting=1, kv_use=0.25))
        other.info["load"] = structs.asdict(ServerLoad(num_running=5, num_waiting=0, kv_use=0.5))
        await until(lambda: {3, 5} <= {load.num_running for loads in rounds for load in loads})
        health.metrics()
        num_rounds = len(rounds)
        await until(lambda: len(rounds) > num_rounds)
        expected = {"perf/servers": 2, "perf/server_running": 8, "perf/server_waiting": 1, "perf/server_kv_use": 0.5}
        assert health.metrics() == expected
        assert health.metrics() == expected


async def test_a_server_that_does_not_say_what_it_has_to_do_is_refused_where_the_groups_in_flight_follow_it(
    tmp_path: Path,
) -> None:
    FakeTrainer(tmp_path).start()
    server = await FakeServer(load=None).start()
    with pytest.raises(Mismatch, match="min_concurrent_groups"):
        await orchestrate(settings_for(tmp_path, server, min_concurrent_groups=1))
    await server.stop()


async def test_where_nobody_puts_servers_back_one_that_cannot_be_reached_for_a_moment_stays() -> None:
    server = await FakeServer().start()
    pool, rounds = ServerPool([server.url], api_key=None, timeout_s=30), list[Any]()
    health = Health(pool, interval_s=0.01, timeout_s=30)
    await server.stop()
    watch = asyncio.create_task(health.watch(rounds.append))
    await asyncio.sleep(0.1)
    assert (rounds, pool.membership.out) == ([], {})
    await server.start()
    await until(lambda: rounds)
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
    await pool.close()
    await server.stop()

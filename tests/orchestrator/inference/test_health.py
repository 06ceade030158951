"""Asking servers how they are: those that fall silent, and what the others say about their load."""

import asyncio

import pytest
from aiohttp import web
from grpo.orchestrator.inference.pool import ServerPool
from grpo.transport.http import ServerLoad
from msgspec import structs

from tests.orchestrator.fakes import FakeServer, until
from tests.orchestrator.inference.serving import ask, watched


class Silent(FakeServer):
    """Accepts everything, and answers only while `speaks` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.speaks = asyncio.Event()
        self.speaks.set()

    async def answering(self, request: web.Request) -> None:
        await self.speaks.wait()


async def test_what_a_server_was_asked_that_falls_silent_goes_elsewhere_and_it_returns_when_it_speaks() -> None:
    silent, sound = Silent(), FakeServer()
    async with watched(silent, sound, silence_s=2.0) as (client, sync, _):
        await sync.load(0)
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
    async with watched(silent, sound, silence_s=2.0) as (client, sync, _), asyncio.timeout(60):
        await sync.load(0)
        for change in (lambda: sync.load(1), lambda: sync.keep_only({1: {"newest": 1}})):
            silent.speaks.clear()
            await change()
            assert list(client.pool.out) == [client.pool.servers[0]]
            silent.speaks.set()
            await until(lambda: not client.pool.out)
        assert (silent.live, sound.live) == ({1}, {1})


async def test_a_server_that_is_gone_is_neither_known_nor_asked_and_those_that_wait_are_told() -> None:
    pool = ServerPool(["http://one/v1", "http://other"])
    for server in pool.servers:
        pool.readmit(server)
    told = asyncio.create_task(pool.changed.wait())
    await asyncio.sleep(0)
    pool.gone("http://one", "it has left the name")
    await asyncio.wait_for(told, 30)
    assert (pool.servers, pool.routed, pool.out) == (("http://other",), ("http://other",), {})
    pool.eject("http://one", "it is not known")
    assert pool.out == {}


class Counting(FakeServer):
    num_asked = 0
    """How it is."""

    async def _info(self, request: web.Request) -> web.Response:
        self.num_asked += 1
        return await super()._info(request)


async def test_the_load_of_all_servers_is_a_mean_over_the_time_since_the_last_metrics() -> None:
    one, other = Counting(), Counting()
    async with watched(one, other) as (_, _, watch):
        one.info["load"] = structs.asdict(ServerLoad(num_running=3, num_waiting=1, kv_use=0.25))
        other.info["load"] = structs.asdict(ServerLoad(num_running=5, num_waiting=0, kv_use=0.5))
        found = []
        for _ in range(2):
            before, num_asked = watch.figures(), [server.num_asked + 3 for server in (one, other)]
            await until(lambda num_asked=num_asked: one.num_asked > num_asked[0] and other.num_asked > num_asked[1])
            found.append(watch.figures().since(before))
        expected = {"perf/servers": 2, "perf/server_running": 8, "perf/server_waiting": 1, "perf/server_kv_use": 0.5}
        assert found[1] == pytest.approx(expected)

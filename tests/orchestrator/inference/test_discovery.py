"""Servers that are found by name, join late, vanish and come back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from configs.client import ElasticSettings
from orchestrator.inference.client import ServerError, ServerPool
from orchestrator.inference.discovery import Discovery, addresses_of
from orchestrator.inference.weight_sync import Relay
from orchestrator.loop import orchestrate
from orchestrator.rollouts.records import SamplingParams
from tests.orchestrator.fakes import FakeServer, FakeTrainer, settings_for, until

ADDRESSES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")


class Names:
    """A DNS with one name. `addresses` None: it fails."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: list[str] | None = list(addresses)
        self.asked: list[str] = []

    async def look_up(self, hostname: str) -> list[str]:
        self.asked.append(hostname)
        if self.addresses is None:
            raise OSError("Name or service not known")
        return list(self.addresses)


@asynccontextmanager
async def servers_at(*addresses: str) -> AsyncIterator[list[FakeServer]]:
    """Servers with one port at these addresses, not started; stopped afterwards."""
    servers = [FakeServer() for _ in addresses]
    for server, address in zip(servers, addresses, strict=True):
        server.host, server.port = address, servers[0].port
    try:
        yield servers
    finally:
        for server in servers:
            if server.url:
                await server.stop()


@asynccontextmanager
async def found(names: Names, port: int) -> AsyncIterator[tuple[ServerPool, Relay, Discovery]]:
    """A pool without servers, a relay that watches it, and what finds servers for it."""
    pool = ServerPool([], api_key=None, timeout_s=30)
    relay = Relay(pool, run_id="run", alias="default")
    settings = ElasticSettings(hostname="servers", port=port, sync_interval=0.01)
    watch = asyncio.create_task(relay.watch())
    await asyncio.sleep(0)
    try:
        yield pool, relay, Discovery(pool, settings, look_up=names.look_up)
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await pool.close()


async def ask(pool: ServerPool, version: int) -> int:
    return len(
        await pool.generate(
            [65], params=SamplingParams(temperature=1.0, max_tokens=4), num=1, version=version, seed=None
        )
    )


async def test_a_server_that_is_found_late_proves_every_version_in_use_before_it_gets_requests() -> None:
    names = Names(ADDRESSES[0])
    async with servers_at(*ADDRESSES[:2]) as (one, late), found(names, one.port) as (pool, relay, discovery):
        await one.start()
        await discovery.sync()
        for version in (3, 4):
            await relay.load(version)
        await late.start()
        names.addresses = list(ADDRESSES[:2])
        await discovery.sync()
        assert len(pool.membership.routed) == 1
        await until(lambda: len(pool.membership.routed) == 2)
        assert [load["version"] for load in late.loads] == [3, 4]
        assert late.requests == []
        assert await asyncio.gather(*(ask(pool, 3) for _ in range(4))) == [1] * 4
        assert late.requests
        assert set(names.asked) == {"servers"}


async def test_a_server_that_vanishes_ends_what_it_has_gets_no_more_and_is_forgotten_when_it_is_dead() -> None:
    names = Names(*ADDRESSES[:2])
    async with servers_at(*ADDRESSES[:2]) as (stays, goes), found(names, stays.port) as (pool, relay, discovery):
        for server in (stays, goes):
            await server.start()
        await discovery.sync()
        await relay.load(0)
        await until(lambda: len(pool.membership.routed) == 2)
        goes.latency_s = stays.latency_s = 0.1
        asked = [asyncio.create_task(ask(pool, 0)) for _ in range(2)]
        await until(lambda: goes.requests and stays.requests)
        names.addresses = [ADDRESSES[0]]
        await discovery.sync()
        assert await asyncio.gather(*asked) == [1, 1]
        assert await asyncio.gather(*(ask(pool, 0) for _ in range(3))) == [1] * 3
        assert len(goes.requests) == 1
        assert len(pool.servers) == 2
        await goes.stop()
        await discovery.sync()
        assert pool.servers == (stays.url.removesuffix("/v1"),)
        assert pool.membership.out == {}


async def test_a_version_that_loads_while_a_server_is_forgotten_and_found_is_proved_by_the_new_one_too() -> None:
    names = Names(*ADDRESSES[:2])
    async with servers_at(*ADDRESSES[:2]) as (slow, other), found(names, slow.port) as (pool, relay, discovery):
        for server in (slow, other):
            await server.start()
        await discovery.sync()
        await until(lambda: len(pool.membership.routed) == 2)
        slow.load_latency_s = 0.5
        loading = asyncio.create_task(relay.load(0))
        await until(lambda: other.live)
        names.addresses = [ADDRESSES[0]]
        await other.stop()
        await discovery.sync()
        assert len(pool.servers) == 1
        await other.start()
        names.addresses = list(ADDRESSES[:2])
        await discovery.sync()
        await until(lambda: len(pool.membership.routed) == 2)
        await loading
        assert other.live == {0}


async def test_where_the_dns_fails_what_is_known_stays() -> None:
    names = Names(ADDRESSES[0])
    async with servers_at(ADDRESSES[0]) as (server,), found(names, server.port) as (pool, relay, discovery):
        await server.start()
        await discovery.sync()
        await relay.load(0)
        names.addresses = None
        for _ in range(3):
            await discovery.sync()
        assert await ask(pool, 0) == 1


async def test_a_name_without_addresses_is_waited_for_and_named_at_the_deadline() -> None:
    pool, names = ServerPool([], api_key=None, timeout_s=0.2), Names()
    names.addresses = None
    discovery = Discovery(pool, ElasticSettings(hostname="nowhere", sync_interval=0.01), look_up=names.look_up)
    with pytest.raises(ServerError, match=r"client\.elastic\.hostname"):
        await discovery.wait_for_any()
    pool.timeout_s = 30
    waiting = asyncio.create_task(discovery.wait_for_any())
    await until(lambda: len(names.asked) > 3)
    names.addresses = ["10.0.0.1", "fd00::1"]
    await waiting
    assert pool.servers == ("http://10.0.0.1:8000", "http://[fd00::1]:8000")
    await pool.close()


async def test_addresses_come_from_the_systems_own_resolver() -> None:
    assert "127.0.0.1" in await addresses_of("localhost")
    with pytest.raises(OSError, match="DNS"):
        await addresses_of("a" * 64 + ".example")


async def test_a_run_finds_its_server_by_name(tmp_path: Path) -> None:
    FakeTrainer(tmp_path).start()
    server = await FakeServer().start()
    elastic = {"hostname": "localhost", "port": server.port, "sync_interval": 0.05}
    summary = await orchestrate(settings_for(tmp_path, client={"elastic": elastic, "timeout": 30}))
    assert summary.rollouts_trained == 3 * 16
    await server.stop()

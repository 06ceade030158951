"""Servers that are found by name, join late, vanish and come back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from grpo.configs.client import ElasticSettings
from grpo.orchestrator.inference.client import PolicyClient, ServerError
from grpo.orchestrator.inference.pool import ServerPool
from grpo.orchestrator.inference.watch import ServerWatch
from grpo.orchestrator.inference.weight_sync import WeightSync
from grpo.transport.status import FINISHED, StatusFile, server_file

from tests.orchestrator.fakes import FakeServer, until
from tests.orchestrator.inference.serving import ask, running
from tests.orchestrator.running import run

ADDRESSES = ("127.0.0.1", "127.0.0.2")


class Names:
    """A DNS with one name. Without addresses it fails."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)
        self.asked: list[str] = []

    async def look_up(self, hostname: str) -> list[str]:
        self.asked.append(hostname)
        if not self.addresses:
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
async def finding(elastic: ElasticSettings, **where: Any) -> AsyncIterator[tuple[PolicyClient, WeightSync]]:
    """A weight sync for servers that are found."""
    client = PolicyClient(ServerPool(), api_key=None, timeout_s=where.pop("timeout_s", 30))
    sync = WeightSync(client, alias="default")
    async with running(ServerWatch(sync, interval_s=0.02, timeout_s=30, elastic=elastic, **where), client):
        yield client, sync


def found(names: Names, port: int, **more: Any) -> AbstractAsyncContextManager[tuple[PolicyClient, WeightSync]]:
    """By name."""
    elastic = ElasticSettings(hostname="servers", port=port, sync_interval=0.01)
    return finding(elastic, look_up=names.look_up, **more)


async def test_servers_are_found_that_tell_the_runs_folder_where_they_are_until_they_end(tmp_path: Path) -> None:
    elastic = ElasticSettings(sync_interval=0.01)
    async with servers_at(*ADDRESSES) as servers, finding(elastic, folder=tmp_path) as (client, _):
        for server in servers:
            await server.start()
            StatusFile(tmp_path / server_file(server.host, server.port)).set("serving")
        await until(lambda: len(client.pool.routed) == 2)
        StatusFile(tmp_path / server_file(servers[1].host, servers[1].port)).set(FINISHED)
        left = f"http://{servers[0].host}:{servers[0].port}"
        await until(lambda: client.pool.servers == (left,))
        assert client.pool.routed == (left,)


async def test_a_server_that_is_found_late_proves_every_version_in_use_before_it_gets_requests() -> None:
    names = Names(ADDRESSES[0])
    async with servers_at(*ADDRESSES) as (one, late), found(names, one.port) as (client, sync):
        await one.start()
        await sync.wait_for_servers()
        for version in (3, 4):
            await sync.load(version)
        late.load_latency_s = 0.5
        await late.start()
        names.addresses = list(ADDRESSES)
        await until(lambda: len(client.pool.servers) == 2)
        assert len(client.pool.routed) == 1
        names.addresses, num_asked = [], len(names.asked)  # the DNS fails: what is known stays
        await until(lambda: len(names.asked) > num_asked + 3)
        await until(lambda: len(client.pool.routed) == 2)
        assert [load["version"] for load in late.loads] == [3, 4]
        assert late.requests == []
        assert await asyncio.gather(*(ask(client, 3) for _ in range(4))) == [1] * 4
        assert late.requests
        assert set(names.asked) == {"servers"}


async def test_a_name_without_addresses_is_waited_for_and_named_at_the_deadline() -> None:
    names = Names()
    async with found(names, 8000, timeout_s=0.2) as (client, sync):
        with pytest.raises(ServerError, match=r"client\.elastic\.hostname"):
            await sync.wait_for_servers()
        names.addresses = ["127.0.0.9", "::1"]
        await until(lambda: client.pool.servers == ("http://127.0.0.9:8000", "http://[::1]:8000"))


async def test_a_run_finds_its_server_by_name(tmp_path: Path, server: FakeServer) -> None:
    elastic = {"hostname": "localhost", "port": server.port, "sync_interval": 0.05}
    made = await run(tmp_path, client={"elastic": elastic, "timeout": 30}, max_steps=1)
    assert made.summary.rollouts_trained == 16

"""Clients of servers that are stand-ins."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from grpo.orchestrator.inference.client import PolicyClient
from grpo.orchestrator.inference.pool import ServerPool
from grpo.orchestrator.inference.watch import ServerWatch
from grpo.orchestrator.inference.weight_sync import WeightSync
from grpo.orchestrator.rollouts.records import SamplingParams

from tests.orchestrator.fakes import FakeServer


def name_of(server: FakeServer) -> str:
    """What a pool calls it."""
    return server.url.removesuffix("/v1")


def client_of(*urls: str, timeout_s: float = 120, api_key: str | None = None) -> PolicyClient:
    """Of servers in the routing."""
    pool = ServerPool(urls)
    for server in pool.servers:
        pool.readmit(server)
    return PolicyClient(pool, api_key=api_key, timeout_s=timeout_s)


@asynccontextmanager
async def running(watch: ServerWatch, client: PolicyClient) -> AsyncIterator[None]:
    """While the servers are watched, a minute at most; closes the client afterwards."""
    task = asyncio.create_task(watch.run())
    try:
        async with asyncio.timeout(60):  # pytest's own limit does not end a loop that never stops asking
            yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.close()


@asynccontextmanager
async def watched(
    *servers: FakeServer, timeout_s: float = 30, silence_s: float = 30, **settings: Any
) -> AsyncIterator[tuple[PolicyClient, WeightSync, ServerWatch]]:
    """A weight sync whose servers have been brought in and are watched; those without an address are started."""
    for server in servers:
        if not server.url:
            await server.start()
    client = PolicyClient(ServerPool([server.url for server in servers]), api_key=None, timeout_s=timeout_s)
    sync = WeightSync(client, alias="default", **settings)
    sync.run_id = "run"
    watch = ServerWatch(sync, interval_s=0.02, timeout_s=silence_s)
    try:
        async with running(watch, client):
            await sync.wait_for_servers()
            async with asyncio.timeout(60):
                while client.pool.out:
                    await client.pool.changed.wait()
            yield client, sync, watch
    finally:
        for server in servers:
            await server.stop()


@asynccontextmanager
async def synced(*servers: FakeServer, **settings: Any) -> AsyncIterator[tuple[PolicyClient, WeightSync]]:
    """The same without the watch."""
    async with watched(*servers, **settings) as (client, sync, _):
        yield client, sync


async def ask(client: PolicyClient, version: int = 0, num: int = 1, prompt: Sequence[int] = (65,)) -> int:
    """The number of answers under a version."""
    params = SamplingParams(temperature=1.0, max_tokens=32)  # so many that equal prompts stay requests of their own
    return len(await client.generate(list(prompt), params=params, num=num, version=version, seed=None))

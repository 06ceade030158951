"""The HTTP client against servers that misbehave."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from msgspec.structs import replace

from orchestrator.inference.client import Refused, ServerError, ServerPool
from orchestrator.rollouts.policy import PromptTooLong, TokenClient
from orchestrator.rollouts.records import SamplingParams
from tests.orchestrator.fakes import FakeServer
from transport.http import ServerInfo

PARAMS = SamplingParams(temperature=1.0, max_tokens=8)
FOLLOWING = replace(PARAMS, follow=True)


@pytest_asyncio.fixture
async def server() -> AsyncIterator[FakeServer]:
    server = await FakeServer().start()
    server.live = {0}
    yield server
    await server.stop()


def pool(*servers: FakeServer, timeout_s: float = 60, api_key: str | None = None) -> ServerPool:
    return ServerPool([server.url for server in servers], api_key=api_key, timeout_s=timeout_s)


async def ask(servers: ServerPool, num: int = 2, version: int = 0) -> int:
    client = TokenClient(servers, context_len=32)
    return len(await client.generate([65, 66], params=PARAMS, num=num, version=version, seed=None))


async def test_a_retry_waits_too_while_requests_are_held_back_and_that_time_does_not_count() -> None:
    answered, released = list[bool](), asyncio.Event()

    class Held(FakeServer):
        async def _generate(self, request: web.Request) -> web.Response:
            if self.num_failures:
                servers.hold()
                asyncio.get_running_loop().call_later(4.0, release)
            else:
                answered.append(released.is_set())
            return await super()._generate(request)

    def release() -> None:
        released.set()
        servers.release()

    server = await Held().start()
    server.live, server.num_failures, servers = {0}, 1, pool(server, timeout_s=3)
    assert await ask(servers) == 2
    assert answered == [True]
    await servers.close()
    await server.stop()


async def test_requests_go_to_the_least_loaded_server(server: FakeServer) -> None:
    other = await FakeServer().start()
    other.live, other.latency_s, server.latency_s = {0}, 1.0, 1.0
    servers = pool(server, other)
    await asyncio.gather(*(ask(servers) for _ in range(10)))
    assert (len(server.requests), len(other.requests)) == (5, 5)
    await servers.close()
    await other.stop()


async def test_a_server_is_told_of_the_adapter_that_is_asked_for(server: FakeServer) -> None:
    servers = pool(server)
    client = TokenClient(servers, context_len=32)
    for params in (PARAMS, replace(PARAMS, adapter="proposer")):
        await client.generate([65, 66], params=params, num=1, version=0, seed=None)
    await servers.score([65, 66], 0)
    await servers.score([65, 66], 0, adapter="proposer")
    for bodies in (server.requests, server.scores):
        assert [body["adapter"] for body in bodies] == [None, "proposer"]
    await servers.close()


async def test_the_key_opens_and_without_it_the_error_says_which_setting(server: FakeServer) -> None:
    server.api_key = "secret"
    locked, opened = pool(server), pool(server, api_key="secret")
    with pytest.raises(Refused, match=r"client\.api_key_var"):
        await locked.on(locked.servers[0], "GET", "/policy/info", ServerInfo)
    assert (await opened.on(opened.servers[0], "GET", "/policy/info", ServerInfo)).max_lora_rank == 16
    await locked.close()
    await opened.close()


async def test_a_prompt_without_room_for_its_answer_is_not_sent(server: FakeServer) -> None:
    servers = pool(server)
    client = TokenClient(servers, context_len=10)
    with pytest.raises(PromptTooLong):
        await client.generate([1, 2, 3], params=PARAMS, num=1, version=0, seed=None)
    assert server.requests == []
    await servers.close()


class Becoming(FakeServer):
    """Version 2 becomes live while a request is being sampled."""

    async def sampling(self, body: dict[str, Any]) -> None:
        self.live.add(2)


async def test_an_answer_that_follows_tells_which_version_sampled_which_tokens() -> None:
    server = await Becoming(lambda prompt, version: "abc").start()
    server.live = {1}
    servers = pool(server)
    client = TokenClient(servers, context_len=32)
    [first] = await client.generate([65], params=FOLLOWING, num=1, version=0, seed=None)
    [second] = await client.generate([65], params=FOLLOWING, num=1, version=0, seed=None)
    [other] = await client.generate([65], params=PARAMS, num=1, version=1, seed=None)
    assert [one.versions for one in (first, second, other)] == [((1, 1), (2, 3)), ((2, 4),), ()]
    assert [request["follow"] for request in server.requests] == [True, True, False]
    await servers.close()
    await server.stop()


@pytest.mark.parametrize("runs", [None, [(0, 2)], [(1, 3)], [(2, 1), (1, 1)]])
async def test_runs_of_versions_that_cannot_be_are_refused(runs: list[tuple[int, int]] | None) -> None:
    class Odd(FakeServer):
        async def _generate(self, request: web.Request) -> web.Response:
            choice = {"token_ids": [65, 66], "logprobs": [-1.0, -2.0], "finish_reason": "stop", "versions": runs}
            return web.json_response({"version": 1, "choices": [choice]})

    server = await Odd().start()
    servers = pool(server)
    client = TokenClient(servers, context_len=32)
    with pytest.raises(ServerError, match="versions"):
        await client.generate([65], params=FOLLOWING, num=1, version=1, seed=None)
    await servers.close()
    await server.stop()


async def test_a_restarted_server_is_taken_out_by_a_request_that_follows_past_its_first_version(
    server: FakeServer,
) -> None:
    restarted = await FakeServer().start()
    server.live = {3}
    servers = pool(restarted, server)
    servers.membership.watched, servers.membership.versions = True, frozenset({3})
    client = TokenClient(servers, context_len=32)
    [answer] = await client.generate([65], params=FOLLOWING, num=1, version=1, seed=None)
    assert answer.versions == ((3, 2),)
    assert list(servers.membership.out) == [restarted.url.removesuffix("/v1")]
    await servers.close()
    await restarted.stop()

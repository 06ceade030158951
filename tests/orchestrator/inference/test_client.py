"""The inference client against servers that misbehave in every way that a server can, beside a sound one."""

import asyncio
import contextlib
import gc
import json
import subprocess
import sys
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from grpo.orchestrator.inference.client import MAX_SILENT, PolicyClient, ServerError, ServersAway, TimedOut
from grpo.orchestrator.rollouts.records import SamplingParams
from grpo.transport.limits import raise_file_limit

from tests.orchestrator.chat_server import Say, cut, slow, status, text
from tests.orchestrator.fakes import FakeServer, until
from tests.orchestrator.inference.serving import ask, client_of, name_of


@asynccontextmanager
async def faulty(say: Say) -> AsyncIterator[str]:
    """The address of a server that says this to all requests."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", say)
    async with TestServer(app, shutdown_timeout=0.1) as running:
        yield f"http://127.0.0.1:{running.port}"


@asynccontextmanager
async def asking(*urls: str, **settings: Any) -> AsyncIterator[PolicyClient]:
    client = client_of(*urls, **settings)
    try:
        yield client
    finally:
        await client.close()


@pytest.fixture
def sound(server: FakeServer) -> FakeServer:
    server.live = {0}
    return server


ONE = '{"token_ids": [1], "logprobs": [-0.5], "finish_reason": "stop"}'
ENGINE_ENDED = '{"error": {"type": "engine_ended", "message": "it has ended"}}'
GONE = {
    "cut in the middle": cut,
    "another program": status(404, "<h1>Not Found</h1>"),
    "its engine": status(503, '{"error": {"type": "engine", "message": "no answer"}}'),
    "its engine's end": status(503, ENGINE_ENDED),
    "another version": text(f'{{"version": 1, "choices": [{ONE}, {ONE}]}}'),
    "too few log-probabilities": text(f'{{"version": 0, "choices": [{ONE}, {ONE.replace("[-0.5]", "[]")}]}}'),
}


@pytest.mark.parametrize("say", GONE.values(), ids=GONE.keys())
async def test_what_a_faulty_server_was_asked_goes_to_the_other_for_good(sound: FakeServer, say: Say) -> None:
    async with faulty(say) as url, asking(url, sound.url) as client:
        assert await asyncio.gather(*(ask(client, num=2) for _ in range(4))) == [2] * 4
        assert list(client.pool.out) == [url]
        assert len(sound.requests) == 4


@pytest.mark.parametrize("number", [429, 503])
async def test_a_busy_server_stays_and_its_request_goes_to_the_other(sound: FakeServer, number: int) -> None:
    async with faulty(status(number)) as url, asking(url, sound.url) as client:
        assert await ask(client, num=2) == 2
        assert not client.pool.out


async def test_what_a_silent_server_was_asked_goes_to_the_other_when_it_is_abandoned(sound: FakeServer) -> None:
    async with faulty(slow) as url, asking(url, sound.url) as client:
        client.pool.eject(name_of(sound), "the silent one shall be asked")
        asked = [asyncio.create_task(ask(client, num=2)) for _ in range(3)]
        await until(lambda: client.num_in_flight == 3)
        client.pool.readmit(name_of(sound))
        client.abandon(url, "it is silent")
        assert await asyncio.gather(*asked) == [2] * 3
        assert client.pool.out == {url: "it is silent"}
        assert client.num_in_flight == 0


async def test_a_lone_server_that_stays_faulty_is_named_with_its_fault_at_the_deadline() -> None:
    async with faulty(status(503, ENGINE_ENDED)) as url, asking(url, timeout_s=1.0) as client:
        with pytest.raises(ServersAway, match=r"client\.timeout") as raised:
            await ask(client)
        assert url in str(raised.value)


class Slow(FakeServer):
    """Answers prompts of more than one token never."""

    async def sampling(self, body: dict[str, Any]) -> None:
        await asyncio.sleep(600 if len(body["prompt_token_ids"]) > 1 else 0)


async def test_a_request_beyond_its_time_ends_alone_and_the_server_that_answers_others_stays() -> None:
    async with Slow() as server, asking(server.url, timeout_s=1.0) as client:
        server.live = {0}
        slow, num_answered = asyncio.create_task(ask(client, prompt=[65, 66])), 0
        while not slow.done():
            with contextlib.suppress(TimedOut):  # where the machine stands still
                num_answered += await ask(client)
            await asyncio.sleep(0.01)
        assert num_answered
        with pytest.raises(TimedOut, match=name_of(server)):
            await slow
        assert not client.pool.out


async def test_servers_that_answer_nobody_for_long_are_an_error_of_the_run() -> None:
    async with Slow() as server, asking(server.url, timeout_s=0.3) as client:
        server.live = {0}
        clock = asyncio.get_running_loop().time
        since_s, found = clock(), dict[type[BaseException], float]()

        async def keep_asking(pause_s: float) -> None:
            await asyncio.sleep(pause_s)
            while ServerError not in found:
                with pytest.raises(ServerError) as raised:
                    await ask(client, prompt=[65, 66])
                found.setdefault(raised.type, clock() - since_s)

        async with asyncio.timeout(60):  # three in turn, so that one is always in flight
            await asyncio.gather(*(keep_asking(index / 10) for index in range(3)))
        assert found.keys() <= {TimedOut, ServerError}
        assert found[ServerError] >= MAX_SILENT * client.timeout_s


async def said_by(program: str, *arguments: str) -> Any:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, *arguments, stdout=subprocess.PIPE)
    said, _ = await process.communicate()
    return json.loads(said)


MANY = """
import asyncio, json, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, tuple(map(int, sys.argv[2:4])))
from tests.orchestrator.inference.serving import ask, client_of

async def main():
    client = client_of(sys.argv[1])
    asked = await asyncio.gather(*(ask(client) for _ in range(2000)), return_exceptions=True)
    probe = await client.info(*client.pool.servers)
    faults = sorted({repr(one) for one in asked if one != 1})
    print(json.dumps([faults[:3], client.pool.out, [*probe.live]]))
    await client.close()

asyncio.run(main())
"""


@pytest.mark.parametrize("hard", [1024, 4096])
async def test_2000_requests_at_once_are_answered_where_1024_files_may_be_open(sound: FakeServer, hard: int) -> None:
    raise_file_limit()  # the server's end of the connections
    sound.latency_s = 0.2
    assert await said_by(MANY, sound.url, "1024", str(hard)) == [[], {}, [0]]


FULL = """
import asyncio, contextlib, json, os, sys
from tests.orchestrator.inference.serving import ask, client_of
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

async def main():
    client, files = client_of(sys.argv[1]), []
    with contextlib.suppress(OSError):
        while True:
            files.append(os.open(os.devnull, os.O_RDONLY))
    asked = asyncio.create_task(ask(client))
    await asyncio.sleep(1.0)
    before = asked.done()
    for file in files:
        os.close(file)
    print(json.dumps([before, await asked, client.pool.out]))
    await client.close()

asyncio.run(main())
"""


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])  # to look a name up takes a file, too
async def test_a_process_without_a_file_left_waits_for_one_and_ejects_no_server(sound: FakeServer, host: str) -> None:
    assert await said_by(FULL, sound.url.replace("127.0.0.1", host)) == [False, 1, {}]


async def test_a_refusal_of_the_request_itself_is_an_error_even_where_there_are_others(sound: FakeServer) -> None:
    refusal = status(400, '{"error": {"type": "bad_request", "message": "n is 0, expected 1 to 1024"}}')
    async with faulty(refusal) as url, asking(url, sound.url) as client:
        with pytest.raises(ServerError, match="n is 0"):
            await ask(client, num=2)
        assert not client.pool.out


# --- what is asked ---


async def test_a_retry_waits_too_while_requests_are_held_back_and_that_time_does_not_count() -> None:
    released = asyncio.Event()

    class Held(FakeServer):
        async def _generate(self, request: web.Request) -> web.Response:
            if self.num_failures:
                client.hold()
                asyncio.get_running_loop().call_later(3.0, release)
            else:
                assert released.is_set()
            return await super()._generate(request)

    def release() -> None:
        released.set()
        client.release()

    async with Held() as server, asking(server.url, timeout_s=2.5) as client:
        server.live, server.num_failures = {0}, 1
        assert await ask(client) == 1


async def test_requests_go_to_the_least_loaded_server(sound: FakeServer) -> None:
    async with FakeServer() as other, asking(sound.url, other.url) as client:
        other.live, other.latency_s, sound.latency_s = {0}, 0.3, 0.3
        await asyncio.gather(*(ask(client) for _ in range(10)))
    assert (len(sound.requests), len(other.requests)) == (5, 5)


# --- short answers to equal prompts ---

SHORT = SamplingParams(temperature=1.0, max_tokens=1)


async def short(client: PolicyClient, prompt: int = 65, num: int = 1, seed: int | None = None) -> int:
    return len(await client.generate([prompt], params=SHORT, num=num, version=0, seed=seed))


async def test_short_answers_to_one_prompt_are_one_request_where_they_are_asked_for_together(sound: FakeServer) -> None:
    async with asking(sound.url) as client:
        asked = [short(client), short(client, num=3), short(client, 66), short(client, seed=1), short(client)]
        assert await asyncio.gather(*asked) == [1, 3, 1, 1, 1]
        assert await short(client) == 1
    assert sorted((body["prompt_token_ids"], body["n"]) for body in sound.requests) == [
        ([65], 1), ([65], 1), ([65], 5), ([66], 1)
    ]  # fmt: skip


async def test_of_those_who_wait_for_one_request_one_may_go_and_an_error_is_everybodys(sound: FakeServer) -> None:
    sound.latency_s = 0.2
    async with asking(sound.url) as client:
        gone, stays = (asyncio.create_task(short(client)) for _ in range(2))
        await until(lambda: sound.requests)
        gone.cancel()
        assert await stays == 1
        sound.latency_s = 600
        alone = asyncio.create_task(short(client))
        await until(lambda: client.num_in_flight)
        alone.cancel()
        await until(lambda: not client.num_in_flight)
    async with asking(sound.url, timeout_s=1.0) as client:
        late = await asyncio.gather(short(client), short(client), return_exceptions=True)
        assert [type(one) for one in late] == [TimedOut, TimedOut]


async def test_a_request_in_flight_keeps_no_list_of_its_tokens() -> None:
    tokens, params = array("i", range(4999)), SamplingParams(temperature=1.0, max_tokens=64)
    async with faulty(slow) as url, asking(url) as client:
        calls = client.generate(tokens, params=params, num=1, version=0, seed=None), client.score(tokens, 0)
        asked = [asyncio.create_task(call) for call in calls]
        await until(lambda: client.num_in_flight == 2)
        assert not any(isinstance(one, list) and len(one) == len(tokens) for one in gc.get_objects())
        for task in asked:
            task.cancel()


# --- answers that follow ---

FOLLOWING = SamplingParams(temperature=1.0, max_tokens=8, follow=True)


class Becoming(FakeServer):
    """Version 2 becomes live while a request is being sampled."""

    async def sampling(self, body: dict[str, Any]) -> None:
        self.live.add(2)


async def test_an_answer_that_follows_tells_which_version_sampled_which_tokens() -> None:
    async with Becoming(lambda prompt, version: "abc") as server, asking(server.url) as client:
        server.live = {1}
        for expected in (((1, 1), (2, 3)), ((2, 4),)):
            [answer] = await client.generate([65], params=FOLLOWING, num=1, version=0, seed=None)
            assert answer.versions == expected


async def test_a_restarted_server_is_ejected_by_a_request_that_follows_past_its_version(sound: FakeServer) -> None:
    sound.live = {3}
    async with FakeServer() as restarted, asking(restarted.url, sound.url) as client:
        client.pool.versions = frozenset({3})
        [answer] = await client.generate([65], params=FOLLOWING, num=1, version=1, seed=None)
        assert answer.versions == ((3, 2),)
        assert list(client.pool.out) == [name_of(restarted)]

"""The HTTP client against a server that fails in every way that a server can, beside a sound one."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

from orchestrator.inference.client import ServerError, ServerPool
from orchestrator.rollouts.records import SamplingParams
from tests.orchestrator.fakes import FakeServer, until

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def says(status: str, body: str = "") -> Answer:
    """Answers every request so, and closes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode())

    return answer


async def garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"\x16\x03\x01 this is no HTTP \r\n\r\n")


async def reset_in_the_middle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"version": 0, "cho')
    await writer.drain()
    writer.transport.abort()


async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


@asynccontextmanager
async def faulty(answer: Answer) -> AsyncIterator[str]:
    """The address of a server that gives this answer to all."""
    handlers: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        try:
            await answer(reader, writer)
        finally:
            handlers.discard(task)
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in handlers:
            task.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)


@asynccontextmanager
async def pool_of(*urls: str, timeout_s: float = 30, watched: bool = True) -> AsyncIterator[ServerPool]:
    """`watched`: as in a run, where somebody puts servers back."""
    pool = ServerPool(urls, api_key=None, timeout_s=timeout_s)
    pool.membership.watched = watched
    try:
        yield pool
    finally:
        await pool.close()


@pytest_asyncio.fixture
async def sound() -> AsyncIterator[FakeServer]:
    server = await FakeServer().start()
    server.live = {0}
    yield server
    await server.stop()


async def ask(pool: ServerPool, num: int = 2) -> int:
    """Rollouts of version 0."""
    return len(
        await pool.generate([65], params=SamplingParams(temperature=1.0, max_tokens=4), num=num, version=0, seed=None)
    )


ONE = '{"token_ids": [1], "logprobs": [-0.5], "finish_reason": "stop"}'
ENGINE_ENDED = '{"error": {"type": "engine_ended", "message": "it has ended"}}'
GONE = {
    "reset in the middle": reset_in_the_middle,
    "no JSON": says("200 OK", "<html>"),
    "another program": says("404 Not Found", "<h1>Not Found</h1>"),
    "its engine": says("503 Service Unavailable", '{"error": {"type": "engine", "message": "no answer"}}'),
    "its engine's end": says("503 Service Unavailable", ENGINE_ENDED),
    "another version": says("200 OK", f'{{"version": 1, "choices": [{ONE}, {ONE}]}}'),
    "too few log-probabilities": says("200 OK", f'{{"version": 0, "choices": [{ONE}, {ONE.replace("[-0.5]", "[]")}]}}'),
}


@pytest.mark.parametrize("answer", GONE.values(), ids=GONE.keys())
async def test_what_a_faulty_server_was_asked_goes_to_the_other_and_it_gets_no_more(
    sound: FakeServer, answer: Answer
) -> None:
    async with faulty(answer) as url, pool_of(url, sound.url) as pool:
        assert await asyncio.gather(*(ask(pool) for _ in range(4))) == [2] * 4
        assert list(pool.membership.out) == [url]
        assert len(sound.requests) == 4


async def test_what_a_server_was_asked_that_refuses_connections_goes_to_the_other(sound: FakeServer) -> None:
    async with faulty(hang) as url:
        pass
    async with pool_of(url, sound.url) as pool:
        assert await ask(pool) == 2
        assert list(pool.membership.out) == [url]


@pytest.mark.parametrize("status", ["429 Too Many Requests", "503 Service Unavailable"])
async def test_a_server_that_is_too_busy_stays_and_its_request_goes_to_the_other(
    sound: FakeServer, status: str
) -> None:
    async with faulty(says(status)) as url, pool_of(url, sound.url) as pool:
        assert await ask(pool) == 2
        assert not pool.membership.out


async def test_a_lone_server_is_asked_again_with_longer_and_longer_pauses() -> None:
    asked_s: list[float] = []

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked_s.append(asyncio.get_running_loop().time())
        good = f'{{"version": 0, "choices": [{ONE}, {ONE}]}}'
        await (says("200 OK", good) if len(asked_s) == 5 else says("429 Too Many Requests"))(reader, writer)

    async with faulty(late) as url, pool_of(url) as pool:
        assert await ask(pool) == 2
    # At least half of 0.05, 0.1, 0.2 and 0.4 s.
    pauses = [b - a for a, b in itertools.pairwise(asked_s)]
    assert all(pause >= least for pause, least in zip(pauses, (0.025, 0.05, 0.1, 0.2), strict=True))


async def test_what_a_silent_server_was_asked_goes_to_the_other_when_it_is_abandoned(sound: FakeServer) -> None:
    async with faulty(hang) as url, pool_of(url, sound.url) as pool:
        pool.membership.take_out(sound.url.removesuffix("/v1"), "the silent one shall be asked")
        asked = [asyncio.create_task(ask(pool)) for _ in range(3)]
        await until(lambda: pool.num_in_flight == 3)
        pool.membership.admit(sound.url.removesuffix("/v1"))
        pool.abandon(url, "it is silent")
        assert await asyncio.gather(*asked) == [2] * 3
        assert pool.membership.out == {url: "it is silent"}
        assert pool.num_in_flight == 0


FAULTS = [hang, says("503 Service Unavailable", ENGINE_ENDED)]


@pytest.mark.parametrize("answer", FAULTS)
@pytest.mark.parametrize("watched", [True, False])
async def test_a_lone_server_that_stays_faulty_is_named_with_its_fault_at_the_deadline(
    answer: Answer, watched: bool
) -> None:
    async with faulty(answer) as url, pool_of(url, timeout_s=0.3, watched=watched) as pool:
        with pytest.raises(ServerError, match=r"client\.timeout") as raised:
            await ask(pool)
        assert url in str(raised.value)


@pytest.mark.parametrize("answer", [garbage, says("200 OK", "<html>")])
async def test_a_lone_server_that_is_none_of_ours_is_an_error_at_once(answer: Answer) -> None:
    async with faulty(answer) as url, pool_of(url) as pool:
        with pytest.raises(ServerError, match=url):
            await ask(pool)


async def test_a_refusal_of_the_request_itself_is_an_error_even_where_there_are_others(sound: FakeServer) -> None:
    refusal = says("400 Bad Request", '{"error": {"type": "bad_request", "message": "n is 0, expected 1 to 1024"}}')
    async with faulty(refusal) as url, pool_of(url, sound.url) as pool:
        with pytest.raises(ServerError, match="n is 0"):
            await ask(pool)
        assert not pool.membership.out

"""A server in sleep mode: what it answers while it sleeps, and what becomes of requests in flight."""

import asyncio

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from infer.sleep import SleepGuard, SleepMode
from transport.errors import DeadlineError


class FakeEngine:
    """Falls asleep and wakes when it is let."""

    def __init__(self) -> None:
        self.let = asyncio.Event()
        self.let.set()
        self.calls: list[str] = []
        self.fails = False

    async def sleep(self) -> None:
        await self._do("sleep")

    async def wake(self) -> None:
        await self._do("wake")

    async def _do(self, what: str) -> None:
        self.calls.append(what)
        await self.let.wait()
        if self.fails:
            raise RuntimeError("no memory")


def mode_of(engine: FakeEngine, timeout_s: float = 60.0) -> SleepMode:
    return SleepMode(engine=engine, timeout_s=timeout_s)


def client_of(mode: SleepMode) -> TestClient:
    async def answer(_: Request) -> Response:
        return JSONResponse({})

    paths = ("/health", "/policy/info", "/policy/generate", "/policy/load", "/v1/chat/completions")
    app = Starlette(routes=[Route(path, answer, methods=["GET", "POST"]) for path in paths])
    return TestClient(SleepGuard(app, mode))


async def test_asleep_it_answers_503_to_all_that_needs_the_engine_and_awake_as_ever() -> None:
    mode = mode_of(FakeEngine())
    client = client_of(mode)
    await mode.sleep()
    for path in ("/policy/generate", "/policy/load", "/v1/chat/completions"):
        response = client.post(path)
        assert (response.status_code, response.json()["error"]["type"]) == (503, "asleep")
    assert [client.get(path).status_code for path in ("/health", "/policy/info")] == [200, 200]
    await mode.wake()
    assert client.post("/policy/generate").status_code == 200


async def test_it_takes_no_requests_from_when_it_is_told_to_sleep() -> None:
    engine = FakeEngine()
    mode = mode_of(engine)
    engine.let.clear()
    falling = asyncio.create_task(mode.sleep())
    await asyncio.sleep(0.01)
    assert mode.asleep
    waking = asyncio.create_task(mode.wake())  # waits until it sleeps
    await asyncio.sleep(0.01)
    assert engine.calls == ["sleep"]
    engine.let.set()
    await asyncio.gather(falling, waking)
    assert (engine.calls, mode.asleep) == (["sleep", "wake"], False)


async def test_sleeping_and_waking_twice_is_once() -> None:
    engine = FakeEngine()
    mode = mode_of(engine)
    for change in (mode.wake, mode.sleep, mode.sleep, mode.wake, mode.wake):
        await change()
    assert engine.calls == ["sleep", "wake"]


async def test_an_engine_that_fails_or_hangs_stays_asleep_and_can_be_woken_later() -> None:
    engine = FakeEngine()
    mode = mode_of(engine, timeout_s=0.05)
    await mode.sleep()
    engine.fails = True
    with pytest.raises(RuntimeError):
        await mode.wake()
    engine.let.clear()
    with pytest.raises(DeadlineError, match="canary_timeout_s"):
        await mode.wake()
    assert mode.asleep
    engine.let.set()
    engine.fails = False
    await mode.wake()
    assert not mode.asleep

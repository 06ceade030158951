"""Stand-ins that run while a test does."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from tests.orchestrator.chat_server import FakeChatServer, chat_serving
from tests.orchestrator.fakes import FakeServer


@pytest_asyncio.fixture
async def server() -> AsyncIterator[FakeServer]:
    """A grpo-infer."""
    async with FakeServer() as server:
        yield server


@pytest_asyncio.fixture
async def chats() -> AsyncIterator[FakeChatServer]:
    """A server of chat completions."""
    async with chat_serving() as serving:
        yield serving


@pytest_asyncio.fixture
async def advance(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Awaitable[None]]:
    """Puts the event loop's clock forward by so many seconds: what is due then happens."""
    loop, ahead_s = asyncio.get_running_loop(), 0.0
    time = loop.time
    monkeypatch.setattr(loop, "time", lambda: time() + ahead_s)

    async def advanced(seconds: float) -> None:
        nonlocal ahead_s
        ahead_s += seconds
        for _ in range(5):
            await asyncio.sleep(0)

    return advanced

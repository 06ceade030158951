"""Stand-ins that run while a test does."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.orchestrator.chat_server import FakeChatServer, chat_serving
from tests.orchestrator.fakes import FakeServer


@pytest_asyncio.fixture
async def server() -> AsyncIterator[FakeServer]:
    """A grpo-infer."""
    server = await FakeServer().start()
    yield server
    await server.stop()


@pytest_asyncio.fixture
async def chats() -> AsyncIterator[FakeChatServer]:
    """A server of chat completions."""
    async with chat_serving() as serving:
        yield serving

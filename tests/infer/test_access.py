"""Who may send requests to the server."""

from collections.abc import Mapping

import httpx
import pytest
from fastapi import FastAPI
from grpo.infer.access import guarded


def application() -> FastAPI:
    app = FastAPI()

    @app.post("/policy/unload")
    async def unload() -> dict[str, bool]:
        return {"done": True}

    @app.get("/health")
    async def health() -> dict[str, bool]:
        return {"up": True}

    return app


async def status_of(app: object, headers: Mapping[str, str | bytes], path: str = "/policy/unload") -> int:
    transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
        method = "GET" if path == "/health" else "POST"
        return (await client.request(method, path, headers=dict(headers))).status_code


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "gpu-box:8000"}, 200),
        ({"Origin": "http://127.0.0.1:8000"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:9000"}, 403),
    ],
)
async def test_without_a_key_no_web_page_drives_the_server(headers: dict[str, str], status: int) -> None:
    app = guarded(application(), key=None, host="gpu-box", key_var="VLLM_API_KEY")
    assert await status_of(app, headers) == status


@pytest.mark.parametrize(
    ("sent", "path", "status"),
    [
        ("", "/policy/unload", 401),
        ("Bearer schlussel", "/policy/unload", 401),
        ("Basic schlüssel", "/policy/unload", 401),
        ("bearer schlüssel", "/policy/unload", 200),
        ("", "/health", 200),
    ],
)
async def test_with_a_key_every_route_but_health_asks_for_it(sent: str, path: str, status: int) -> None:
    app = guarded(application(), key="schlüssel", host="gpu-box", key_var="VLLM_API_KEY")
    assert await status_of(app, {"Authorization": sent.encode()}, path) == status

"""Who may send requests to the server."""

import httpx
import pytest
from fastapi import FastAPI
from grpo.infer.access import guarded


@pytest.mark.parametrize(
    ("key", "headers", "path", "status"),
    [
        # without a key no web page drives the server
        (None, {}, "/policy/unload", 200),
        (None, {"Host": "[::1]:8000"}, "/policy/unload", 200),
        (None, {"Host": "gpu-box:8000"}, "/policy/unload", 200),
        (None, {"Origin": "http://127.0.0.1:8000"}, "/policy/unload", 200),
        (None, {"Host": "evil.example"}, "/policy/unload", 403),
        (None, {"Origin": "https://evil.example"}, "/policy/unload", 403),
        (None, {"Origin": "null"}, "/policy/unload", 403),
        (None, {"Origin": "http://127.0.0.1:9000"}, "/policy/unload", 403),
        # with a key every route but health asks for it
        ("schlüssel", {"Authorization": ""}, "/policy/unload", 401),
        ("schlüssel", {"Authorization": "Bearer schlussel"}, "/policy/unload", 401),
        ("schlüssel", {"Authorization": "Basic schlüssel"}, "/policy/unload", 401),
        ("schlüssel", {"Authorization": "bearer schlüssel"}, "/policy/unload", 200),
        ("schlüssel", {}, "/health", 200),
    ],
)
async def test_who_may_send_requests(key: str | None, headers: dict[str, str], path: str, status: int) -> None:
    app = FastAPI()
    app.add_api_route("/policy/unload", lambda: {"done": True}, methods=["POST"])
    app.add_api_route("/health", lambda: {"up": True})
    transport = httpx.ASGITransport(app=guarded(app, key=key, host="gpu-box", key_var="VLLM_API_KEY"))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
        method = "GET" if path == "/health" else "POST"
        sent = {name: value.encode() for name, value in headers.items()}
        assert (await client.request(method, path, headers=sent)).status_code == status

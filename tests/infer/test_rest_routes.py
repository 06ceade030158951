"""/policy/rest and /policy/wake over a fake engine, what wakes a server, and what does not."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from configs.infer import InferSettings
from infer import vllm_api
from infer.adapters import BaseModel
from infer.policies import PolicyTable
from infer.rest import RestError, Rests
from infer.rest_routes import QUIET, RestRoutes, WakeFirst
from infer.routes import PolicyRoutes
from infer.server import ApiKeyGuard
from infer.vllm_api import EngineError
from tests.infer.test_rest import FakeMemory
from tests.infer.test_routes import FakeEngine
from transport.run import found_run
from transport.status import read_status

SCORE = {"version": None, "token_ids": [1, 2]}


class Served:
    """A server without vLLM that can rest, or cannot. `release` lets its slow request end."""

    def __init__(self, folder: Path, *, sleep_mode: bool = True) -> None:
        engine: Any = FakeEngine()
        base = BaseModel(identity="base", linear_shapes={}, max_rank=8, dtype=torch.float32)
        self.table = PolicyTable(
            engine=engine, names=engine, output_dir=folder, base=base, tolerance=None, timeout_s=60
        )
        self.memory, self.begun, self.release = FakeMemory(), asyncio.Event(), asyncio.Event()
        self.rests = Rests(memory=self.memory, timeout_s=60.0) if sleep_mode else None
        app = Starlette()
        self.policy = PolicyRoutes(
            settings=InferSettings(model="m", sleep_mode=sleep_mode), engine=engine, table=self.table, rests=self.rests
        )
        self.policy.attach(app)
        RestRoutes(rests=self.rests, table=self.table).attach(app)
        for path in ("/health", "/metrics", "/v1/models"):
            app.add_route(path, lambda request: PlainTextResponse("ok"))
        app.add_route("/v1/chat/completions", self._chat, methods=["POST"])
        self.app: Any = app if self.rests is None else WakeFirst(app, self.rests)

    async def _chat(self, request: Request) -> Response:
        assert not self.memory.given
        self.begun.set()
        await self.release.wait()
        assert not self.memory.given
        return PlainTextResponse("said")

    @property
    def state(self) -> str:
        assert self.rests is not None
        return self.rests.state


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    monkeypatch.setattr(vllm_api, "version", lambda: "0.32.0")
    return Served(tmp_path)


def client(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


def error_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["type"]


async def test_a_server_rests_and_wakes_as_it_is_told_and_says_so(served: Served) -> None:
    async with client(served.app) as http:
        rested = await http.post("/policy/rest", json={})
        assert (rested.status_code, rested.json()["rested"], rested.json()["freed_bytes"]) == (200, True, 101)
        info = (await http.get("/policy/info")).json()
        woken = (await http.post("/policy/wake", json={})).json()
        again = (await http.post("/policy/wake")).json()  # without a body, too
    figures = {"num_rests": 1, "rested_s": 0.0, "num_woken_by_requests": 0, "num_failed": 0, "freed_bytes": 101}
    assert info["rest"] == {"state": "resting", **figures}
    assert (woken["woken"], again["woken"]) == (True, False)
    assert woken["wake_s"] >= 0


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/policy/score", SCORE),
        ("POST", "/policy/generate", {"version": None, "prompt_token_ids": [1], "max_tokens": 2}),
        ("POST", "/policy/load", {"run_id": "r", "version": 0}),
        ("POST", "/policy/unload", {"version": 0}),
        ("GET", "/something/of/vllms", None),
    ],
)
async def test_every_request_that_may_need_the_engine_wakes_it(
    served: Served, method: str, path: str, body: object
) -> None:
    async with client(served.app) as http:
        await http.post("/policy/rest", json={})
        await http.request(method, path, json=body)
        figures = (await http.get("/policy/info")).json()["rest"]
    assert (figures["state"], figures["num_woken_by_requests"]) == ("awake", 1)


async def test_what_is_answered_without_the_engine_leaves_it_resting(served: Served) -> None:
    async with client(served.app) as http:
        await http.post("/policy/rest", json={})
        for path in sorted(QUIET - {"/policy/rest", "/policy/wake"}):
            assert (await http.get(path)).status_code in (200, 307, 404), path
        assert (await http.get("/health")).text == "ok"
        assert (await http.post("/policy/rest", json={})).json()["freed_bytes"] == 101
    assert (served.state, served.memory.num_given, served.memory.num_taken) == ("resting", 1, 0)


async def test_whoever_has_no_key_wakes_nobody(served: Served) -> None:
    async with client(ApiKeyGuard(served.app, "secret")) as anybody, client(served.app) as friend:
        await friend.post("/policy/rest", json={})
        assert (await anybody.post("/policy/score", json=SCORE)).status_code == 401
        assert (await anybody.post("/policy/wake", json={})).status_code == 401
        assert served.state == "resting"


async def test_vllms_own_requests_forbid_a_rest_while_they_run_and_wake_the_server(served: Served) -> None:
    async with client(served.app) as http:
        chat = asyncio.ensure_future(http.post("/v1/chat/completions", json={}))
        await served.begun.wait()
        refused = await http.post("/policy/rest", json={})
        assert error_of(refused) == (409, "busy")
        assert refused.json()["error"]["message"] == "requests in flight: 1; the server rests only without any"
        waiting = asyncio.ensure_future(http.post("/policy/rest", json={"timeout_s": 5}))
        served.release.set()
        assert (await chat).text == "said"
        assert (await waiting).json()["rested"]
        assert (await http.post("/v1/chat/completions", json={})).text == "said"
    assert served.state == "awake"


@pytest.mark.parametrize(("error", "kind"), [(RestError("no memory"), "resting"), (EngineError("gone"), "engine")])
async def test_where_the_memory_cannot_be_had_the_request_may_come_again(
    served: Served, error: Exception, kind: str
) -> None:
    async with client(served.app) as http:
        await http.post("/policy/rest", json={})
        served.memory.errors = [error, error]
        for path, body in (("/policy/score", SCORE), ("/policy/wake", {})):
            response = await http.post(path, json=body)
            assert error_of(response) == (503, kind)
            assert response.json()["error"]["message"] == str(error)
        assert served.state == "resting"
        assert (await http.post("/policy/score", json=SCORE)).status_code == 200


async def test_a_rest_that_fails_is_told_and_the_server_serves(served: Served) -> None:
    served.memory.errors = [RestError("no")]
    async with client(served.app) as http:
        assert error_of(await http.post("/policy/rest", json={})) == (503, "resting")
        assert (await http.get("/policy/info")).json()["rest"]["num_failed"] == 1
        assert (await http.post("/policy/score", json=SCORE)).status_code == 200


async def test_what_is_wrong_while_a_request_is_served_stays_the_frameworks_own(served: Served) -> None:
    async def app(scope: object, receive: object, send: object) -> None:
        raise RestError("from within")

    assert served.rests is not None
    with pytest.raises(RestError, match="from within"):
        await client(WakeFirst(app, served.rests)).get("/anything")
    async with client(served.app) as http:
        await served.rests.rest()
        served.memory.errors = [KeyError("unexpected")]
        with pytest.raises(KeyError):
            await http.post("/policy/score", json=SCORE)


async def test_a_websocket_wakes_the_server_or_is_closed(served: Served) -> None:
    opened, sent = list[str](), list[Any]()

    async def app(scope: Any, receive: object, send: object) -> None:
        opened.append(scope["path"])

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    assert served.rests is not None
    await served.rests.rest()
    served.memory.errors = [RestError("no memory")]
    scope = {"type": "websocket", "path": "/v1/realtime", "headers": []}
    await WakeFirst(app, served.rests)(scope, receive, send)
    assert (opened, sent, served.state) == ([], [{"type": "websocket.close", "code": 1013}], "resting")
    await WakeFirst(app, served.rests)(scope, receive, send)
    assert (opened, served.state) == (["/v1/realtime"], "awake")


async def test_bad_input_is_refused_and_another_runs_orchestrator_too(served: Served) -> None:
    async with client(served.app) as http:
        for body in ({"timeout_s": -1}, {"timeout_s": 601}, {"timeout_s": "1"}, {"wait": 1}):
            assert error_of(await http.post("/policy/rest", json=body)) == (400, "bad_request"), body
        assert error_of(await http.post("/policy/wake", json={"run_id": "a"})) == (400, "bad_request")
        served.table.run_id = "mine"
        refused = await http.post("/policy/rest", json={"run_id": "other"})
        assert error_of(refused) == (409, "stale_run")
        assert served.state == "awake"
        assert (await http.post("/policy/rest", json={"run_id": "mine"})).json()["rested"]


async def test_a_server_started_without_alternate_says_which_key_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_api, "version", lambda: "0.32.0")
    async with client(Served(tmp_path, sleep_mode=False).app) as http:
        refused = await http.post("/policy/rest", json={})
        assert error_of(refused) == (409, "cannot_rest")
        assert "set sleep_mode: true" in refused.json()["error"]["message"]
        assert (await http.post("/policy/wake", json={})).json()["woken"] is False
        assert (await http.get("/policy/info")).json()["rest"] is None


async def test_the_runs_folder_says_that_a_server_rests(served: Served, tmp_path: Path) -> None:
    run = found_run(tmp_path / "run")
    telling = served.policy.telling
    telling.output_dir = run.path
    with telling.loading(run.run_id, 0):
        pass
    path = run.status / "infer.127.0.0.1_8000.json"
    states = []
    async with client(served.app) as http:
        for way in ("rest", "wake"):
            await http.post(f"/policy/{way}", json={})
            states.append((read_status(path) or {})["state"])
    assert states == ["resting", "serving"]

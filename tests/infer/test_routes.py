"""Our routes and the key guard over a fake engine."""

import asyncio
import contextlib
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI
from starlette.responses import PlainTextResponse

from configs.infer import InferSettings
from infer import vllm_api
from infer.access import guarded
from infer.adapters import BaseModel
from infer.policies import PolicyTable
from infer.routes import PolicyRoutes
from infer.server import listening_socket
from infer.versions import UnknownAdapter
from infer.vllm_api import Adapter, EngineEnded, EngineError, SamplingRequest, served_rank
from transport.http import Choice, ServerLoad

GENERATE = {"version": None, "prompt_token_ids": [1, 2], "max_tokens": 4}


class FakeEngine:
    """Answers every prompt with its own last id."""

    device, dtype, torch_dtype, vocab_size, max_model_len = "cpu", "float32", torch.float32, 10, 8

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()
        self.started = asyncio.Event()
        self.slow = False
        self.fault: EngineError | None = None
        self.scores_at_temperatures = True
        self.shared_bytes = 0
        self.dead = False

    async def generate(self, request: SamplingRequest, adapter: Adapter | None) -> list[Choice]:
        self.started.set()
        if self.fault is not None:
            raise self.fault
        try:
            if self.slow:
                await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        answer = Choice(
            token_ids=[request.prompt_token_ids[-1]], logprobs=[-0.5], finish_reason="length", stop_reason=None
        )
        return [answer] * request.n

    def load(self) -> ServerLoad:
        return ServerLoad(num_running=3, num_waiting=2, kv_use=0.5)

    async def score(
        self, token_ids: Sequence[int], adapter: Adapter | None, *, temperature: float = 1.0, priority: int = 0
    ) -> list[float]:
        return [-temperature] * (len(token_ids) - 1)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def app(engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FastAPI:
    monkeypatch.setattr(vllm_api, "version", lambda: "0.32.0")
    fake: Any = engine
    base = BaseModel(identity="base", linear_shapes={}, max_rank=8, dtype=torch.float32)
    table = PolicyTable(engine=fake, names=fake, output_dir=tmp_path, base=base, tolerance=None, timeout_s=60.0)
    app = FastAPI()
    PolicyRoutes(settings=InferSettings(model="m"), engine=fake, table=table).attach(app)
    app.add_route("/health", lambda request: PlainTextResponse("ok"))
    return app


def client(app: Any, key: str | None = None) -> httpx.AsyncClient:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server", headers=headers)


async def test_n_answers_come_in_one_response(app: FastAPI) -> None:
    async with client(app) as http:
        response = await http.post("/policy/generate", json=GENERATE | {"n": 2})
    choice = {"token_ids": [2], "logprobs": [-0.5], "finish_reason": "length"}
    choice |= {"stop_reason": None, "versions": None}
    assert response.json() == {"version": None, "choices": [choice, choice]}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"n": 0}, "n is 0"),
        ({"n": "2"}, r"\$\.n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"max_tokens": 7}, "max_tokens.*8"),
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt_token_ids": [1, 10]}, "prompt_token_ids.*10"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids.*-1"),
        ({"stop_token_ids": [11]}, "stop_token_ids.*11"),
        ({"temperature": 0.001}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": 0.0, "n": 2}, "temperature"),
        ({"seed": -1}, "seed"),
        ({"top_p": 0.9}, "top_p"),
        ({"follow": True}, "follow"),
        ({"adapter": "a"}, "adapter"),
    ],
)
async def test_bad_sampling_input_is_refused_by_the_name_of_the_field(
    app: FastAPI, change: dict[str, object], named: str
) -> None:
    async with client(app) as http:
        response = await http.post("/policy/generate", json=GENERATE | change)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "bad_request")
    assert re.search(named, error["message"])


async def test_an_adapter_is_asked_for_by_name_and_one_that_is_not_there_is_refused(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int | None, str | None]] = []

    @contextlib.asynccontextmanager
    async def using(
        self: PolicyTable, version: int | None, *, noisy: bool = False, adapter: str | None = None
    ) -> AsyncIterator[None]:
        asked.append((version, adapter))
        if adapter == "judge":
            raise UnknownAdapter("adapter is 'judge', and version 3 has solver, proposer")
        yield None

    monkeypatch.setattr(PolicyTable, "using", using)
    score = {"version": 3, "token_ids": [1, 2]}
    async with client(app) as http:
        for body in ({"adapter": "proposer"}, {}):
            assert (await http.post("/policy/generate", json=GENERATE | {"version": 3} | body)).status_code == 200
            assert (await http.post("/policy/score", json=score | body)).status_code == 200
        refused = await http.post("/policy/score", json=score | {"adapter": "judge"})
    assert asked == [(3, "proposer")] * 2 + [(3, None)] * 2 + [(3, "judge")]
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "bad_request")


async def test_the_version_must_be_named_even_for_the_base_model(app: FastAPI) -> None:
    async with client(app) as http:
        response = await http.post("/policy/score", json={"token_ids": [1, 2]})
        assert "version" in response.json()["error"]["message"]
        assert (await http.post("/policy/score", content=b"{")).status_code == 400


async def test_a_sequence_that_cannot_be_scored_is_refused(app: FastAPI) -> None:
    async with client(app) as http:
        for ids in ([1], [1] * 8, [1, 99]):
            assert (await http.post("/policy/score", json={"version": None, "token_ids": ids})).status_code == 400
        response = await http.post("/policy/score", json={"version": None, "token_ids": [1, 2, 3]})
    assert response.json() == {"version": None, "logprobs": [-1.0, -1.0]}


async def test_a_sequence_is_scored_at_the_temperature_that_is_asked_for(app: FastAPI, engine: FakeEngine) -> None:
    body = {"version": None, "token_ids": [1, 2, 3]}
    async with client(app) as http:
        assert (await http.post("/policy/score", json=body | {"temperature": 0.5})).json()["logprobs"] == [-0.5, -0.5]
        for temperature in (0.0, -1.0, 0.001, 101.0):
            response = await http.post("/policy/score", json=body | {"temperature": temperature})
            assert (response.status_code, response.json()["error"]["type"]) == (400, "bad_request")
        engine.scores_at_temperatures = False
        response = await http.post("/policy/score", json=body | {"temperature": 0.5})
        assert response.status_code == 400
        assert (await http.post("/policy/score", json=body)).json()["logprobs"] == [-1.0, -1.0]


async def test_a_version_that_is_not_live_is_not_found(app: FastAPI) -> None:
    async with client(app) as http:
        for follow in (False, True):
            response = await http.post("/policy/generate", json=GENERATE | {"version": 4, "follow": follow})
            assert response.status_code == 404
            assert response.json()["error"]["type"] == "not_live"


async def test_loading_where_there_is_no_run_is_refused(app: FastAPI) -> None:
    async with client(app) as http:
        response = await http.post("/policy/load", json={"run_id": "r", "version": 0})
    assert (response.status_code, response.json()["error"]["type"]) == (409, "missing")


@pytest.mark.parametrize(
    ("fault", "kind"), [(EngineEnded("its process has ended"), "engine_ended"), (EngineError("no answer"), "engine")]
)
async def test_a_dead_engine_is_told_from_one_that_fails(
    app: FastAPI, engine: FakeEngine, fault: EngineError, kind: str
) -> None:
    engine.fault = fault
    async with client(app) as http:
        response = await http.post("/policy/generate", json=GENERATE)
    assert (response.status_code, response.json()["error"]["type"]) == (503, kind)


async def test_the_info_says_what_is_served(app: FastAPI) -> None:
    async with client(app) as http:
        info = (await http.get("/policy/info")).json()
    assert info["model"] == "m"
    assert (info["live"], info["in_flight"], info["tolerance"]) == ([], {}, 1e-4)
    assert info["load"] == {"num_running": 3, "num_waiting": 2, "kv_use": 0.5}


async def test_sampling_ends_when_the_client_hangs_up(app: FastAPI, engine: FakeEngine) -> None:
    engine.slow = True
    body = httpx.Request("POST", "http://server/policy/generate", json=GENERATE).read()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await engine.started.wait()
        return {"type": "http.disconnect"}

    async def send(message: object) -> None:
        pass

    scope = {"type": "http", "method": "POST", "path": "/policy/generate", "headers": [], "query_string": b""}
    await asyncio.wait_for(app(scope, receive, send), 5)
    assert engine.cancelled.is_set()


async def test_the_key_guards_every_route_but_health(app: FastAPI) -> None:
    served = guarded(app, key="secret", host="127.0.0.1", key_var="VLLM_API_KEY")
    async with client(served) as anybody, client(served, key="secret") as friend, client(served, "no") as foe:
        assert (await anybody.get("/health")).status_code == 200
        for path in ("/policy/info", "/metrics", "/v1/models", "/health/", "/nothing", "/"):
            for http in (anybody, foe):
                response = await http.get(path)
                assert response.status_code == 401, path
                assert response.json()["error"]["type"] == "unauthorized"
        page = {"Origin": "https://site.example"}  # one that has the key
        assert (await friend.get("/policy/info", headers=page)).status_code == 200


def test_a_port_in_use_is_refused_by_name() -> None:
    with listening_socket("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(OSError, match=str(port)):
            listening_socket("127.0.0.1", port)


def test_an_address_of_no_interface_is_refused() -> None:
    with pytest.raises(OSError, match="host"):
        listening_socket("192.0.2.1", 8000)


def test_the_rank_is_rounded_up_to_one_that_vllm_knows() -> None:
    assert served_rank(InferSettings(model="m")) == 16
    assert served_rank(InferSettings(model="m", max_lora_rank=9)) == 16
    assert served_rank(InferSettings(model="m", max_lora_rank=32)) == 32
    with pytest.raises(EngineError, match="512"):
        served_rank(InferSettings(model="m", max_lora_rank=513))


def grpo_infer(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-X", "importtime", "-m", "infer.cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_a_missing_model_is_named_before_vllm_is_imported() -> None:
    result = grpo_infer("--model", "/no/such/model")
    assert result.returncode == 1
    assert "/no/such/model" in result.stderr.splitlines()[-1]
    assert "vllm.config" not in result.stderr


def test_a_port_in_use_ends_the_program_before_vllm_is_imported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with listening_socket("127.0.0.1", 0) as taken:
        taken.listen()
        result = grpo_infer("--model", str(tmp_path), "--port", str(taken.getsockname()[1]))
    assert result.returncode == 1
    assert "--port" in result.stderr.splitlines()[-1]
    assert "vllm.config" not in result.stderr


def test_help_imports_neither_torch_nor_vllm() -> None:
    result = grpo_infer("--help")
    assert result.returncode == 0
    assert "--canary_timeout" in result.stdout
    assert not {"torch", "vllm"} & {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}

"""Our routes over a fake engine, the status file, and the program before vLLM."""

import asyncio
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import numpy as np
import pytest
from fastapi import FastAPI
from grpo.configs.infer import InferSettings
from grpo.infer.engine import Adapter, EngineEnded, EngineError
from grpo.infer.routes import PolicyRoutes
from grpo.transport.http import Choice, GenerateRequest
from grpo.transport.ports import listening_socket
from grpo.transport.run import RunFolder, create_run

from tests.infer.versions_fakes import BASE, NOISE_EFFECT, NOISY, NORMS, SEVERAL, FakeEngine, publish, table_of

GENERATE: dict[str, Any] = {"version": None, "prompt_token_ids": [1, 2], "max_tokens": 4}
SCORE: dict[str, Any] = {"version": None, "token_ids": [1, 2, 3]}


class SlowEngine(FakeEngine):
    """May fail, or never answer."""

    def __init__(self) -> None:
        super().__init__()
        self.cancelled, self.started = asyncio.Event(), asyncio.Event()
        self.slow = False
        self.failing: EngineError | None = None
        self.asked: list[str | None] = []
        """The adapters that answers were sampled with."""

    async def generate(self, wanted: GenerateRequest, adapter: Adapter | None) -> list[Choice]:
        self.started.set()
        self.asked.append(None if adapter is None else adapter.name)
        if self.failing is not None:
            raise self.failing
        try:
            if self.slow:
                await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return await super().generate(wanted, adapter)

    async def sleep(self) -> None:
        self.asleep = True

    async def wake(self) -> None:
        self.asleep = False


@pytest.fixture
def engine() -> SlowEngine:
    return SlowEngine()


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return create_run(tmp_path / "run")


def app_of(engine: SlowEngine, run: RunFolder, base: Any = BASE, **settings: Any) -> FastAPI:
    app, fake, own = FastAPI(), cast(Any, engine), InferSettings(model="m", output_dir=str(run.path), **settings)
    app.include_router(PolicyRoutes(own, fake, table_of(engine, run, base)).router(), prefix="/policy")
    return app


@pytest.fixture
def app(engine: SlowEngine, run: RunFolder) -> FastAPI:
    return app_of(engine, run)


def client(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


def said(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["type"]


async def ask(app: Any, path: str, **body: Any) -> httpx.Response:
    async with client(app) as http:
        return await http.post(f"/policy/{path}", json=body)


async def test_n_answers_come_in_one_response_and_a_score_at_the_temperature_that_is_asked_for(app: FastAPI) -> None:
    choice = {"token_ids": [2], "logprobs": [-0.5], "finish_reason": "length", "stop_reason": None, "versions": None}
    choice |= {"server": "", "top": None, "seed": None, "mark": None}
    assert (await ask(app, "generate", **GENERATE, n=2)).json() == {"version": None, "choices": [choice, choice]}
    for temperature in (1.0, 0.5):
        scored = await ask(app, "score", **SCORE, temperature=temperature)
        assert scored.json() == {"version": None, "logprobs": [-temperature] * 2, "top": None}


async def test_an_answer_as_messagepack_takes_8_bytes_a_token(app: FastAPI) -> None:
    async with client(app) as http:
        answer = await http.post("/policy/generate", json=GENERATE, headers={"Accept": "application/msgpack"})
        refused = await http.post("/policy/generate", json={}, headers={"Accept": "application/msgpack"})
    assert answer.headers["content-type"] == "application/msgpack"
    [choice] = msgspec.msgpack.decode(answer.content)["choices"]
    ids, logprobs = np.array([2], "<i4").tobytes(), np.array([-0.5], "<f4").tobytes()
    assert (choice["token_ids"], choice["logprobs"]) == (ids, logprobs)
    assert said(refused) == (400, "bad_request")


@pytest.mark.parametrize(
    ("path", "change", "named"),
    [
        ("generate", {"n": 0}, r"\$\.n"),
        ("generate", {"min_tokens": 5}, "min_tokens"),
        ("generate", {"max_tokens": 7}, "max_tokens.*8"),
        ("generate", {"prompt_token_ids": []}, "prompt_token_ids"),
        ("generate", {"prompt_token_ids": [1, 10]}, "prompt_token_ids.*10"),
        ("generate", {"stop_token_ids": [11]}, "stop_token_ids.*11"),
        ("generate", {"temperature": -1.0}, "temperature"),
        ("generate", {"temperature": 0.0, "n": 2}, "temperature"),
        ("generate", {"seed": -1}, "seed"),
        *(("generate", {"top_p": top_p}, "top_p") for top_p in (0, 1.1)),
        ("generate", {"top_k": -1}, "top_k"),
        ("generate", {"stop": [""]}, "stop"),
        ("generate", {"num_top": 21}, "num_top"),
        ("generate", {"top_k": 3, "max_tokens": 6}, "max_tokens.*7"),
        ("generate", {"presence_penalty": 0.5}, "presence_penalty"),
        ("generate", {"follow": True}, "follow"),
        ("generate", {"follow": True, "version": 3, "stop": ["a"]}, "follow"),
        ("generate", {"adapter": "a"}, "adapter"),
        *(("score", {"temperature": temperature}, "temperature") for temperature in (0.0, -1.0, 0.001, 101.0)),
        *(("score", {"token_ids": ids}, "token_ids") for ids in ([1], [1] * 8, [1, 99])),
    ],
)
async def test_bad_input_is_refused_by_the_name_of_the_field(
    app: FastAPI, path: str, change: dict[str, object], named: str
) -> None:
    response = await ask(app, path, **((SCORE if path == "score" else GENERATE) | change))
    assert said(response) == (400, "bad_request")
    assert re.search(named, response.json()["error"]["message"])


async def test_the_version_must_be_named_even_for_the_base_model_and_be_live(app: FastAPI) -> None:
    assert "version" in (await ask(app, "score", token_ids=[1, 2])).json()["error"]["message"]
    for follow in (False, True):
        response = await ask(app, "generate", **(GENERATE | {"version": 4, "follow": follow}))
        assert said(response) == (404, "not_live")
    async with client(app) as http:
        assert said(await http.post("/policy/score", content=b"{")) == (400, "bad_request")


async def test_versions_adapters_and_noise_are_asked_for_by_the_request(engine: SlowEngine, run: RunFolder) -> None:
    publish(run, 3, NOISY)
    publish(run, 4, SEVERAL)
    app = app_of(engine, run, replace(BASE, noisy_norms=NORMS))
    score: dict[str, Any] = {"version": 3, "token_ids": [5, 6]}
    async with client(app) as http:
        for version in (3, 4):
            loaded = await http.post("/policy/load", json={"run_id": run.run_id, "version": version, "alias": "best"})
            assert loaded.json()["name"] == f"policy-v{version}"
        for change, name, below in (
            ({}, "policy-v3", 3),
            ({"noisy": True}, "policy-v3+noise", 3 + NOISE_EFFECT),
            ({"version": 4}, "policy-v4", 4),
            ({"version": 4, "adapter": "proposer"}, "policy-v4-proposer", 4.5),
        ):
            assert (await http.post("/policy/score", json=score | change)).json()["logprobs"] == [-1 - below]
            assert (await http.post("/policy/generate", json=GENERATE | {"version": 3} | change)).status_code == 200
            assert engine.asked[-1] == name
        for change in ({"adapter": "judge"}, {"noisy": 1}):
            assert said(await http.post("/policy/score", json=score | change)) == (400, "bad_request")
        info = (await http.get("/policy/info")).json()
        assert (info["model"], [*info["live"]], info["in_flight"]) == ("m", ["3", "4"], {"3": 0, "4": 0})
        assert info["load"] == {"num_running": 3, "num_waiting": 2, "kv_use": 0.5}
        assert (await http.post("/policy/unload", json={"version": 3})).json() == {"version": 3, "in_flight": 0}


async def test_answers_to_many_prompts_are_scored_in_one_request(engine: SlowEngine, run: RunFolder) -> None:
    publish(run, 3)
    app = app_of(engine, run)
    body: dict[str, Any] = {"version": 3, "prompts": [[5, 6], [7]], "answers": [[[1], [1, 2]], [[3]]]}
    async with client(app) as http:
        assert (await http.post("/policy/load", json={"run_id": run.run_id, "version": 3})).status_code == 200
        answered = (await http.post("/policy/score_answers", json=body)).json()
        assert answered == {"version": 3, "logprobs": [[-4, -8], [-4]]}
        assert (await http.post("/policy/score_answers", json=body | {"version": None})).json()["logprobs"][1] == [-1]
        for change in (
            {"prompts": [[5]]},
            {"answers": [[[1]], []]},
            {"answers": [[[1]], [[]]]},
            {"answers": [[[1]], [[-1]]]},
            {"prompts": [[5, 6], list(range(5000))]},
            {"temperature": 0},
        ):
            assert said(await http.post("/policy/score_answers", json=body | change)) == (400, "bad_request")


async def test_an_engine_at_fault_is_told_from_one_that_has_ended(app: FastAPI, engine: SlowEngine) -> None:
    for fault, kind in ((EngineEnded("it has ended"), "engine_ended"), (EngineError("no answer"), "engine")):
        engine.failing = fault
        assert said(await ask(app, "generate", **GENERATE)) == (503, kind)
    engine.end("it has ended")
    async with client(app) as http:
        assert (await http.get("/policy/info")).status_code == 503


async def test_asleep_it_answers_503_to_all_that_needs_the_engine(engine: SlowEngine, run: RunFolder) -> None:
    assert said(await ask(app_of(engine, run), "sleep")) == (400, "bad_request")
    async with client(app_of(engine, run, sleep_mode=True)) as http:
        assert (await http.post("/policy/sleep")).json()["seconds"] >= 0
        for path, body in (("generate", GENERATE), ("load", {"run_id": "r", "version": 1})):
            assert said(await http.post(f"/policy/{path}", json=body)) == (503, "asleep")
        assert (await http.get("/policy/info")).json()["asleep"] is True
        await http.post("/policy/wake")
        assert (await http.post("/policy/generate", json=GENERATE)).status_code == 200


async def test_what_the_server_does_is_told_in_the_runs_folder(engine: SlowEngine, run: RunFolder) -> None:
    settings = InferSettings(model="m", output_dir=str(run.path), port=8001)
    routes = PolicyRoutes(settings, cast(Any, engine), table_of(engine, run))
    app = FastAPI()
    app.include_router(routes.router(), prefix="/policy")

    def told() -> dict[str, Any]:
        fields: dict[str, Any] = json.loads((run.path / "status" / "infer.127.0.0.1_8001.json").read_text())
        return fields

    publish(run, 3)
    assert (await ask(app, "load", run_id="of another run", version=3)).status_code == 409
    assert (told()["state"], "another run" in told()["message"]) == ("serving", True)
    assert (await ask(app, "load", run_id=run.run_id, version=3)).status_code == 200
    assert (told()["state"], told()["step"], told()["message"]) == ("serving", 3, None)
    assert (await ask(app, "load", run_id=run.run_id, version=4)).status_code == 409
    assert (told()["state"], "version 4" in told()["message"]) == ("serving", True)
    routes.report_end(SystemExit(143))
    assert told()["state"] == "finished"
    routes.report_end(RuntimeError("the engine is dead"))
    assert (told()["state"], told()["message"]) == ("failed", "RuntimeError: the engine is dead")


async def test_sampling_ends_when_the_client_hangs_up(app: FastAPI, engine: SlowEngine) -> None:
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
    await asyncio.wait_for(app(scope, receive, send), 60)
    assert engine.cancelled.is_set()


def test_a_port_in_use_is_refused_by_name() -> None:
    with listening_socket("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(OSError, match=str(port)):
            listening_socket("127.0.0.1", port)


def test_a_missing_model_is_named_before_vllm_is_imported() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-X", "importtime", "-m", "grpo.infer.cli", "--model", "/no/such/model"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1
    assert "/no/such/model" in result.stderr.splitlines()[-1]
    assert "vllm.config" not in result.stderr

"""A teacher's servers before the run: waited for, looked at, tried, or refused with the reason."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import unused_port

from configs.channels import TeacherSettings
from orchestrator.renderer import ChatRenderer
from orchestrator.teachers.client import HttpTeacher
from orchestrator.teachers.opening import open_teacher, tokenizer_folder
from orchestrator.teachers.scoring import TeacherRefused
from tests.orchestrator.fakes import MODEL
from transport.types import Int32
from transport.weights.identity import base_identity

CODEC = ChatRenderer.of_model(MODEL)


class Server:
    """A teacher's server, a grpo-infer or one with OpenAI's routes alone. A token's log-probability is -token / 100."""

    def __init__(self, *, ours: bool, **changes: Any) -> None:
        self.ours, self.api_key, self.tokenizes, self.num_busy = ours, None, True, 0
        self.info: dict[str, Any] = {"max_model_len": 16, "live": []}
        self.temperatures: list[float] = []
        self.model = "large"
        self.without_logprobs = False
        for name, value in changes.items():
            setattr(self, name, value)
        self.port = unused_port()
        self.url = f"http://127.0.0.1:{self.port}"

    async def start(self) -> "Server":
        app = web.Application(middlewares=[self._guarded])
        app.add_routes([web.post("/tokenize", self._tokenize)])
        if self.ours:
            app.add_routes([web.get("/policy/info", self._info), web.post("/policy/score", self._score)])
        else:
            app.add_routes([web.get("/v1/models", self._models), web.post("/v1/completions", self._complete)])
        self._runner = web.AppRunner(app, shutdown_timeout=0.05)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        return self

    async def stop(self) -> None:
        await self._runner.cleanup()

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.num_busy > 0:
            self.num_busy -= 1
            return web.Response(status=503, text="loading the model")
        if self.api_key is not None and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        response: web.StreamResponse = await handler(request)
        return response

    async def _info(self, _: web.Request) -> web.Response:
        return web.json_response(self.info)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.model, "max_model_len": 32}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        if not self.tokenizes:
            return web.Response(status=404)
        tokens = CODEC.ids_of((await request.json())["prompt"])
        return web.json_response({"tokens": tokens, "count": len(tokens), "max_model_len": 16})

    async def _score(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        self.temperatures.append(body.get("temperature", 1.0))
        return web.json_response({"version": None, "logprobs": [-token / 100 for token in body["token_ids"][1:]]})

    async def _complete(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        entries = [None] + [{str(token): {"logprob": -token / 100}} for token in body["prompt"][1:]]
        return web.json_response({"choices": [{"prompt_logprobs": None if self.without_logprobs else entries}]})


@pytest_asyncio.fixture
async def servers() -> AsyncIterator[list[Server]]:
    """Those that a test has started, to be stopped after it."""
    started: list[Server] = []
    yield started
    for server in started:
        await server.stop()


async def serving(servers: list[Server], *, ours: bool = True, **changes: Any) -> Server:
    servers.append(await Server(ours=ours, **changes).start())
    return servers[-1]


async def opened(
    *urls: str, name: str = "large", api_key: str | None = None, temperatures: Sequence[float] = (1.0,), **client: Any
) -> HttpTeacher:
    settings = TeacherSettings.model_validate(
        {"model": {"name": name}, "client": {"base_url": urls, "timeout": 2.0, "retries": 0} | client}
    )
    return await open_teacher(
        settings, model_folder=MODEL, renderer=CODEC, api_key=api_key, temperatures=temperatures, wait_s=0.6
    )


async def refusal(*urls: str, **more: Any) -> TeacherRefused:
    with pytest.raises(TeacherRefused) as caught:
        await opened(*urls, **more)
    return caught.value


def ids(*tokens: int) -> Int32:
    return np.array(tokens, np.int32)


async def test_a_grpo_infer_is_asked_by_its_own_routes_at_the_runs_temperatures(servers: list[Server]) -> None:
    server = await serving(servers)
    teacher = await opened(server.url + "/v1", temperatures=[0.8, 1.0, 0.8])
    [found] = await teacher.score([ids(5, 6)], [0.8])
    await teacher.close()
    assert isinstance(found, np.ndarray)
    assert server.temperatures == [0.8, 1.0, 0.8]  # two trials, and the row
    assert teacher.longest == 15
    assert teacher.metrics()["teacher/requests"] == 1


async def test_another_vllm_is_asked_by_openais_routes(servers: list[Server]) -> None:
    server = await serving(servers, ours=False)
    teacher = await opened(server.url)
    [found] = await teacher.score([ids(5, 6)], [1.0])
    await teacher.close()
    assert isinstance(found, np.ndarray)
    assert (teacher.longest, teacher.name) == (31, f"the teacher large at {server.url}")


async def test_servers_that_are_not_up_yet_are_waited_for(servers: list[Server]) -> None:
    server = Server(ours=True, num_busy=1)
    opening = asyncio.create_task(opened(server.url))
    await asyncio.sleep(0.05)
    servers.append(await server.start())
    await (await opening).close()


async def test_a_server_that_does_not_come_up_is_named() -> None:
    url = f"http://127.0.0.1:{unused_port()}"
    error = await refusal(url)
    assert error.reason == "down"
    assert str(error).startswith(f"waited 0.6 s for the teacher's server {url} to come up: ClientConnectorError")
    assert "start it, or mend teacher_model.client.base_url" in str(error)


async def test_a_server_that_stays_busy_is_named_with_what_it_says(servers: list[Server]) -> None:
    server = await serving(servers, num_busy=1000)
    assert "to come up: /policy/info answered 503: loading the model" in str(await refusal(server.url))


async def test_another_temperature_than_1_is_refused_for_openais_routes(servers: list[Server]) -> None:
    server = await serving(servers, ours=False)
    error = await refusal(server.url, temperatures=[1.0, 0.8])
    assert error.reason == "temperature"
    assert "it scores at temperature 1 only, and these tokens were sampled at 0.8" in str(error)


async def test_a_server_that_gives_no_prompt_logprobs_is_refused(servers: list[Server]) -> None:
    server = await serving(servers, ours=False, without_logprobs=True)
    error = await refusal(server.url)
    assert error.reason == "nonsense"
    assert "has no prompt_logprobs" in str(error)


async def test_a_server_of_another_model_is_refused(servers: list[Server]) -> None:
    server = await serving(servers, ours=False, model="small")
    assert "it does not serve 'large'; it serves ['small']" in str(await refusal(server.url))


async def test_a_wrong_key_is_refused_at_once(servers: list[Server]) -> None:
    server = await serving(servers, api_key="secret")
    error = await refusal(server.url, api_key="other")
    assert error.reason == "refused"
    assert "/policy/info answered 401: Unauthorized; set the variable that api_key_var names" in str(error)
    await (await opened(server.url, api_key="secret")).close()


async def test_what_answers_otherwise_is_no_server_of_ours(servers: list[Server]) -> None:
    server = await serving(servers, info={"hello": "world"})
    error = await refusal(server.url)
    assert error.reason == "nonsense"
    assert f"the teacher's server {server.url}: its answer cannot be read" in str(error)


async def test_servers_of_both_kinds_are_not_one_teacher(servers: list[Server]) -> None:
    ours, other = await serving(servers), await serving(servers, ours=False)
    error = await refusal(ours.url, other.url)
    assert f"{ours.url} are grpo-infer and {other.url} are not; serve it by one of the two" in str(error)


# --- its vocabulary, its model ---


async def test_a_folder_on_this_machine_tells_the_vocabulary(servers: list[Server], tmp_path: Path) -> None:
    server = await serving(servers, tokenizes=False)
    await (await opened(server.url, name=str(MODEL))).close()
    tokenizer = json.loads((MODEL / "tokenizer.json").read_bytes())
    tokenizer["added_tokens"][2]["content"] = "<|stop|>"
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    error = await refusal(server.url, name=str(tmp_path))
    assert error.reason == "other_vocabulary"
    assert f"the teacher {tmp_path} has another vocabulary than the policy: 1 of 259 tokens differ" in str(error)
    assert "258 is '<|im_end|>' for the policy and '<|stop|>' for the teacher" in str(error)


async def test_without_a_folder_the_server_reads_probes(servers: list[Server]) -> None:
    server = await serving(servers, tokenizes=False)
    error = await refusal(server.url)
    assert error.reason == "other_vocabulary"
    assert "name the folder of the teacher's tokenizer instead" in str(error)


async def test_a_server_with_another_model_than_the_folders_is_refused(servers: list[Server], tmp_path: Path) -> None:
    identity = base_identity(MODEL)
    server = await serving(servers, info={"max_model_len": 16, "base_model": identity})
    await (await opened(server.url, name=str(MODEL))).close()
    other = shutil.copytree(MODEL, tmp_path / "other")
    config = json.loads((other / "config.json").read_bytes())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    error = await refusal(server.url, name=str(other))
    assert f"serves a model with identity {identity}, expected {base_identity(other)}" in str(error)


def test_only_what_is_on_this_machine_has_a_tokenizers_folder(tmp_path: Path) -> None:
    assert tokenizer_folder(str(tmp_path)) == tmp_path
    for name in ("large", str(tmp_path / "gone"), "./gone", "someone/no-such-model", "a b/c?"):
        assert tokenizer_folder(name) is None


async def test_an_address_must_be_known() -> None:
    with pytest.raises(ValueError, match="`grpo` starts a teacher and fills in its address"):
        await opened()

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
from aiohttp.test_utils import unused_port

from configs.channels import TeacherSettings
from orchestrator.teachers.client import HttpTeacher
from orchestrator.teachers.opening import open_teacher, tokenizer_folder
from orchestrator.teachers.scoring import TeacherRefused
from tests.orchestrator.fakes import MODEL
from tests.orchestrator.teachers.serving import CODEC, FakeTeacher
from transport.records import Int32
from transport.weights.identity import base_identity


@pytest_asyncio.fixture
async def servers() -> AsyncIterator[list[FakeTeacher]]:
    """Those that a test has started, to be stopped after it."""
    started: list[FakeTeacher] = []
    yield started
    for server in started:
        await server.stop()


async def serving(servers: list[FakeTeacher], *, ours: bool = True, **changes: Any) -> FakeTeacher:
    servers.append(await FakeTeacher(ours=ours, **changes).start())
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


async def test_a_grpo_infer_is_asked_by_its_own_routes_at_the_runs_temperatures(servers: list[FakeTeacher]) -> None:
    server = await serving(servers)
    teacher = await opened(server.url + "/v1", temperatures=[0.8, 1.0, 0.8])
    [found] = await teacher.score([ids(5, 6)], [0.8])
    await teacher.close()
    assert isinstance(found, np.ndarray)
    assert [body.get("temperature", 1.0) for body in server.asked] == [0.8, 1.0, 0.8]  # two trials, and the row
    assert teacher.longest == 15
    assert teacher.metrics()["teacher/requests"] == 1


async def test_another_vllm_is_asked_by_openais_routes(servers: list[FakeTeacher]) -> None:
    server = await serving(servers, ours=False)
    teacher = await opened(server.url)
    [found] = await teacher.score([ids(5, 6)], [1.0])
    await teacher.close()
    assert isinstance(found, np.ndarray)
    assert (teacher.longest, teacher.name) == (7, f"the teacher large at {server.url}")


async def test_servers_that_are_not_up_yet_are_waited_for(servers: list[FakeTeacher]) -> None:
    server = FakeTeacher(ours=True, num_busy=1)
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


async def test_a_server_that_stays_busy_is_named_with_what_it_says(servers: list[FakeTeacher]) -> None:
    server = await serving(servers, num_busy=1000)
    assert "to come up: /policy/info answered 503: loading the model" in str(await refusal(server.url))


async def test_another_temperature_than_1_is_refused_for_openais_routes(servers: list[FakeTeacher]) -> None:
    server = await serving(servers, ours=False)
    error = await refusal(server.url, temperatures=[1.0, 0.8])
    assert error.reason == "temperature"
    assert "it scores at temperature 1 only, and these tokens were sampled at 0.8" in str(error)


async def test_a_server_that_gives_no_prompt_logprobs_is_refused(servers: list[FakeTeacher]) -> None:
    server = await serving(servers, ours=False, gives_logprobs=False)
    error = await refusal(server.url)
    assert error.reason == "nonsense"
    assert "has no prompt_logprobs" in str(error)


async def test_a_server_of_another_model_is_refused(servers: list[FakeTeacher]) -> None:
    server = await serving(servers, ours=False, model="small")
    assert "it does not serve 'large'; it serves ['small']" in str(await refusal(server.url))


async def test_a_wrong_key_is_refused_at_once(servers: list[FakeTeacher]) -> None:
    server = await serving(servers, api_key="secret")
    error = await refusal(server.url, api_key="other")
    assert error.reason == "refused"
    assert "/policy/info answered 401: Unauthorized; set the variable that api_key_var names" in str(error)
    await (await opened(server.url, api_key="secret")).close()


async def test_what_answers_otherwise_is_no_server_of_ours(servers: list[FakeTeacher]) -> None:
    server = await serving(servers, info={"hello": "world"})
    error = await refusal(server.url)
    assert error.reason == "nonsense"
    assert f"the teacher's server {server.url}: its answer cannot be read" in str(error)


async def test_servers_of_both_kinds_are_not_one_teacher(servers: list[FakeTeacher]) -> None:
    ours, other = await serving(servers), await serving(servers, ours=False)
    error = await refusal(ours.url, other.url)
    assert f"{ours.url} are grpo-infer and {other.url} are not; serve it by one of the two" in str(error)


# --- its vocabulary, its model ---


async def test_a_folder_on_this_machine_tells_the_vocabulary(servers: list[FakeTeacher], tmp_path: Path) -> None:
    server = await serving(servers, tokenizes=False)
    await (await opened(server.url, name=str(MODEL))).close()
    tokenizer = json.loads((MODEL / "tokenizer.json").read_bytes())
    tokenizer["added_tokens"][2]["content"] = "<|stop|>"
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    error = await refusal(server.url, name=str(tmp_path))
    assert error.reason == "other_vocabulary"
    assert f"the teacher {tmp_path} has another vocabulary than the policy: 1 of 259 tokens differ" in str(error)
    assert "258 is '<|im_end|>' for the policy and '<|stop|>' for the teacher" in str(error)


async def test_without_a_folder_the_server_reads_probes(servers: list[FakeTeacher]) -> None:
    server = await serving(servers, tokenizes=False)
    error = await refusal(server.url)
    assert error.reason == "other_vocabulary"
    assert "name the folder of the teacher's tokenizer instead" in str(error)


async def test_a_server_with_another_model_than_the_folders_is_refused(
    servers: list[FakeTeacher], tmp_path: Path
) -> None:
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

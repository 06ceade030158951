"""What `grpo evaluate` takes for a model, a run and a checkpoint, and by which settings it is evaluated."""

import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from grpo.configs.errors import SettingsError
from grpo.configs.infer import InferSettings
from grpo.configs.orch import OrchSettings
from grpo.orchestrator.evaluate import held_out
from grpo.orchestrator.run import orchestrate
from grpo.transport.errors import UserError
from grpo.transport.ports import free_port
from grpo.transport.run import create_run, join_run

from grpo.commands.evaluate import _evaluated, evaluation_settings, find_target
from grpo.server_process import ServerFailed, ServerProcess, server_process
from tests.orchestrator.fakes import FakeServer, FakeTrainer, settings_for

REVERSE = {"id": "reverse-text"}
MODEL = str(Path(__file__).parents[2] / "configs/quickstart/model")


def evaluated_by(orch: OrchSettings) -> tuple[list[str], int, int | None]:
    """Environments, held-out examples of each, and the longest answer."""
    return [one.env.label for one in held_out(orch)], orch.eval.num_examples, orch.longest_held_out


@pytest.fixture
async def run(tmp_path: Path) -> Path:
    """A run of three steps."""
    server = await FakeServer().start()
    FakeTrainer(tmp_path / "run").start()
    await orchestrate(settings_for(tmp_path / "run", server, eval={"num_examples": 3, "sampling": {"max_tokens": 5}}))
    await server.stop()
    return tmp_path / "run"


def test_a_model_is_evaluated_on_all_that_is_held_out_and_a_run_on_so_many_as_it_says() -> None:
    orch, _ = evaluation_settings(find_target(MODEL, None), env=[{"id": "arithmetic"}])
    assert orch.eval.num_examples == -1
    assert 0 < OrchSettings(model={"name": "m"}, env="arithmetic").eval.num_examples < 1000


def test_a_model_is_evaluated_by_the_given_environments_and_keys_of_the_server() -> None:
    target = find_target(MODEL, None)
    envs = [{"id": "reverse-text"}, {"id": "arithmetic", "name": "sums"}]
    orch, infer = evaluation_settings(target, env=envs, max_tokens=7, server=["--max_model_len", "64"])
    assert target.version is None
    assert evaluated_by(orch) == (["reverse-text", "sums"], -1, 7)
    assert infer.max_model_len == 64
    assert orch.client.base_url == (f"http://127.0.0.1:{infer.port}/v1",)


def test_the_chat_templates_arguments_are_the_servers_and_the_rollouts_alike() -> None:
    words = ["--chat_template_kwargs", '{"enable_thinking": false}']
    orch, infer = evaluation_settings(find_target(MODEL, None), env=[REVERSE], server=words)
    assert orch.model.chat_template_kwargs == infer.chat_template_kwargs == {"enable_thinking": False}


async def test_of_a_run_the_newest_version_or_a_named_one_by_its_own_settings(run: Path) -> None:
    assert find_target(str(run), None).number == 3
    assert find_target(str(run), 2).number == find_target(str(run / "broadcasts" / "step_000002"), None).number == 2
    orch, _ = evaluation_settings(find_target(str(run), None))
    assert evaluated_by(orch) == (["words"], 3, 5)
    orch, _ = evaluation_settings(find_target(str(run), None), env=[{"id": "arithmetic"}], num_examples=9, seed=7)
    assert orch.sampling.seed == 7
    assert evaluated_by(orch) == (["arithmetic"], 9, 5)
    with pytest.raises(ValueError, match=r"there are \[0, 1, 2, 3\]"):
        find_target(str(run), 9)


async def test_a_run_is_asked_under_its_version_and_a_model_as_it_is(run: Path) -> None:
    server = await FakeServer().start()
    server.live = {3}
    with subprocess.Popen(["sleep", "600"]) as process:  # noqa: ASYNC220 (returns at once)
        try:
            url = server.url.removesuffix("/v1")
            served = ServerProcess(url=url, base="base", key=None, process=process, log=run / "infer.log")
            for name, version in ((str(run), 3), (MODEL, None)):
                server.requests.clear()
                target = find_target(name, None)
                orch, _ = evaluation_settings(target, env=[REVERSE], num_examples=2)
                await _evaluated(target, orch, served)
                assert [body["version"] for body in server.requests] == [version] * 2
        finally:
            process.kill()
            await server.stop()


def test_a_server_that_does_not_start_is_an_error_of_the_server_with_the_end_of_its_log(tmp_path: Path) -> None:
    settings = InferSettings(model=str(tmp_path / "no-such-model"), port=free_port()).model_dump(mode="json")
    with pytest.raises(ServerFailed, match="no-such-model"), server_process(settings, tmp_path / "logs/infer.log"):
        pass


def test_a_stranger_on_the_port_is_not_taken_for_the_server(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        settings = InferSettings(model=MODEL, port=stranger.getsockname()[1]).model_dump(mode="json")
        with pytest.raises(ServerFailed, match="--port"), server_process(settings, tmp_path / "logs/infer.log"):
            pass


def test_what_cannot_be_evaluated_is_told(tmp_path: Path) -> None:
    for target, step, told in (("nothing/at/all", None, "no such folder"), (MODEL, 3, "no run")):
        with pytest.raises((ValueError, FileNotFoundError), match=told):
            find_target(target, step)
    create_run(tmp_path)
    join_run(tmp_path, role="train", record={"settings": {"model": MODEL}}, timeout_s=1)
    with pytest.raises(ValueError, match="no version"):
        find_target(str(tmp_path), None)
    found = find_target(MODEL, None)
    given: dict[str, Any]
    for given, error in (
        ({}, ValueError),
        ({"env": [{"id": "revers-text"}]}, UserError),
        ({"env": [REVERSE], "server": ["--max_model_lenn", "3"]}, SettingsError),
        ({"env": [REVERSE], "rollouts_per_example": 4}, ValueError),
    ):
        with pytest.raises(error):
            evaluation_settings(found, **given)

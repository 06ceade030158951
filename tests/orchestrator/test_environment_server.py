"""Environments that a server elsewhere has."""

import asyncio
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.episodes.types import Failure, Score, Task
from orchestrator.workers.failures import EnvironmentFailed
from orchestrator.workers.links import KEY_VAR, split_address
from orchestrator.workers.process import EnvironmentProcess
from orchestrator.workers.server import EnvironmentServer
from tests.orchestrator.fakes import FakeServer, settings_for

OWN = """
import os, time
from orchestrator.envs import Environment, Rubric

def reward(completion, example):
    if completion == "crash":
        os._exit(3)
    if completion == "hang":
        time.sleep(60)
    return float(completion == example["prompt"] * example["times"])

class Repeat(Environment):
    rubric = Rubric([reward])
    def __init__(self, times=1):
        self.times = times
    def dataset(self, split):
        return [{"prompt": word, "times": self.times} for word in ("a", "b")]
"""


@pytest.fixture
def env_id(tmp_path: Path) -> str:
    (tmp_path / "repeat.py").write_text(OWN)
    return f"{tmp_path / 'repeat.py'}:Repeat"


@pytest.fixture
def server(env_id: str) -> Iterator[EnvironmentServer]:
    server = EnvironmentServer(env_id, "127.0.0.1:0")
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    yield server
    server.close()
    thread.join(10)


def environment(server: EnvironmentServer, env_id: str, **changes: Any) -> EnvironmentProcess:
    given: dict[str, Any] = {"label": "e", "env_id": env_id, "args": {"times": 2}, "timeout_s": 20.0}
    return EnvironmentProcess(**given | {"address": server.address} | changes)


def task(index: int) -> Task:
    return Task(env="e", split="train", index=index, messages=())


async def test_it_scores_like_a_process_of_our_own(server: EnvironmentServer, env_id: str) -> None:
    one = environment(server, env_id, hash_keys=("prompt",))
    assert [messages[0]["content"] for messages in await one.prompts("train")] == ["a", "b"]
    assert len(set(one.identities)) == 2
    results = await one.score(task(1), ["bb", "b"])
    assert [result.reward for result in results if isinstance(result, Score)] == [1.0, 0.0]
    await one.close()


async def test_two_orchestrators_are_served_apart(server: EnvironmentServer, env_id: str) -> None:
    both = [environment(server, env_id, args={"times": times}) for times in (1, 3)]
    for one in both:
        await one.prompts("train")
    scores = [await one.score(task(0), ["a", "aaa"]) for one in both]
    rewards = [[result.reward for result in results if isinstance(result, Score)] for results in scores]
    assert rewards == [[1.0, 0.0], [0.0, 1.0]]
    for one in both:
        await one.close()


async def test_a_crash_and_a_hang_cost_one_rollout_each(server: EnvironmentServer, env_id: str) -> None:
    one = environment(server, env_id)
    await one.prompts("train")
    results = await one.score(task(0), ["crash", "aa"])
    assert isinstance(results[0], Failure)
    assert results[0].reason == "env_crashed"
    assert f"of the server at {server.address} ended its process" in results[0].message
    assert isinstance(results[1], Score)
    one._timeout_s = 0.5
    [late] = await one.score(task(0), ["hang"])
    assert isinstance(late, Failure)
    assert late.reason == "env_timeout"
    await one.close()


async def test_another_environment_than_the_servers_is_refused(server: EnvironmentServer) -> None:
    one = environment(server, "reverse-text", args={})
    with pytest.raises(EnvironmentFailed, match=r"env\.id is 'reverse-text', and the server at env\.address serves"):
        await one.prompts("train")
    await one.close()


async def test_a_server_that_is_not_there_is_named(env_id: str) -> None:
    gone = EnvironmentServer(env_id, "127.0.0.1:0")
    gone.close()
    with pytest.raises(EnvironmentFailed, match=rf"env\.address = {gone.address}: .* start its environment server"):
        await environment(gone, env_id).prompts("train")


async def test_something_else_that_listens_is_told_from_a_server(env_id: str) -> None:
    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    other = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    address = "{}:{}".format(*other.sockets[0].getsockname())
    one = EnvironmentProcess(label="e", env_id=env_id, args={}, timeout_s=5.0, address=address)
    with pytest.raises(EnvironmentFailed, match="what listens there is no environment server"):
        await one.prompts("train")
    other.close()
    await other.wait_closed()


async def test_without_the_servers_key_nobody_is_served(env_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "orchestrator.workers.server", env_id, "--listen", "127.0.0.1:0"]
    secret = {KEY_VAR: "the key of the server, long enough"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | secret)  # noqa: ASYNC220
    with process:
        assert process.stderr is not None
        found = re.search(r"at (127\.0\.0\.1:\d+)", process.stderr.readline())
        assert found is not None
        one = EnvironmentProcess(label="e", env_id=env_id, args={}, timeout_s=20.0, address=found[1])
        with pytest.raises(EnvironmentFailed, match=f"its key is another one; set {KEY_VAR}"):
            await one.prompts("train")
        monkeypatch.setenv(KEY_VAR, secret[KEY_VAR])
        assert len(await one.prompts("train")) == 2
        await one.close()
        process.terminate()
        assert process.wait(20) == 143


def test_an_address_that_others_reach_needs_a_key(env_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VAR, "short")
    with pytest.raises(ValueError, match=f"can be reached from other machines, and {KEY_VAR} has 5 characters"):
        EnvironmentServer(env_id, "0.0.0.0:0")


@pytest.mark.parametrize("address", ["here", ":7", "host:", "host:x", "host:70000"])
def test_addresses_have_a_host_and_a_port(address: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        split_address(address)
    with pytest.raises(ValueError, match="address"):
        settings_for(Path("x"), FakeServer(), env=[{"id": "reverse-text", "address": f"{address}x"}])

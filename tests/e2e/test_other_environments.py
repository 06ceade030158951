"""Environments of other people, trained with a real vLLM: a `verifiers` package that is installed, an OpenEnv server
that goes away in the middle and comes back, and a `grpo-env` that is killed and started again."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from grpo.transport.ports import free_port

from tests.e2e.conftest import pip
from tests.e2e.runs import PROGRAMS, ROOT, Run
from tests.support import END_S, until

pytest.importorskip("verifiers.v1", reason="the extra verifiers is not installed")
pytestmark = pytest.mark.e2e

OTHERS = ROOT / "tests/environments/others"
NUM_STEPS, BATCH_SIZE, GROUP_SIZE = 4, 32, 8
STEPS_BEFORE_CRASH = 40
"""Of the OpenEnv server's, over all sessions: in the middle of the run."""
AWAY_S = 1.0
TWICE = """
from grpo import Environment, MultiTurnEpisode, Rubric

def share_of_letters(completion, state):
    text = "".join(reply.text for reply in state.trajectory)
    return sum(letter.isalpha() for letter in text) / max(1, len(text))

class Twice(MultiTurnEpisode, Environment):
    rubric = Rubric([share_of_letters])

    def __init__(self):
        super().__init__(max_turns=2)

    def dataset(self, split):
        return [{"prompt": f"Say {word}"} for word in ("tea", "milk", "juice", "water")]

    async def respond(self, state, ctx):
        return "And again"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survived:
    """A run that is over."""

    run: Run
    crashed: bool
    """Whether the server had gone away before the run's end."""


def serve(port: int, *command: str) -> subprocess.Popen[bytes]:
    """Starts a server, and waits until it takes connections."""
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT)

    def takes_connections() -> bool:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return True
        return False

    until(takes_connections, process)
    return process


def serve_words(port: int, *arguments: str) -> subprocess.Popen[bytes]:
    """An OpenEnv server."""
    return serve(port, str(OTHERS / "openenv_server.py"), str(port), *arguments)


def serve_twice(folder: Path, port: int) -> subprocess.Popen[bytes]:
    """`grpo-env` with an environment whose rollouts are episodes."""
    (folder / "twice.py").write_text(TWICE)
    return serve(port, "-m", "grpo.orchestrator.workers.server", f"{folder / 'twice.py'}:Twice", "--port", str(port))


@pytest.fixture(scope="module")
def survived(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Survived]:
    folder = tmp_path_factory.mktemp("others")
    shutil.copytree(OTHERS / "backwards_env", folder / "source")  # building writes into it
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target")
    pip("install", *options, folder / "packages", folder / "source")
    port, port_of_twice = free_port(), free_port()
    fields = {"action_field": "message", "observation_field": "text", "max_turns": 3}
    environments = [
        {"id": "verifiers", "args": {"env_id": "backwards-env", "env_args": {"length": 3}, "num_eval": 10}},
        {"id": "openenv", "args": {"base_url": f"http://127.0.0.1:{port}", **fields}},
        {"id": f"{folder / 'twice.py'}:Twice", "name": "remote", "address": f"tcp://127.0.0.1:{port_of_twice}"},
    ]
    server, twice = serve_words(port, "100", str(STEPS_BEFORE_CRASH)), serve_twice(folder, port_of_twice)
    command = [
        *(str(PROGRAMS / "grpo"), "configs/quickstart", "--output_dir", str(folder / "run")),
        *("--max_steps", str(NUM_STEPS), "--orch.env", json.dumps(environments)),
        *("--orch.batch_size", str(BATCH_SIZE), "--orch.rollouts_per_example", str(GROUP_SIZE)),
        # What the server that is killed had begun is begun again only after the time for rewards.
        *("--orch.eval.num_examples", "0", "--orch.reward_timeout_s", "20"),
    ]
    paths = [str(folder / "packages"), *([os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    training = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        while training.poll() is None and server.poll() is None:
            time.sleep(0.05)
        if crashed := server.poll() is not None and training.poll() is None:
            time.sleep(AWAY_S)
            server = serve_words(port)
            twice.kill()
            twice.wait()
            twice = serve_twice(folder, port_of_twice)
        _, stderr = training.communicate(timeout=END_S)
        assert training.returncode == 0, stderr
        yield Survived(run=Run(folder / "run"), crashed=crashed)
    finally:
        for process in (training, server, twice):
            process.kill()
            process.wait()


def test_all_are_trained_to_the_end_though_servers_went_away(survived: Survived) -> None:
    assert survived.crashed
    run, summary = survived.run, survived.run.summary
    issued, dropped = summary["rollouts_issued"], sum(summary["rollouts_dropped"].values())
    assert summary["rollouts_trained"] == issued - dropped >= NUM_STEPS * BATCH_SIZE - dropped
    assert [line["progress/step"] for line in run.steps] == list(range(1, NUM_STEPS + 1))
    for env in ("verifiers", "openenv", "remote"):
        assert any(f"reward/mean/{env}" in line for line in run.steps[1:])


def test_rollouts_that_were_lost_with_the_server_are_counted_with_their_reason(survived: Survived) -> None:
    """Those of the server that was killed are begun again, and none of them is lost."""
    summary = survived.run.summary
    dropped = summary["rollouts_dropped"]
    assert {"env_error"} <= set(dropped) <= {"env_error", "group_too_small"}
    # one that is left alone in its group goes with the seven that were lost
    assert dropped.get("group_too_small", 0) * (GROUP_SIZE - 1) <= dropped["env_error"]
    assert 1 <= dropped["env_error"] <= summary["rollouts_issued"] / 2

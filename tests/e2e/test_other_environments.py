"""Environments of other people, trained with a real vLLM: a `verifiers` package that is installed, an OpenEnv server
that goes away in the middle and comes back, and a `grpo-env` that is killed and started again."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
from grpo.transport.ports import free_port

from tests.e2e.conftest import pip
from tests.e2e.runs import PROGRAMS, ROOT, Run
from tests.support import END_S, options, until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(find_spec("verifiers") is None, reason="the extra verifiers is not installed"),
]

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


def test_all_are_trained_to_the_end_though_servers_go_away_and_what_is_lost_with_them_is_counted(
    tmp_path: Path,
) -> None:
    """Rollouts of the OpenEnv server are lost, those of the server that is killed are begun again."""
    shutil.copytree(OTHERS / "backwards_env", tmp_path / "source")  # building writes into it
    how = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target")
    pip("install", *how, tmp_path / "packages", tmp_path / "source")
    port, port_of_twice = free_port(), free_port()
    fields = {"action_field": "message", "observation_field": "text", "max_turns": 3}
    environments = [
        {"id": "verifiers", "args": {"env_id": "backwards-env", "env_args": {"length": 3}, "num_eval": 10}},
        {"id": "openenv", "args": {"base_url": f"http://127.0.0.1:{port}", **fields}},
        {"id": f"{tmp_path / 'twice.py'}:Twice", "name": "remote", "address": f"tcp://127.0.0.1:{port_of_twice}"},
    ]
    settings = {
        "output_dir": tmp_path / "run",
        "max_steps": NUM_STEPS,
        "orch.env": json.dumps(environments),
        "orch.batch_size": BATCH_SIZE,
        "orch.rollouts_per_example": GROUP_SIZE,
        "orch.eval.num_examples": 0,
        # What the server that is killed had begun is begun again only after the time for rewards.
        "orch.reward_timeout_s": 20,
    }
    paths = [str(tmp_path / "packages"), *([os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    server, twice = serve_words(port, "100", str(STEPS_BEFORE_CRASH)), serve_twice(tmp_path, port_of_twice)
    command = [str(PROGRAMS / "grpo"), "configs/quickstart", *options(settings)]
    training = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: server.poll() is not None, training)
        time.sleep(AWAY_S)
        server = serve_words(port)
        twice.kill()
        twice.wait()
        twice = serve_twice(tmp_path, port_of_twice)
        _, stderr = training.communicate(timeout=END_S)
        assert training.returncode == 0, stderr
    finally:
        for process in (training, server, twice):
            process.kill()
            process.wait()

    run, summary = Run(tmp_path / "run"), Run(tmp_path / "run").summary
    issued, dropped = summary["rollouts_issued"], summary["rollouts_dropped"]
    num_dropped = sum(dropped.values())
    assert summary["rollouts_trained"] == issued - num_dropped >= NUM_STEPS * BATCH_SIZE - num_dropped
    assert [line["progress/step"] for line in run.steps] == list(range(1, NUM_STEPS + 1))
    for env in ("verifiers", "openenv", "remote"):
        assert any(f"reward/mean/{env}" in line for line in run.steps[1:])
    assert {"env_error"} <= set(dropped) <= {"env_error", "group_too_small"}
    # one that is left alone in its group goes with the seven that were lost
    assert dropped.get("group_too_small", 0) * (GROUP_SIZE - 1) <= dropped["env_error"]
    assert 1 <= dropped["env_error"] <= issued / 2

"""The container files. No container engine is needed: the compose file is read here, and the commands of its services
are run as they are written there, as three processes of this machine. Substituted for that are only

- the volume `/outputs`, by a temporary folder,
- the host name of the server and its port 8000, by 127.0.0.1 and a free port,
- the programs' names, by those of this environment.
"""

import json
import re
import signal
import subprocess
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from grpo.configs.infer import InferSettings
from grpo.configs.orch import OrchSettings
from grpo.configs.run import load_part
from grpo.configs.train import TrainSettings
from grpo.transport.ports import free_port
from grpo.transport.status import server_file

from tests.deploy.containers import start, substituted
from tests.support import END_S, until

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FILE = (ROOT / "deploy" / "docker-compose.yaml").read_text()
COMPOSE: dict[str, dict[str, Any]] = yaml.safe_load(FILE)
SERVICES = COMPOSE["services"]
PROFILES = {"cpu": ("train", "infer", "orch"), "gpu": ("train-gpu", "infer-gpu", "orch-gpu")}
VOLUME = "/outputs"
PORT = "8000"
KEY = "a-secret-of-this-test"
NUM_STEPS = 3


@pytest.mark.parametrize("profile", PROFILES)
def test_the_three_commands_agree_with_each_other_and_take_what_the_head_of_the_file_names(
    profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    named = set(re.findall(r"GRPO_(?:RUN|TRAIN|INFER|ORCH)_\w+", FILE))
    for name in named:
        monkeypatch.setenv(name, "32")
    train, infer, orch = (SERVICES[name]["command"] for name in PROFILES[profile])
    assert [command[0] for command in (train, infer, orch)] == ["grpo-train", "grpo-infer", "grpo-orch"]
    trainer = load_part(TrainSettings, train[1], train[2:])
    server = load_part(InferSettings, infer[1], infer[2:])
    orchestrator = load_part(OrchSettings, orch[1], orch[2:])
    assert trainer.output_dir == server.output_dir == orchestrator.output_dir
    assert trainer.output_dir.startswith(VOLUME)
    assert (server.host, str(server.port)) == ("0.0.0.0", PORT)
    assert orchestrator.client.base_url == (f"http://{PROFILES[profile][1]}:{PORT}/v1",)
    assert (trainer.max_steps, orchestrator.max_steps, orchestrator.batch_size) == (32, 32, 32)


@pytest.mark.parametrize("profile", PROFILES)
def test_the_orchestrator_follows_a_healthy_server_which_needs_a_key_and_is_on_the_loopback_only(profile: str) -> None:
    train, infer, orch = PROFILES[profile]
    waits = {infer: {"condition": "service_healthy"}, train: {"condition": "service_started"}}
    assert SERVICES[orch]["depends_on"] == waits
    assert PORT in SERVICES[infer]["healthcheck"]["test"][-1]
    for name in (infer, orch):
        assert SERVICES[name]["environment"]["VLLM_API_KEY"].startswith("${VLLM_API_KEY:?")
    assert all(port.startswith("127.0.0.1:") for port in SERVICES[infer]["ports"])


def test_all_write_to_one_volume_start_again_where_they_fail_and_have_an_image_that_runs_as_a_user() -> None:
    assert "outputs" in COMPOSE["volumes"]
    for service in SERVICES.values():
        assert f"outputs:{VOLUME}" in service["volumes"]
        # Not for ever: settings that cannot be honoured do not mend by themselves.
        assert service["restart"].startswith("on-failure:")
        build = service["build"]
        assert build["args"]["EXTRA"] in PROJECT["project"]["optional-dependencies"]
        assert (ROOT / "deploy" / build["context"] / build["dockerfile"]).samefile(ROOT / "deploy" / "Dockerfile")
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    assert set(re.findall(r"^ARG (\w+)", dockerfile, re.MULTILINE)) >= set(SERVICES["infer"]["build"]["args"])
    assert re.findall(r"^USER (\w+)", dockerfile, re.MULTILINE) == ["grpo"]
    assert "HEALTHCHECK" not in dockerfile


def test_the_image_gets_every_package() -> None:
    ignore = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()
    folders = PROJECT["tool"]["setuptools"]["package-dir"].values()
    assert {f"!{folder}" for folder in ("grpo", *folders)} <= set(ignore)


# --- the commands, run ------------------------------------------------------------------------------------------------


@pytest.fixture
def processes() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def _substituted(command: list[str], *, outputs: Path, port: int) -> list[str]:
    return substituted(command, volume=(VOLUME, outputs), names={PORT: str(port)}, hosts=("//infer",))


def _start(name: str, stack: ExitStack, *, outputs: Path, port: int) -> subprocess.Popen[bytes]:
    # Settings through the environment, as the compose file offers them: a run of two small steps on one thread each.
    environment = {
        "GRPO_RUN_MAX_STEPS": str(NUM_STEPS),
        "GRPO_ORCH_BATCH_SIZE": "32",
        "GRPO_ORCH_EVAL__NUM_EXAMPLES": "0",
        "GRPO_INFER_NUM_THREADS": "1",
        "GRPO_TRAIN_NUM_THREADS": "1",
    }
    if "environment" in SERVICES[name]:
        environment["VLLM_API_KEY"] = KEY
    command = _substituted(SERVICES[name]["command"], outputs=outputs, port=port)
    return start(stack, command, outputs / f"{name}.log", **environment)


def _start_all(stack: ExitStack, *, outputs: Path, port: int) -> dict[str, subprocess.Popen[bytes]]:
    """The services of a CPU in the order of the file; the orchestrator once the server is healthy."""
    started = {}
    for name in (name for name in SERVICES if SERVICES[name]["profiles"] == ["cpu"]):
        if name == "orch":
            health = SERVICES["infer"]["healthcheck"]["test"]
            probe = _substituted(health[1:], outputs=outputs, port=port)
            until(
                lambda probe=probe: subprocess.run(probe, capture_output=True).returncode == 0,
                started["infer"],
                log=(outputs / "infer.log").read_text,
            )
        started[name] = _start(name, stack, outputs=outputs, port=port)
    return started


@pytest.mark.e2e
def test_the_services_commands_make_a_run(tmp_path: Path, processes: ExitStack) -> None:
    """test_kubernetes.py kills such programs, and gives their commands again."""
    port, run = free_port(), tmp_path / "quickstart"
    services = _start_all(processes, outputs=tmp_path, port=port)
    assert services["orch"].wait(timeout=END_S) == 0, (tmp_path / "orch.log").read_text()
    assert services["train"].wait(timeout=END_S) == 0, (tmp_path / "train.log").read_text()
    steps = [json.loads(line)["progress/step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(steps) == NUM_STEPS
    assert [path.name for path in (run / "status").glob("infer.*.json")] == [server_file("0.0.0.0", port)]
    services["infer"].send_signal(signal.SIGTERM)
    assert services["infer"].wait(timeout=END_S) == 143

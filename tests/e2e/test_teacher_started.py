"""`grpo` starts a server of the teacher, leads the orchestrator to it, and starts it again when it is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.e2e.held import held
from transport.status import read_status

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]
TEACHER = "configs/quickstart/model"
NUM_STEPS, KILLED_AFTER, BATCH_SIZE = 5, 2, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Taught:
    """A run whose teacher was killed after KILLED_AFTER steps, before it went on, and what the launcher printed."""

    folder: Path
    exit_code: int
    errors: str


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Taught:
    folder = tmp_path_factory.mktemp("taught") / "run"
    gate = folder.with_name("gate")
    command = [sys.executable, "-m", "grpo.cli", "configs/quickstart", "--output_dir", str(folder)]
    command += ["--max_steps", str(NUM_STEPS), "--orch.batch_size", str(BATCH_SIZE), "--orch.eval.num_examples", "0"]
    command += ["--train.loss.teacher_tau", "0.5", "--orch.teacher_model.model.name", TEACHER]
    command += held(gate, free=KILLED_AFTER * BATCH_SIZE)
    launcher = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        kill_teacher(folder, launcher)
        gate.touch()
        _, errors = launcher.communicate(timeout=240)
    finally:
        launcher.kill()
    return Taught(folder=folder, exit_code=launcher.returncode, errors=errors)


def kill_teacher(folder: Path, launcher: subprocess.Popen[str]) -> None:
    """Once so many steps are done."""
    deadline = time.monotonic() + 240
    while len(metrics(folder)) < KILLED_AFTER:
        assert time.monotonic() < deadline, "the run did not get going within 240 s"
        assert launcher.poll() is None, launcher.communicate()[1]
        time.sleep(0.05)
    os.kill((read_status(folder / "status" / "teacher.json") or {})["pid"], signal.SIGKILL)


def metrics(folder: Path) -> list[dict[str, float]]:
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_teacher_that_is_killed_is_started_again_and_the_run_is_completed(taught: Taught) -> None:
    assert taught.exit_code == 0, taught.errors
    assert "grpo-teacher ended" in taught.errors or "grpo-teacher was killed" in taught.errors
    summary = json.loads((taught.folder / "summary.json").read_text())
    assert (summary["steps"], summary["rollouts_trained"]) == (NUM_STEPS, NUM_STEPS * BATCH_SIZE)
    assert (read_status(taught.folder / "status" / "teacher.json") or {})["state"] == "finished"


def test_every_batch_has_its_log_probabilities(taught: Taught) -> None:
    steps = metrics(taught.folder)
    assert len(steps) == NUM_STEPS
    # Step 1 trains version 0, which is the teacher's own model: what differs is rounding.
    assert abs(steps[0]["policy/teacher_kl"]) < 1e-5
    assert all("policy/teacher_kl" in step for step in steps)
    assert sum(step["teacher/rows"] for step in steps) >= NUM_STEPS * BATCH_SIZE


def test_its_server_has_settings_and_a_log_of_its_own_and_leaves_the_run_alone(taught: Taught) -> None:
    settings = yaml.safe_load((taught.folder / "settings" / "teacher.yaml").read_text())
    assert (settings["model"], settings["enable_lora"]) == (TEACHER, False)
    assert settings["output_dir"] != str(taught.folder)
    assert not Path(settings["output_dir"]).exists()
    orch = yaml.safe_load((taught.folder / "settings" / "orch.yaml").read_text())
    assert orch["teacher_model"]["client"]["base_url"] == [f"http://127.0.0.1:{settings['port']}/v1"]
    assert (taught.folder / "logs" / "teacher.log").read_text().count("serving on 127.0.0.1") == 2
    assert len(list((taught.folder / "status").glob("infer.*.json"))) == 1

"""The real `grpo configs/quickstart`, and what happens when its processes are killed or it is interrupted."""

import json
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.chaos.launched import MODULES, ROOT, Run, kill
from tests.e2e.held import held
from transport.run import current_run_id

pytestmark = [pytest.mark.chaos, pytest.mark.e2e]


@pytest.mark.timeout(600)
def test_all_programs_and_then_the_launcher_are_killed_and_the_same_command_goes_on(tmp_path: Path) -> None:
    options = ("--max_steps", "6", "--train.ckpt.interval", "2", *held(tmp_path / "gate", free=3 * 32))
    with closing(Run(tmp_path / "run", *options)) as run:
        run.until_step(2)
        kill(run.engine())
        kill(run.program("train"))
        kill(run.program("orch"))
        restarts = tmp_path / "run" / "status" / "restarts.json"
        run.until(lambda: restarts.exists() and json.loads(restarts.read_text()) == dict.fromkeys(MODULES, 1))
        run.until(lambda: all(run.program(role) for role in MODULES))
        kill(run.program("infer"))
        run.launcher.kill()
        run.end()
    run_id = current_run_id(tmp_path / "run")
    (tmp_path / "gate").touch()
    with closing(Run(tmp_path / "run", *options)) as again:
        code, errors = again.end(timeout_s=300)
    assert (code, current_run_id(tmp_path / "run")) == (0, run_id), errors
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["rollouts_trained"]) == (6, 6 * 32)
    assert summary["canary_max_abs"] < 1e-4
    subprocess.run([sys.executable, "-m", "grpo.cli", "ledger", str(tmp_path / "run"), "--check"], check=True)


@pytest.mark.timeout(900)
def test_a_run_that_is_killed_comes_to_the_policy_of_one_that_is_not(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.kills", "--kills", "0", "--same", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("step", [0, 2])
def test_ctrl_c_ends_all_programs_by_themselves(tmp_path: Path, step: int) -> None:
    with closing(Run(tmp_path / "run")) as run:
        run.until(lambda: all(run.program(role) for role in MODULES))
        run.until_step(step) if step else None
        run.launcher.send_signal(signal.SIGINT)
        code, errors = run.end()
    assert (code, errors.splitlines()[-1]) == (130, "ended by SIGINT")
    for role in MODULES:
        assert step == 0 or "Traceback" not in (run.output_dir / "logs" / f"{role}.log").read_text()


def test_a_port_in_use_ends_the_run_with_the_servers_message(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        closing(Run(tmp_path / "run", "--infer.port", str(port := taken.getsockname()[1]))) as run,
    ):
        code, errors = run.end(timeout_s=180)
    assert code == 1
    assert errors.splitlines()[-1].startswith(f"error: grpo-infer ended with exit code 1: port {port} on 127.0.0.1")

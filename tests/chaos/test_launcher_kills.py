"""The real `grpo configs/quickstart`, and what happens when its processes are killed or it is interrupted."""

import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.chaos.launched import MODULES, ROOT, Run

pytestmark = [pytest.mark.chaos, pytest.mark.e2e]


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

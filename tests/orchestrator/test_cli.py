"""`grpo-orch` as a process: exit codes and messages."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.orchestrator.fakes import MODEL

COMMAND = [sys.executable, "-m", "orchestrator.cli"]


def arguments(folder: Path, *more: str) -> list[str]:
    settings = folder / "orch.yaml"
    settings.write_text(
        f"model: {{name: {MODEL}}}\nenv: [{{id: reverse-text}}]\noutput_dir: {folder}/run\n"
        "batch_size: 8\nrollouts_per_example: 4\nclient: {base_url: ['http://127.0.0.1:9/v1'], timeout: 60}\n"
    )
    return [*COMMAND, str(settings), *more]


def test_a_server_that_never_comes_up_ends_with_1_and_an_error_that_names_it(tmp_path: Path) -> None:
    command = arguments(tmp_path, "--client.timeout", "0.5")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "error: waited client.timeout = 0.5 s for the inference server http://127.0.0.1:9" in done.stderr


def test_a_missing_model_ends_with_1_and_says_what_was_looked_for(tmp_path: Path) -> None:
    command = arguments(tmp_path, "--model.name", "./no-such-model")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: model './no-such-model': no such folder")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("after_s", [0.7, 3.0])
def test_a_signal_ends_it_at_once(tmp_path: Path, number: signal.Signals, code: int, after_s: float) -> None:
    process = subprocess.Popen(arguments(tmp_path), stderr=subprocess.PIPE, text=True)
    time.sleep(after_s)
    assert process.poll() is None
    began_s = time.monotonic()
    process.send_signal(number)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == code, stderr
    assert time.monotonic() - began_s < 5
    assert f"ended by {number.name}" in stderr

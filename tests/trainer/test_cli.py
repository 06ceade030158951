"""`grpo-train` as a process: its exit codes and last words."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.trainer.models import save_tiny_model
from transport.status import read_status

COMMAND = [sys.executable, "-m", "trainer.cli", "--device", "cpu", "--recipe", "fp32", "--num_threads", "1"]


def test_help_imports_nothing_that_takes_long() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "trainer.cli", "--help"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0
    assert "--lora_rank" in result.stdout
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "configs.train" in imported
    assert not {"torch", "transformers", "peft", "bitsandbytes", "numpy", "huggingface_hub"} & imported


def test_a_missing_model_ends_with_status_1_before_a_run_is_founded(tmp_path: Path) -> None:
    command = [*COMMAND, "--model", str(tmp_path / "none"), "--output_dir", str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("error: model ")
    assert str(tmp_path / "none") in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_waiting_ends_the_trainer_at_once(tmp_path: Path, number: signal.Signals) -> None:
    model, output = save_tiny_model(tmp_path / "model"), tmp_path / "out"
    process = subprocess.Popen([*COMMAND, "--model", str(model), "--output_dir", str(output)], stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 120
        while (read_status(output / "status" / "train.json") or {}).get("state") != "waiting":
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.05)
        os.kill(process.pid, number)
        _, errors = process.communicate(timeout=60)  # it would have waited for its batch far longer
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 128 + number
    assert number.name.encode() in errors

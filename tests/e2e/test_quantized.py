"""The quickstart on a quantized base: the server has the trainer's numbers, apart and on one copy."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from transport.weights.dequantized import FOLDER

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("setting", "more"), [("qlora_bnb", ()), ("qlora_fp8", ("--colocate",))])
def test_the_quickstart_learns_on_a_quantized_base_and_its_canaries_agree(
    tmp_path: Path, setting: str, more: tuple[str, ...]
) -> None:
    command = [sys.executable, "-m", "grpo.cli", "configs/quickstart", "--output_dir", str(tmp_path / "run"), *more]
    words = ["--max_steps", "6", f"--train.{setting}", "true"]
    done = subprocess.run([*command, *words], cwd=ROOT, check=False, capture_output=True, timeout=300, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.1
    assert summary["canary_max_abs"] < 1e-4
    assert (tmp_path / "run" / FOLDER / "STABLE").exists()

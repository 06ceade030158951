"""The quickstart with versions that are merged into the base model's weights."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
OPTIONS = {
    "max_steps": 6,
    "train.weight_broadcast.format": "merged",
    "orch.weight_broadcast.format": "merged",
    "infer.enable_lora": "false",
    "infer.max_lora_rank": "null",
}


def test_the_quickstart_learns_with_merged_versions_and_their_canaries_agree(tmp_path: Path) -> None:
    words = [word for key, value in OPTIONS.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "grpo.cli", "configs/quickstart", "--output_dir", str(tmp_path / "run"), *words]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=240)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.1
    assert summary["canary_max_abs"] < 1e-4
    assert summary["mismatch_max_lag0"] < 1e-4
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["progress/step"] for line in lines if "loss/policy" in line] == [1, 2, 3, 4, 5, 6]
    folders = sorted(path.name for path in (tmp_path / "run/broadcasts").glob("step_*"))
    assert folders[-2:] == ["step_000005", "step_000006"]
    # How many more stay depends on how far the servers were when the last version was published.
    assert "step_000000" not in folders

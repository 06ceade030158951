"""The quickstart trained otherwise than by default: by two ranks, strictly on-policy, and with all of its weights."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
RANKS = {"train.device": "cpu", "train.gpus": "2"}
FULL = {
    "train.lora": "false",
    "train.weight_broadcast.format": "full",
    "train.learning_rate": "1e-4",
    "orch.weight_broadcast.format": "full",
    "infer.enable_lora": "false",
    "infer.max_lora_rank": "null",
}


def run(folder: Path, options: dict[str, str]) -> dict[str, Any]:
    """The summary of four steps of the quickstart."""
    words = [word for key, value in options.items() for word in (f"--{key}", value)]
    command = [sys.executable, "-m", "grpo.cli", "configs/quickstart", "--output_dir", str(folder), *words]
    command += ["--max_steps", "4", "--orch.eval.num_examples", "100"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def check_agreement(folder: Path, summary: dict[str, Any], *, zero_level: int) -> list[dict[str, Any]]:
    """Two ranks trained, every version was served as it was trained, every rollout was trained once, and it helped.
    Returns what was measured."""
    assert summary["canary_max_abs"] < 1e-4
    assert summary["mismatch_max_lag0"] < 1e-4
    assert summary["versions_served"] == [0, 1, 2, 3, 4]
    assert summary["rollouts_trained"] == summary["rollouts_issued"] == 4 * 256
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(line["policy/mismatch_max_lag0"] < 1e-4 for line in lines if "policy/mismatch_max_lag0" in line)
    assert summary["accuracy_after"] > summary["accuracy_before"]
    settings = json.loads((folder / "run.json").read_text())["programs"]["train"]["settings"]
    assert (settings["gpus"], settings["zero_level"]) == (2, zero_level)
    return lines


def test_two_ranks_train_adapters_strictly_on_policy_and_what_they_train_is_served(tmp_path: Path) -> None:
    summary = run(tmp_path / "run", RANKS | {"train.zero_level": "1", "orch.max_async_level": "0"})
    lines = check_agreement(tmp_path / "run", summary, zero_level=1)
    assert [line["policy/lag_max"] for line in lines if "policy/lag_max" in line] == [0.0] * 4


def test_two_ranks_train_all_weights_and_what_they_train_is_served_in_place(tmp_path: Path) -> None:
    over_sockets = {"train.rollout_transport.type": "zmq", "orch.rollout_transport.type": "zmq"}
    summary = run(tmp_path / "run", FULL | RANKS | over_sockets | {"train.zero_level": "3"})
    check_agreement(tmp_path / "run", summary, zero_level=3)
    manifest = json.loads((tmp_path / "run/broadcasts/step_000004/manifest.json").read_text())
    assert manifest["spec"]["kind"] == "full"

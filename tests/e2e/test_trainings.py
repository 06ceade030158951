"""The quickstart trained by two ranks, strictly on-policy, over sockets, with all of its weights."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
OPTIONS = {
    "max_steps": "4",
    "train.device": "cpu",
    "train.gpus": "2",
    "train.zero_level": "3",
    "train.lora": "false",
    "train.learning_rate": "1e-4",
    "train.weight_broadcast.format": "full",
    "train.rollout_transport.type": "zmq",
    "infer.enable_lora": "false",
    "infer.max_lora_rank": "null",
    "orch.weight_broadcast.format": "full",
    "orch.rollout_transport.type": "zmq",
    "orch.max_async_level": "0",
    "orch.eval.num_examples": "100",
}


def test_two_ranks_train_all_weights_and_what_they_train_is_served_in_place(tmp_path: Path) -> None:
    words = [word for key, value in OPTIONS.items() for word in (f"--{key}", value)]
    command = [sys.executable, "-m", "grpo.cli", "configs/quickstart", "--output_dir", str(tmp_path / "run"), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["canary_max_abs"] < 1e-4
    assert summary["mismatch_max_lag0"] < 1e-4
    assert summary["versions_served"] == [0, 1, 2, 3, 4]
    assert summary["rollouts_trained"] == summary["rollouts_issued"] == 4 * 256
    assert summary["accuracy_after"] > summary["accuracy_before"]
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["policy/lag_max"] for line in lines if "policy/lag_max" in line] == [0.0] * 4
    manifest = json.loads((tmp_path / "run/broadcasts/step_000004/manifest.json").read_text())
    assert manifest["spec"]["kind"] == "full"

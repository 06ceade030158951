"""Answers that go on under a new version, through the whole pipeline; token by token they are compared with Hugging
Face's in test_infer_noise.py and test_infer_in_place.py."""

import json
from pathlib import Path

import pytest

from tests.e2e.test_pipeline import ROOT, grpo, metrics

pytestmark = [pytest.mark.e2e, pytest.mark.alone]


@pytest.mark.parametrize("layout", ["adapter", "merged"])
def test_a_run_trains_every_token_with_the_version_that_sampled_it(tmp_path: Path, layout: str) -> None:
    page = (ROOT / "docs" / "inflight.md").read_text()
    [command] = [line.split() for line in page.splitlines() if line.startswith("    grpo ")]
    words = [*("--orch.eval.num_examples", "0", "--max_steps", "5")]
    words += [*("--infer.vllm", '{"max_num_seqs": 16}')]  # so few that the server is at work when most versions come
    if layout == "merged":
        words += [*("--train.weight_broadcast.format", "merged", "--orch.weight_broadcast.format", "merged")]
        words += [*("--infer.enable_lora", "false", "--infer.max_lora_rank", "null")]
    done = grpo(*command[1:], "--output_dir", str(tmp_path / "run"), *words)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["rollouts_trained"] == summary["rollouts_issued"] == 5 * 256
    assert summary["versions_served"] == [0, 1, 2, 3, 4, 5]
    assert summary["canary_max_abs"] < 1e-4
    lines = [line for line in metrics(tmp_path / "run") if "policy/lag_max" in line]
    assert max(line["policy/lag_max"] for line in lines) >= 1
    assert max(line["policy/lag_max"] for line in lines) <= 8
    assert all(
        0 <= line["rollout/several_versions"] <= 1 for line in lines
    )  # above 0 where generation is the slower half
    # a token that were trained with another version than its own would differ where its lag is 0
    assert max(line["policy/mismatch_max_lag0"] for line in lines if "policy/mismatch_max_lag0" in line) < 1e-4
    assert max(line["policy/mismatch_max_lag1"] for line in lines if "policy/mismatch_max_lag1" in line) > 1e-2

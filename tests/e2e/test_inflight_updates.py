"""Answers that go on under a new version, through the whole pipeline, with a quantized base of which each program has a
copy; token by token they are compared with Hugging Face's in test_infer_noise.py and test_infer_in_place.py."""

from pathlib import Path

import pytest

from tests.e2e.runs import ROOT, trained

pytestmark = pytest.mark.e2e
NUM_STEPS = 4


def test_a_run_trains_every_token_with_the_version_that_sampled_it(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "inflight.md").read_text()
    [(_, preset, *words)] = [line.split() for line in page.splitlines() if line.startswith("    grpo ")]
    words += ["--orch.eval.num_examples", "0", "--max_steps", str(NUM_STEPS), "--train.qlora_bnb", "true"]
    words += ["--infer.vllm", '{"max_num_seqs": 16}']  # so few that the server is at work when most versions come
    run = trained(preset, tmp_path / "run", *words)
    summary = run.summary
    assert summary["rollouts_trained"] == summary["rollouts_issued"] == NUM_STEPS * run.batch_size
    assert summary["versions_served"] == list(range(NUM_STEPS + 1))
    assert summary["canary_max_abs"] < 1e-4
    assert 1 <= max(run.by_step("policy/lag_max").values()) <= 8
    # above 0 where generation is the slower half
    assert all(0 <= share <= 1 for share in run.by_step("rollout/several_versions").values())
    # a token that were trained with another version than its own would differ where its lag is 0
    assert summary["mismatch_max_lag0"] < 1e-4
    assert max(run.by_step("policy/mismatch_max_lag1").values()) > 1e-2  # 0.30 to 0.46 in 3 runs

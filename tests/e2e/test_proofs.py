"""Servers that sample from another model than they say, with real vLLM: nothing but the spot proofs can tell.

The canary is scored, and not sampled, so that it holds.
"""

from pathlib import Path

import pytest
from grpo.orchestrator.ledger_reader import open_ledger
from grpo.transport.errors import PROOF_FAILED

from tests.e2e.runs import ROOT, Run, grpo

pytestmark = pytest.mark.e2e
SEAM = ROOT / "benchmarks/seam"
SMALL = ("--max_steps", 12, "--orch.batch_size", 64, "--orch.rollouts_per_example", 8, "--orch.eval.num_examples", 0)
SHARE, WITHIN = 0.5, 4


def test_a_run_with_a_tenth_of_its_rollouts_sampled_from_the_base_stops_and_says_so(tmp_path: Path) -> None:
    """Version 1 is the first that differs from the base, and step 2 the first that may train its samples. Of 64 samples
    half are proved: one in ten of 32 is missed in a step with 0.9^32 = 3 %."""
    variables = {"PYTHONPATH": str(SEAM), "SILENT_FAULT": "base-for-a-tenth", "SILENT_FAULT_MARKS": str(tmp_path)}
    options = (*SMALL, "--proofs.share", SHARE, "--output_dir", tmp_path / "run")
    ended = grpo("configs/quickstart", *options, variables=variables)
    assert ended.returncode == PROOF_FAILED, ended.stdout + ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert "a spot proof does not hold: rollout " in last
    assert "http://127.0.0.1" in last
    run = Run(tmp_path / "run")
    assert 1 <= len(run.steps) <= 1 + WITHIN
    assert (run.folder / "checkpoints" / f"step_{len(run.steps):06d}").exists()
    with open_ledger(run.folder) as ledger:
        receipts = [receipt for _, receipt in ledger.receipts().values() if receipt is not None]
    assert [one.step for one in receipts] == [*range(1, len(run.steps) + 1)]
    assert all(spot.failed_at is None for one in receipts for spot in one.spots)

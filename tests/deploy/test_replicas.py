"""`grpo --infer_replicas 2`: two servers on one machine, both of which serve every version."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from transport.status import FINISHED, read_status

ROOT = Path(__file__).parents[2]


@pytest.mark.e2e
def test_a_run_with_two_servers_of_its_own_uses_both(tmp_path: Path) -> None:
    words = ["--infer_replicas", "2", "--max_steps", "3", "--orch.batch_size", "64", "--orch.eval.num_examples", "0"]
    command = [sys.executable, "-m", "grpo.cli", "quickstart", "--output_dir", str(tmp_path / "run"), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    files = sorted((tmp_path / "run" / "status").glob("infer.*.json"))
    assert [(read_status(path) or {})["state"] for path in files] == [FINISHED, FINISHED]
    assert {path.name for path in (tmp_path / "run" / "logs").glob("infer*")} == {"infer.0.log", "infer.1.log"}
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any(step.get("perf/servers") == 2 for step in steps)

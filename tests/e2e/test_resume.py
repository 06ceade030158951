"""A run that was killed goes on, and one that went astray goes back, with the real vLLM, as their user does it."""

import json
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.held import held
from tests.e2e.test_pipeline import ROOT, grpo, metrics
from transport.checkpoints import Checkpoints
from transport.run import RunFolder, current_run_id

pytestmark = pytest.mark.e2e
BATCH_SIZE = 256
OPTIONS = (*("--train.ckpt.interval", "3", "--train.ckpt.keep_last", "null", "--orch.eval.num_examples", "0"),)


def steps_of(run: Path) -> list[int]:
    """Steps that have a line in metrics.jsonl."""
    if not (run / "metrics.jsonl").exists():
        return []
    return [int(line["progress/step"]) for line in metrics(run) if "reward/mean" in line]


def check(run: Path, *, num_steps: int) -> None:
    """Every rollout has one fate, and every step its own rollouts."""
    with sqlite3.connect(run / "ledger.sqlite") as database:
        rows = database.execute("SELECT state, reason, step FROM rollouts").fetchall()
    trained = Counter(step for state, _, step in rows if state == "trained")
    assert trained == dict.fromkeys(range(1, num_steps + 1), BATCH_SIZE)
    assert {state for state, _, _ in rows} <= {"trained", "dropped"}
    assert {reason for state, reason, _ in rows if state == "dropped"} <= {"restarted", "superseded", "run_ended"}
    assert steps_of(run) == list(range(1, num_steps + 1))
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    assert summary["versions_served"][-1] == summary["steps"] == num_steps
    assert summary["rollouts_trained"] == num_steps * BATCH_SIZE
    assert summary["canary_max_abs"] < 1e-4


@pytest.mark.timeout(600)
def test_a_run_that_was_interrupted_goes_on_and_can_go_back(tmp_path: Path) -> None:
    run, gate = tmp_path / "run", tmp_path / "gate"  # it stands still before its last steps until it is interrupted
    where = ("configs/quickstart", "--output_dir", str(run), *held(gate, free=5 * BATCH_SIZE))
    command = [sys.executable, "-m", "grpo.cli", *where, "--max_steps", "8", *OPTIONS]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 240
    while len(steps_of(run)) < 4:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143
    gate.touch()

    done = grpo(*where, "--max_steps", "8", *OPTIONS)
    assert done.returncode == 0, done.stdout + done.stderr
    check(run, num_steps=8)
    run_id = current_run_id(run)
    assert run_id is not None
    checkpoints = Checkpoints(RunFolder(path=run, run_id=run_id))
    assert {3, 6, 8} <= set(checkpoints.steps())

    done = grpo(*where, "--max_steps", "7", *OPTIONS, "--resume_step", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    check(run, num_steps=7)
    [aside] = (run / "superseded").iterdir()
    assert sorted(path.name for path in (aside / "broadcasts").iterdir())[-1] == "step_000008"

"""`kill -9` of a co-located run's launcher as it starts: nothing is left, no process and nothing in /dev/shm, and the
same command works again. `kill -9` of that run's programs at random moments: it comes to its last step."""

import json
import os
import random
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.kills import shared
from tests.chaos.launched import END_S, MODULES, Run

pytestmark = [pytest.mark.chaos, pytest.mark.e2e, pytest.mark.alone]

SEED = int(os.environ.get("GRPO_TEST_SEED", "8"))
STARTING_S, TRAINING_S = 8.0, 1.0
"""The launcher is killed within as many seconds after its start, each program within as many after the one before."""
NUM_STEPS = 10
OPTIONS = ("--colocate", "--max_steps", str(NUM_STEPS), "--train.ckpt.interval", "2", "--orch.eval.num_examples", "8")


@pytest.mark.timeout(500)
def test_killed_at_random_moments_a_run_leaves_nothing_or_comes_to_its_end(tmp_path: Path) -> None:
    rng, before, folder = random.Random(SEED), shared(), tmp_path / "run"
    with closing(Run(folder, *OPTIONS)) as run:
        time.sleep(rng.uniform(0, STARTING_S))
        run.launcher.kill()
        run.end()
    with closing(Run(folder, *OPTIONS)) as run:
        run.until_step(1)
        for role in rng.sample(sorted(MODULES), k=3):
            time.sleep(rng.uniform(0, TRAINING_S))
            if (process := run.program(role)) is not None:
                process.kill()
        code, errors = run.end(timeout_s=300)
    assert code == 0, errors
    deadline = time.monotonic() + END_S
    while left := shared() - before:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["versions_served"][-1] == NUM_STEPS
    assert summary["canary_max_abs"] < 1e-4
    subprocess.run([sys.executable, "-m", "grpo.cli", "ledger", str(folder), "--check"], check=True)

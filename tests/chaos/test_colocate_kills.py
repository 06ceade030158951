"""`kill -9` of a co-located run's launcher as it starts: nothing is left, no process and nothing in /dev/shm, and the
next start in the same folder works. `kill -9` of that one's programs at random moments: it comes to its last step."""

import json
import os
import random
import re
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest

from tests.chaos.launched import END_S, MODULES, Run, expect_nothing_left, kill
from tests.e2e.held import held

pytestmark = [pytest.mark.chaos, pytest.mark.e2e, pytest.mark.alone]

SEED = int(os.environ.get("GRPO_TEST_SEED", "8"))
STARTING_S, TRAINING_S = 8.0, 1.0
"""The launcher is killed within as many seconds after its start, each program within as many after the one before."""
NUM_STEPS = 20


def unneeded() -> set[str]:
    """Files in /dev/shm that no process has in its memory."""
    mapped = set[str]()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            mapped.update(re.findall(r" /dev/shm/(\S+)", maps.read_text()))
    return {file.name for file in Path("/dev/shm").iterdir()} - mapped


def expect_nothing_shared(before: set[str]) -> None:
    deadline = time.monotonic() + END_S
    while left := unneeded() - before:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.timeout(420)
def test_killed_at_random_moments_a_run_leaves_nothing_or_comes_to_its_end(tmp_path: Path) -> None:
    rng, before = random.Random(SEED), unneeded()
    options = ("--colocate", "--overwrite_output_dir", "--max_steps", str(NUM_STEPS), "--train.ckpt.interval", "2")
    with closing(Run(tmp_path / "run", *options)) as run:
        time.sleep(rng.uniform(0, STARTING_S))
        run.launcher.kill()
        expect_nothing_left(run.mark, END_S)
        expect_nothing_shared(before)
    # Before its last steps it stands still until all have been killed.
    with closing(Run(tmp_path / "run", *options, *held(tmp_path / "gate", free=(NUM_STEPS - 4) * 32))) as run:
        run.until_step(1)
        for role in rng.sample(list(MODULES), k=len(MODULES)):
            time.sleep(rng.uniform(0, TRAINING_S))
            kill(run.program(role))
        (tmp_path / "gate").touch()
        run.launcher.wait(180)
        code, errors = run.end()
        assert code == 0, errors
        expect_nothing_shared(before)
    summary = json.loads((run.output_dir / "summary.json").read_text())
    assert summary["versions_served"][-1] == NUM_STEPS
    assert summary["canary_max_abs"] < 1e-4
    subprocess.run([sys.executable, "-m", "grpo.cli", "ledger", str(run.output_dir), "--check"], check=True)

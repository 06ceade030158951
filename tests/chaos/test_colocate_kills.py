"""`kill -9` of a co-located run's launcher as it starts: nothing is left, no process and nothing in /dev/shm, and the
same command works again. `kill -9` of that run's programs at random moments: it comes to its last step.

Their one copy of the base is quantized, so that the server has to have the trainer's numbers; in
tests/e2e/test_adapters.py each has a copy of a quantized base.
"""

import os
import random
import time
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest
from grpo.transport.weights.dequantized import FOLDER

from tests.chaos.launched import MODULES, Launched, shared
from tests.e2e.runs import Run, told
from tests.support import until

pytestmark = [pytest.mark.chaos, pytest.mark.e2e, pytest.mark.timeout(900)]

SEED = int(os.environ.get("TEST_SEED", "8"))
STARTING_S, TRAINING_S = 8.0, 1.0
"""The launcher is killed within as many seconds after its start, each program within as many after the one before."""
NUM_STEPS = 8
OPTIONS = ("--colocate", "--train.qlora_fp8", "true", "--max_steps", str(NUM_STEPS), "--train.ckpt.interval", "2")
OPTIONS += ("--restarts", "10")  # a program may also end because another was killed


def test_killed_at_random_moments_a_run_leaves_nothing_or_comes_to_its_end(tmp_path: Path) -> None:
    rng, before, run = random.Random(SEED), shared(), Run(tmp_path / "run")
    with closing(Launched(run.folder, *OPTIONS)) as launched:
        time.sleep(rng.uniform(0, STARTING_S))
        launched.launcher.kill()
        launched.end()
    with closing(Launched(run.folder, *OPTIONS)) as launched:
        launched.until(lambda: run.steps)
        for role in rng.sample(sorted(MODULES), k=3):
            time.sleep(rng.uniform(0, TRAINING_S))
            if (process := launched.program(role)) is not None:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        code, errors = launched.end()
    assert code == 0, errors
    until(lambda: not shared() - before, log=lambda: str(shared() - before))
    assert run.summary["versions_served"][-1] == NUM_STEPS
    assert run.summary["canary_max_abs"] < 1e-4
    assert (run.folder / FOLDER / "STABLE").exists()
    told("prove", run.folder)

"""`kill -9` of a co-located run's launcher as it starts: nothing is left, no process and nothing in /dev/shm, and the
same command works again. `kill -9` of that run's programs at random moments: it comes to its last step."""

import json
import os
import random
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.chaos, pytest.mark.e2e, pytest.mark.alone]

ROOT = Path(__file__).parents[2]
MARK = "GRPO_COLOCATE_KILLS"
SEED = int(os.environ.get("GRPO_TEST_SEED", "8"))
STARTING_S, TRAINING_S = 8.0, 1.0
"""The launcher is killed within as many seconds after its start, each program within as many after the one before."""
NUM_STEPS = 20
END_S = 60.0
OPTIONS = (
    *("--colocate", "--max_steps", str(NUM_STEPS), "--orch.batch_size", "32", "--orch.sampling.max_tokens", "4"),
    *("--train.ckpt.interval", "2", "--orch.eval.num_examples", "0"),
)


def unneeded() -> set[str]:
    """Files in /dev/shm that no process has in its memory."""
    mapped = set[str]()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            mapped.update(re.findall(r" /dev/shm/(\S+)", maps.read_text()))
    return {file.name for file in Path("/dev/shm").iterdir()} - mapped


def marked(mark: str) -> list[psutil.Process]:
    """All that a launcher has started and that lives."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                found.append(process)
    return found


def kill(module: str, mark: str) -> None:
    for process in marked(mark):
        with suppress(psutil.Error):
            if process.cmdline()[1:4] == ["-P", "-m", module]:
                process.kill()


@contextmanager
def launched(folder: Path, before: set[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A launcher and its mark. When it has ended, whatever it has started ends, and leaves nothing shared."""
    mark, command = uuid.uuid4().hex, [sys.executable, "-m", "grpo.cli", "configs/quickstart", *OPTIONS]
    log = folder.with_suffix(".log").open("a")
    launcher = subprocess.Popen(
        [*command, "--output_dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {MARK: mark},
        stdout=log,
        stderr=log,
        text=True,
    )
    try:
        yield launcher, mark
        launcher.wait(END_S)
        deadline = time.monotonic() + END_S
        while left := [*marked(mark), *(unneeded() - before)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
    finally:
        launcher.kill()
        launcher.wait()
        for process in marked(mark):
            process.kill()
        log.close()


@pytest.mark.timeout(500)
def test_killed_at_random_moments_a_run_leaves_nothing_or_comes_to_its_end(tmp_path: Path) -> None:
    rng, before, folder = random.Random(SEED), unneeded(), tmp_path / "run"
    with launched(folder, before) as (launcher, _):
        time.sleep(rng.uniform(0, STARTING_S))
        launcher.kill()
    with launched(folder, before) as (launcher, mark):
        while not (folder / "metrics.jsonl").exists():
            assert launcher.poll() is None, folder.with_suffix(".log").read_text()
            time.sleep(0.1)
        for module in rng.sample(["infer.cli", "trainer.cli", "orchestrator.cli"], k=3):
            time.sleep(rng.uniform(0, TRAINING_S))
            kill(module, mark)
        assert launcher.wait(300) == 0, folder.with_suffix(".log").read_text()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["versions_served"][-1] == NUM_STEPS
    assert summary["canary_max_abs"] < 1e-4
    subprocess.run([sys.executable, "-m", "grpo.cli", "ledger", str(folder), "--check"], check=True)

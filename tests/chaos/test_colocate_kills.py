"""`kill -9` of any program of a co-located run, or of its launcher, at random moments: nothing is left of it, no
process and nothing in /dev/shm, and the next start in the same folder works."""

import os
import random
import re
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from deploy.base_usage import read_usage
from tests.chaos.test_kill_children import END_S, MODULES, Run, expect_nothing_left, kill

pytestmark = [pytest.mark.chaos, pytest.mark.e2e, pytest.mark.alone]

SEED = int(os.environ.get("GRPO_TEST_SEED", "8"))
STARTING_S, TRAINING_S = 8.0, 1.0
"""The moment is at random in as many seconds after the program's start, and after the first step."""
SHARED = Path("/dev/shm")


def inodes() -> dict[int, str]:
    """This user's files in /dev/shm."""
    found = {}
    for file in SHARED.iterdir():
        with suppress(FileNotFoundError):
            status = file.stat()
            if status.st_uid == os.getuid():
                found[status.st_ino] = file.name
    return found


def mapped() -> Iterator[int]:
    """Inodes of files in /dev/shm that some process has in its memory."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            yield from (int(inode) for inode in re.findall(r" (\d+) +/dev/shm/", maps.read_text()))


def expect_nothing_shared(before: dict[int, str], within_s: float) -> None:
    """Returns when no file is left in /dev/shm that was not there before and that no process needs."""
    deadline = time.monotonic() + within_s
    while left := {inode: name for inode, name in inodes().items() if inode not in {*before, *mapped()}}:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def kill_at(run: Run, role: str, rng: random.Random, *, trains: bool) -> None:
    """At a random moment of its start, or of the training."""
    if trains:
        run.until_step(1)
    elif role != "launcher":
        run.until(lambda: run.program(role) is not None)
    time.sleep(rng.uniform(0, TRAINING_S if trains else STARTING_S))
    if role == "launcher":
        run.launcher.kill()
        expect_nothing_left(run.mark, END_S)
    else:
        kill(run.program(role))
        code, errors = run.end()
        assert code == 1
        assert f"error: grpo-{role} was killed by SIGKILL" in errors


@pytest.mark.timeout(420)
def test_killed_at_random_moments_nothing_is_left_and_the_next_start_works(tmp_path: Path) -> None:
    rng, before = random.Random(SEED), inodes()
    roles = rng.sample([*MODULES, "launcher"], k=2)
    options = ("--colocate", "--overwrite_output_dir")
    for number, role in enumerate(roles):
        with closing(Run(tmp_path / "run", *options)) as run:
            kill_at(run, role, rng, trains=number % 2 == 1)
            expect_nothing_shared(before, END_S)
    with closing(Run(tmp_path / "run", *options, "--max_steps", "2")) as run:
        run.launcher.wait(120)
        assert run.end() == (0, "")
        assert read_usage(run.output_dir) is not None
        expect_nothing_shared(before, END_S)

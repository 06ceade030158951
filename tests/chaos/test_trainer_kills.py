"""`kill -9` of the trainer at every call that writes and at random moments: resumed, it comes to the same weights, bit
for bit, and to the same state to go on from."""

import random
import signal
import time
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from tests.chaos.kill_points import DISK_CALLS
from tests.chaos.training import Training, start, training
from tests.trainer.forked import END_S, forks
from tests.trainer.models import save_tiny_model

pytestmark = pytest.mark.chaos

KILLS = [(call, nth) for call in DISK_CALLS if call not in ("unlink", "rmdir") for nth in (2, 9)]
"""Calls of `os`, and at which of them from the start of the trainer: among its first files, and amid the run."""
NUM_RANDOM_KILLS = 6


@pytest.fixture(scope="module")
def context() -> ForkServerContext:
    return forks()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def straight(
    request: pytest.FixtureRequest, context: ForkServerContext, model: Path, tmp_path: Path
) -> Iterator[Training]:
    """A run that nothing interrupts, with the test's optimizer."""
    with training(tmp_path / "straight", model, request.param) as uninterrupted:
        process = start(context, uninterrupted.settings())
        process.join(END_S)
        assert process.exitcode == 0
        yield uninterrupted


def check(interrupted: Training, straight: Training) -> None:
    expected, received = straight.result(), interrupted.result()
    assert received.keys() == expected.keys()
    assert len(expected) == 4  # the version, and of the checkpoint weights, optimizer and average
    assert [name for name in expected if received[name] != expected[name]] == []
    versions = straight.versions()
    assert all(weights == versions[name] for name, weights in interrupted.versions().items())


@pytest.mark.parametrize("straight", ["adamw_8bit"], indirect=True)
def test_kills_at_every_call_one_after_the_other(
    straight: Training, context: ForkServerContext, model: Path, tmp_path: Path
) -> None:
    left = random.Random(straight.optimizer).sample(KILLS, len(KILLS))
    while left:
        with training(tmp_path / f"run_{len(left)}", model, straight.optimizer) as interrupted:
            exit_code, num_kills = -signal.SIGKILL, 0
            while exit_code != 0:
                at = left[0] if left else None  # then to the end
                process = start(context, interrupted.settings(), at)
                process.join(END_S)
                assert process.exitcode in (-signal.SIGKILL, 0)
                exit_code = process.exitcode or 0
                if exit_code != 0:
                    left.pop(0)
                    num_kills += 1
            assert num_kills > 0, f"never came to {left[0]}"
            check(interrupted, straight)


@pytest.mark.parametrize("straight", ["muon"], indirect=True)
def test_kills_at_random_moments(straight: Training, context: ForkServerContext, model: Path, tmp_path: Path) -> None:
    rng = random.Random(straight.optimizer)
    with training(tmp_path / "run", model, straight.optimizer) as interrupted:
        process = start(context, interrupted.settings())
        for _ in range(NUM_RANDOM_KILLS):
            time.sleep(rng.uniform(0.1, 1.0))
            process.kill()
            process.join(END_S)
            assert process.exitcode in (-signal.SIGKILL, 0)
            process = start(context, interrupted.settings())
        process.join(END_S)
        assert process.exitcode == 0
        check(interrupted, straight)

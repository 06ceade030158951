"""Settings of all tests."""

import os

# For tiny tensors a second thread only spins between them, at many times the work itself. Read when torch is imported,
# here and in the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import gc
import logging
import subprocess
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

import hypothesis
import pytest

# Imports and collection make objects that stay; looking through them takes a third of the time.
gc.disable()
# Two shared cores: an example that takes long says nothing about the code. Examples are the same ones each time; others
# are met where somebody looks for them: `pytest --hypothesis-profile=explore`.
PROFILE = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("grpo", derandomize=True, **PROFILE)
hypothesis.settings.register_profile("explore", max_examples=2000, **PROFILE)
hypothesis.settings.load_profile("grpo")
LONG = ("test_first_hour", "test_pipeline", "test_sampling", "test_slurm", "test_recipes", "test_canary_command")
"""Files whose tests take minutes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files whose tests start servers, which compute, are spread among the others, which mostly wait: so the cores are
    busy from the first test to the last one."""
    files = [list(tests) for _, tests in groupby(items, key=lambda item: item.path)]
    heavy = [tests for tests in files if any(item.get_closest_marker("e2e") for item in tests)]
    heavy.sort(key=lambda tests: tests[0].path.stem not in LONG)  # a long one that begins last would end alone
    light = [tests for tests in files if tests not in heavy]
    items[:] = [item for tests in _spread(heavy, light) for item in tests]


def pytest_collection_finish() -> None:
    """What is there stays, and is never looked through."""
    gc.freeze()
    gc.enable()


def _spread(heavy: list[list[pytest.Item]], light: list[list[pytest.Item]]) -> Iterator[list[pytest.Item]]:
    """As many light ones after each heavy one; a few of them are left for the end."""
    each = len(light) // (len(heavy) + 1)
    for number, tests in enumerate(heavy):
        yield tests
        yield from light[number * each : (number + 1) * each]
    yield from light[len(heavy) * each :]


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Keeps what the product itself logs: a library's thread that an earlier file started may log at any moment."""

    def is_ours(record: logging.LogRecord) -> bool:
        return record.name.partition(".")[0] == "grpo"

    caplog.handler.addFilter(is_ours)
    yield caplog
    caplog.handler.removeFilter(is_ours)


@pytest.fixture
def small_disk() -> Iterator[Callable[[Path], None]]:
    """Mounts a disk of 256 KiB at a folder."""
    mounted: list[Path] = []

    def mount(folder: Path) -> None:
        folder.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"mounting a small disk needs privileges that this user lacks: {done.stderr.strip()}")
        mounted.append(folder)

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)

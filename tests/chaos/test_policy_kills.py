"""`kill -9` of the trainer and the orchestrator at every write point: a reader sees a version whole or not at all, and
no version that is in use is ever removed."""

import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from grpo.transport.folders import step_folder
from grpo.transport.weights.store import (
    ADAPTER_FILE,
    CANARY_FILE,
    InUse,
    PolicyPublisher,
    PolicyReader,
    read_in_use,
    verify_policy,
    write_in_use,
)

from tests.chaos.kill_points import DISK_CALLS, start
from tests.chaos.test_transport_kills import wait_for_end
from tests.support import until
from tests.transport.samples import SPEC

pytestmark = pytest.mark.chaos

NUM_VERSIONS = 14
PINNED = frozenset({2, 3})
Work = Callable[[Path], None]


def files(version: int) -> dict[str, bytes]:
    """Large enough to be caught while they are written."""
    return {ADAPTER_FILE: b"%06d" % version * 20_000, CANARY_FILE: b'{"version": %d}' % version}


def train(folder: Path) -> None:
    """A trainer: publishes versions, each when the one before is in use; after a restart, the newest one again."""
    publisher = PolicyPublisher(folder, run_id="run", keep_last=2)
    newest = PolicyReader(folder, run_id="run").latest()
    for version in range(newest or 0, NUM_VERSIONS + 1):
        publisher.publish(version=version, spec=SPEC, files=files(version))
        if version < NUM_VERSIONS:
            until(lambda version=version: newest_in_use(folder) >= version, poll_s=0.001)


def newest_in_use(folder: Path) -> int:
    used = read_in_use(folder, run_id="run")
    return -1 if used is None else used.newest


def orchestrate(folder: Path) -> None:
    """An orchestrator: takes up each version in turn and says so; two versions are pinned for good."""
    reader = PolicyReader(folder, run_id="run")
    used = read_in_use(folder, run_id="run")
    for version in range(0 if used is None else used.newest + 1, NUM_VERSIONS + 1):
        policy = until(partial(reader.poll, version), poll_s=0.001)
        assert policy is not None
        assert policy.small_files[CANARY_FILE] == files(version)[CANARY_FILE]
        pinned = {number for number in PINNED if number <= version}
        write_in_use(folder, InUse(run_id="run", versions=frozenset({version} | pinned), newest=version))


def check(folder: Path) -> None:
    """What is visible is whole, and what was said to be in use is there."""
    used = read_in_use(folder, run_id="run")
    reader = PolicyReader(folder, run_id="run")
    for version in [] if used is None else sorted(used.versions):
        assert reader.poll(version) is not None, f"version {version} is in use and gone"
    newest = reader.latest()
    if newest is not None and reader.poll(newest) is not None:
        _, held = verify_policy(step_folder(folder, newest), run_id="run", version=newest)
        assert held == files(newest)


@pytest.mark.parametrize("nth", [1, 9])
@pytest.mark.parametrize(
    ("work", "call"), [(train, call) for call in DISK_CALLS if call != "replace"] + [(orchestrate, "replace")]
)
def test_a_kill_at_every_call_shows_nobody_half_a_version_and_removes_none_in_use(
    tmp_path: Path, work: Work, call: str, nth: int
) -> None:
    other = orchestrate if work is train else train
    running = {other: start(partial(other, tmp_path)), work: start(partial(work, tmp_path), (call, nth))}
    num_kills, deadline = 0, time.monotonic() + 300
    while running:
        assert time.monotonic() < deadline, f"hangs: {[one.__name__ for one in running]}"
        for one, pid in list(running.items()):
            status = wait_for_end(pid, 0.003)
            if status == 0:
                del running[one]
            elif status is not None:
                assert status == -signal.SIGKILL, f"{one.__name__} ended with {status}"
                num_kills += 1
                check(tmp_path)
                running[one] = start(partial(one, tmp_path))
    assert num_kills == 1, f"never came to {call} for the {nth}. time"
    check(tmp_path)
    reader = PolicyReader(tmp_path, run_id="run")
    there = {version for version in range(NUM_VERSIONS + 1) if reader.poll(version) is not None}
    assert there >= PINNED | {NUM_VERSIONS - 1, NUM_VERSIONS}
    assert not there & {0, 1, 4, 5, 6}
    leftovers = [path.name for path in tmp_path.glob(".step_*")]
    assert leftovers == []

"""Control groups, on a folder that looks like theirs."""

from pathlib import Path

import pytest

from orchestrator.sandbox import Limits
from orchestrator.sandbox.cgroups import Cgroup, find_parent
from orchestrator.sandbox.records import MIB


def hierarchy(root: Path, controllers: str) -> Path:
    parent = root / "user.slice" / "app.slice"
    (parent / "ours.scope").mkdir(parents=True)
    (parent / "cgroup.subtree_control").write_text(controllers)
    (parent / "cgroup.procs").write_text("")
    return parent


@pytest.mark.parametrize(
    ("membership", "controllers", "found"),
    [
        ("0::/user.slice/app.slice/ours.scope\n", "cpu memory pids", True),
        ("4:memory:/x\n0::/user.slice/app.slice/ours.scope\n", "memory pids", True),
        ("0::/user.slice/app.slice/ours.scope\n", "cpu", False),
        ("4:memory:/x\n", "memory pids", False),
        ("0::/\n", "memory pids", False),
        ("0::/elsewhere/ours.scope\n", "memory pids", False),
    ],
)
def test_groups_are_made_beside_the_own_where_memory_and_processes_can_be_limited(
    tmp_path: Path, membership: str, controllers: str, found: bool
) -> None:
    parent = hierarchy(tmp_path, controllers)
    assert find_parent(tmp_path, membership) == (parent if found else None)


def test_a_group_gets_the_programs_limits_with_room_for_its_watcher_and_its_disks(tmp_path: Path) -> None:
    group = Cgroup(tmp_path / "one")
    group.admit(123)
    group.set_limits(Limits(memory_bytes=256 * MIB, disk_bytes=8 * MIB, output_bytes=MIB, processes=5))
    assert (group.path / "cgroup.procs").read_text() == "123"
    # 256 for the program, 64 for the watcher, 8 for each of two disks, 4 times 1 for outputs
    assert (group.path / "memory.max").read_text() == str((256 + 64 + 16 + 4) * MIB)
    assert (group.path / "pids.max").read_text() == "7"

"""Dividing the cores."""

from pathlib import Path

import pytest

from deploy.cores import available_cores, threads_each


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (3, 1), (4, 2), (5, 2), (16, 7), (128, 8)])
def test_server_and_trainer_get_as_much_each_and_from_five_cores_one_is_left(cores: int, threads: int) -> None:
    assert threads_each(cores, 2) == threads


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (6, 1), (7, 2), (128, 8)])
def test_the_server_of_a_teacher_gets_as_much_as_the_other_two(cores: int, threads: int) -> None:
    assert threads_each(cores, 3) == threads


@pytest.mark.parametrize(("text", "most"), [("50000 100000\n", 1), ("garbage", 1 << 20)])
def test_a_containers_quota_limits_the_cores(tmp_path: Path, text: str, most: int) -> None:
    limit = tmp_path / "cpu.max"
    limit.write_text(text)
    assert available_cores(limit) == min(most, available_cores(tmp_path / "absent"))
    limit.write_text("max 100000\n")
    assert available_cores(limit) == available_cores(tmp_path / "absent")

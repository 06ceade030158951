"""A kill -9 of a process that trains; `benchmarks.service_kills` does 36 of every kind."""

import random
from pathlib import Path

import pytest

from benchmarks.service_kills import Loop, differences, run, served

pytestmark = [pytest.mark.service, pytest.mark.chaos, pytest.mark.timeout(900)]


def test_a_loop_with_kills_comes_to_the_bytes_of_one_without(tmp_path: Path) -> None:
    draw, kills, steps = random.Random(1), ["trainer"], {"sft_steps": 2, "rl_steps": 3}
    with served(tmp_path / "service") as service:
        plain, _ = run(Loop(tmp_path / "plain", service, **steps), [], draw, print)
        found, killed = run(Loop(tmp_path / "killed", service, **steps), kills, draw, print)
    assert killed == kills
    assert found["optimizer's steps"] == sum(steps.values())
    assert not differences(plain, found)

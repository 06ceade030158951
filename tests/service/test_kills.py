"""A kill -9 of the server and of its engine; `benchmarks.service_kills` does 36 of every kind."""

import random
from pathlib import Path

import pytest

from benchmarks.service_kills import differences, run

pytestmark = [pytest.mark.service, pytest.mark.chaos, pytest.mark.timeout(1800)]


def test_a_loop_with_kills_comes_to_the_bytes_of_one_without(tmp_path: Path) -> None:
    draw, kills = random.Random(1), ["server", "engine"]
    plain, _ = run(tmp_path / "plain", [], draw, print, sft_steps=4, rl_steps=4)
    found, killed = run(tmp_path / "killed", kills, draw, print, sft_steps=4, rl_steps=4)
    assert killed == dict.fromkeys(kills, 1)
    assert found["optimizer's steps"] == 8
    assert not differences(plain, found)

"""One kill -9 of each kind of process; `benchmarks.service_kills` does 36."""

import random
from pathlib import Path

import pytest

from benchmarks.service_kills import TARGETS, differences, run

pytestmark = [pytest.mark.service, pytest.mark.chaos, pytest.mark.timeout(1800)]


def test_a_loop_with_kills_comes_to_the_bytes_of_one_without(tmp_path: Path) -> None:
    draw, kills = random.Random(1), list(TARGETS)
    draw.shuffle(kills)
    plain, _ = run(tmp_path / "plain", [], draw, print, sft_steps=8, rl_steps=8)
    found, killed = run(tmp_path / "killed", kills, draw, print, sft_steps=8, rl_steps=8)
    assert killed == dict.fromkeys(TARGETS, 1)
    assert found["optimizer's steps"] == 16
    assert not differences(plain, found)

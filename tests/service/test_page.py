"""The scripts of docs/service.md, as people run them, against a real service."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pages import Page
from tests.service.running import Running, running
from tests.service.test_sampling import MODEL

pytestmark = [pytest.mark.service, pytest.mark.e2e]
PAGE = Page("docs/service.md")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("service") / "run", MODEL) as service:
        yield service


def output(service: Running, folder: Path, name: str, *words: str) -> str:
    (folder / name).write_text(PAGE.files[name].replace("Qwen/Qwen3-0.6B", str(MODEL)))
    about = service.about
    where = {"TINKER_BASE_URL": about["base_url"], "TINKER_API_KEY": about["api_key"]}
    command = [sys.executable, name, *words]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | where, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_first_script_learns_and_samples(service: Running, tmp_path: Path) -> None:
    told = output(service, tmp_path, "first.py")
    losses = [float(line.split()[0]) for line in told.splitlines() if re.match(r"[\d.]+ ", line)]
    assert len(losses) == 10
    assert losses[-1] < 0.5 * losses[0]
    assert told.count("stop_reason") == 4


def test_the_loop_raises_its_reward(service: Running, tmp_path: Path) -> None:
    told = output(service, tmp_path, "sums.py", str(MODEL))
    rewards = [float(one) for one in re.findall(r"reward ([\d.]+)", told)]
    assert len(rewards) == 12
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.1
    assert "tinker://" in told

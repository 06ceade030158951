"""A run's versions and a model are evaluated without training, by servers that are started for it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.readme import NUM_STEPS, ROOT

pytestmark = pytest.mark.e2e


def evaluate(*words: str | Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("grpo")
    return subprocess.run(
        [program, "evaluate", *words, "--json"], cwd=ROOT, capture_output=True, text=True, timeout=240
    )


def test_a_version_has_the_figures_that_it_had_in_its_run(first_run: Path) -> None:
    done = evaluate(first_run)
    assert done.returncode == 0, done.stderr
    told, summary = json.loads(done.stdout), json.loads((first_run / "summary.json").read_text())
    assert told["version"] == NUM_STEPS
    for key in ("eval/accuracy", "eval/accuracy_stderr/reverse-text", "eval/num_tokens_mean/reverse-text"):
        assert told["metrics"][key] == pytest.approx(summary["evaluations"][str(NUM_STEPS)][key], abs=0.011)


def test_a_model_has_the_figures_of_version_0(first_run: Path) -> None:
    server = ("--dtype", "float32", "--max_model_len", "128")
    done = evaluate("configs/quickstart/model", "--env", "reverse-text", "--max_tokens", "12", *server)
    assert done.returncode == 0, done.stderr
    before = json.loads((first_run / "summary.json").read_text())["accuracy_before"]
    assert json.loads(done.stdout)["metrics"]["eval/accuracy"] == pytest.approx(before, abs=0.011)

"""The presets of the tiny model, real vLLM included, as their user runs them, for fewer steps."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.orchestrator.sandbox.conftest import why_no_sandbox

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A folder under `configs/`, and what is expected of a short run of it."""

    name: str
    num_steps: int
    gain: float | None = None
    """By how much its accuracy on held-out examples rises at least; None where that is not judged."""
    options: tuple[str, ...] = ()
    """Further words of the command line."""


SHORT = ("--orch.eval.eval_base_model", "false", "--orch.eval.num_examples", "4")
FEW = ("--orch.batch_size", "32")
# The same held-out examples are answered greedily before and after. Where 30 in 100 answers change, the standard error
# of a gain is √(0.3 / 200) = 0.04 with 200 of them, and 0.055 with 100.
PRESETS = (
    Preset(name="zorplex", num_steps=12, gain=0.15, options=("--orch.eval.num_examples", "100")),
    Preset(name="debate", num_steps=2, options=(*SHORT, *FEW)),
    pytest.param(
        Preset(name="critique", num_steps=2, options=(*SHORT, *FEW)),
        marks=pytest.mark.skipif(why_no_sandbox() is not None, reason=str(why_no_sandbox())),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished run."""

    preset: Preset
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    batch_size: int
    output: str


@pytest.fixture(scope="module", params=PRESETS, ids=lambda preset: preset.name)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`grpo configs/NAME`, for a few steps."""
    preset: Preset = request.param
    folder = tmp_path_factory.mktemp(preset.name) / "run"
    command = [sys.executable, "-m", "grpo.cli", f"configs/{preset.name}", "--output_dir", str(folder)]
    command += ["--max_steps", str(preset.num_steps), *preset.options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    settings = json.loads((folder / "run.json").read_text())["programs"]["orch"]["settings"]
    return Run(
        preset=preset,
        summary=json.loads((folder / "summary.json").read_text()),
        metrics=[json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()],
        batch_size=settings["batch_size"],
        output=done.stdout,
    )


def test_all_that_was_asked_for_is_trained_and_as_it_was_sampled(run: Run) -> None:
    summary = run.summary
    assert summary["rollouts_dropped"] == {}
    assert summary["rollouts_trained"] == summary["rollouts_issued"] == run.preset.num_steps * run.batch_size
    assert summary["steps"] == run.preset.num_steps
    assert summary["evaluations_failed"] == 0
    assert summary["canary_max_abs"] < 1e-4
    assert summary["mismatch_max_lag0"] < 1e-4


def test_there_is_something_to_learn_from(run: Run) -> None:
    norms = [line["optim/grad_norm"] for line in run.metrics if "optim/grad_norm" in line]
    assert len(norms) == run.preset.num_steps
    assert min(norms) > 0


def test_accuracy_on_held_out_examples_rises(run: Run) -> None:
    if run.preset.gain is not None:
        assert run.summary["accuracy_after"] > run.summary["accuracy_before"] + run.preset.gain


def test_what_rubrics_measure_is_told_before_and_after(run: Run) -> None:
    if run.preset.name == "zorplex":
        evaluations = run.summary["evaluations"]
        modes = ("success", "wrong_format", "tool_spam", "wrong_answer")
        for version in ("0", str(run.preset.num_steps)):
            shares = [evaluations[version][f"eval/measure/{mode}/zorplex"] for mode in modes]
            assert sum(shares) == pytest.approx(1)
        assert all(mode in run.output for mode in modes)

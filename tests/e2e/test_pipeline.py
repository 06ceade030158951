"""The whole pipeline, real vLLM included, as its user runs it."""

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.readme import NUM_STEPS, ROOT

pytestmark = pytest.mark.e2e

QUICK_START = ROOT / "tests" / "configs" / "quick_start"
"""The files of the reference's quick start, word for word."""


def grpo(*arguments: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
    """Runs `grpo`, in the repository's root."""
    command = [sys.executable, "-m", "grpo.cli", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`; one that is being written is left out."""
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


@pytest.fixture
def run(first_run: Path) -> Path:
    """README.md's own finished run of a few steps, over files; over sockets there is one in test_trainings.py."""
    return first_run


def test_reward_rises_and_so_does_the_accuracy_on_words_never_trained_on(run: Path) -> None:
    rewards = [line["reward/mean"] for line in metrics(run) if "reward/mean" in line]
    assert len(rewards) == NUM_STEPS
    assert statistics.mean(rewards[-5:]) > statistics.mean(rewards[:5]) + 0.1
    summary = json.loads((run / "summary.json").read_text())
    assert 0.25 <= summary["accuracy_before"] <= 0.5
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.1


def test_every_version_was_served_and_nothing_was_dropped(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert summary["versions_served"] == list(range(NUM_STEPS + 1))
    assert summary["rollouts_dropped"] == {}
    assert summary["rollouts_trained"] == summary["rollouts_issued"] == NUM_STEPS * summary_batch_size(run)


def summary_batch_size(run: Path) -> int:
    settings = json.loads((run / "run.json").read_text())["programs"]["orch"]["settings"]
    return int(settings["batch_size"])


def test_the_served_policy_is_the_trained_one(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert summary["canary_max_abs"] < 1e-4
    assert summary["mismatch_max_lag0"] < 1e-4


def test_metrics_logs_and_the_picture_are_there(run: Path) -> None:
    keys = set().union(*metrics(run))
    expected = {"reward/mean", "loss/policy", "policy/kl", "policy/lag_max", "optim/grad_norm", "time/train_s"}
    assert expected <= keys
    assert any(key.startswith("policy/mismatch_kl_lag") for key in keys)
    assert all((run / "logs" / f"{name}.log").stat().st_size > 0 for name in ("infer", "orch", "train"))


def test_the_three_files_of_the_references_quick_start_train(tmp_path: Path) -> None:
    files = [word for role in ("train", "infer", "orch") for word in (f"--{role}", f"{QUICK_START}/{role}.yaml")]
    model = ["--model", "configs/quickstart/model", "--max_steps", "2", "--orch.eval.num_examples", "0"]
    refused = grpo(*files, *model, "--output_dir", str(tmp_path / "fp8"))  # there is no GPU that could
    assert refused.returncode == 2
    assert "recipe = 'fp8_hybrid'" in refused.stderr
    done = grpo(*files, *model, "--output_dir", str(tmp_path / "run"), "--train.recipe", "bf16")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([line for line in metrics(tmp_path / "run") if "reward/mean" in line]) == 2


def test_a_finished_run_is_left_as_it_is_and_with_resume_never_it_is_refused(run: Path) -> None:
    before = (run / "metrics.jsonl").read_bytes()
    refused = grpo("configs/quickstart", "--output_dir", str(run), "--resume", "never")
    fewer = grpo("configs/quickstart", "--output_dir", str(run), "--max_steps", "1")
    assert (refused.returncode, "overwrite_output_dir" in refused.stderr) == (2, True)
    assert fewer.returncode == 0
    assert (run / "metrics.jsonl").read_bytes() == before


def test_an_environment_that_always_raises_ends_the_run_with_its_own_error(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "from grpo import Environment, Rubric\n"
        "def reward(completion, example):\n"
        "    raise RuntimeError('no such column: colour')\n"
        "class Broken(Environment):\n"
        "    rubric = Rubric([reward])\n"
        "    def dataset(self, split):\n"
        "        return [{'prompt': 'a'}]\n"
    )
    environment = json.dumps([{"id": f"{tmp_path / 'broken.py'}:Broken"}])
    done = grpo(
        *("configs/quickstart", "--output_dir", str(tmp_path / "run"), "--max_steps", "3"),
        *("--orch.env", environment, "--orch.eval.eval_base_model", "false"),
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: grpo-orch ended with exit code 1")
    assert "no such column: colour" in done.stderr
    assert "broken.py:Broken" in last

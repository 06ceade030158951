"""A model and an environment of one's own, without a preset: from an empty folder, by the command and from Python."""

import statistics
import sys
from pathlib import Path

import pytest
import yaml

from tests.e2e.runs import PROGRAMS, ROOT, Run, done
from tests.pages import README

pytestmark = pytest.mark.e2e
MODEL = ROOT / "configs/quickstart/model"
ENVIRONMENT = next(block.text for block in README.of("python") if "class CodeWord" in block.text)
NUM_STEPS = 12
# Sizes of two cores; and the embedded model, of 0.8 million parameters, learns at a rate of its own size.
SIZES = {
    "max_tokens": 12,
    "orch.rollouts_per_example": 16,
    "orch.batch_size": 256,
    "train.learning_rate": 1e-3,
    "max_steps": NUM_STEPS,
}
WORDS = [word for key, value in SIZES.items() for word in (f"--{key}", value)]
SCRIPT = f"""
import grpo

WORDS = "garden window butter planet silver market doctor friend mother summer winter yellow castle forest".split()


def right(completion, example):
    return float(completion.strip() == example["answer"])


def short(completion):
    return -0.001 * len(completion)


if __name__ == "__main__":
    rows = [{{"prompt": f"Code: {{word}}", "answer": word[:-5:-1]}} for word in WORDS]
    sizes = {SIZES!r}
    grpo.train({str(MODEL)!r}, dataset=rows, reward=[right, short], **sizes).wait()
"""


def has_learned(run: Run, key: str = "reward/mean") -> None:
    rewards = [line[key] for line in run.steps]
    assert len(rewards) == NUM_STEPS
    # From 0.01 to 0.8 at this rate; where nothing is learned it stays.
    assert rewards[0] < 0.1
    assert statistics.mean(rewards[-3:]) > 0.3
    assert run.summary["rollouts_dropped"] == {}


def test_the_command_trains_a_model_and_an_environment_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "my_env.py").write_text(ENVIRONMENT)
    words = ("--model", MODEL, "--env", "my_env.py:CodeWord")
    planned = yaml.safe_load(done(*words, "--dry-run", cwd=tmp_path))
    assert planned["orch"]["max_steps"] == planned["train"]["max_steps"] == 200
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my_env.py"]
    shown = done(*words, *WORDS, cwd=tmp_path)
    assert "outputs/CodeWord-model" in shown
    has_learned(Run(tmp_path / "outputs/CodeWord-model"))


def test_rows_and_reward_functions_train_a_model_from_python(tmp_path: Path) -> None:
    (tmp_path / "train_rows.py").write_text(SCRIPT)
    done("train_rows.py", cwd=tmp_path, program=PROGRAMS / Path(sys.executable).name)
    run = Run(tmp_path / "outputs/dataset-model")
    has_learned(run, "reward/measure/right/dataset")
    assert run.summary["accuracy_after"] >= run.summary["accuracy_before"]  # of one word

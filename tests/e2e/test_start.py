"""A model and an environment of one's own are planned without a preset, and rows and functions train one from
Python."""

import sys
from pathlib import Path

import pytest
import yaml

from tests.e2e.runs import PROGRAMS, ROOT, Run, done
from tests.pages import README

MODEL = ROOT / "configs/quickstart/model"
ENVIRONMENT = next(block.text for block in README.of("python") if "class CodeWord" in block.text)
NUM_STEPS = 2
SIZES = {"max_tokens": 12, "orch.rollouts_per_example": 16, "orch.batch_size": 64, "max_steps": NUM_STEPS}
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


def test_the_command_plans_a_run_of_a_model_and_an_environment_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "my_env.py").write_text(ENVIRONMENT)
    planned = yaml.safe_load(done("--model", MODEL, "--env", "my_env.py:CodeWord", "--dry-run", cwd=tmp_path))
    assert planned["orch"]["max_steps"] == planned["train"]["max_steps"] == 200
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my_env.py"]


@pytest.mark.e2e
def test_rows_and_reward_functions_train_a_model_from_python(tmp_path: Path) -> None:
    (tmp_path / "train_rows.py").write_text(SCRIPT)
    done("train_rows.py", cwd=tmp_path, program=PROGRAMS / Path(sys.executable).name)
    run = Run(tmp_path / "outputs/dataset-model")
    assert run.summary["rollouts_dropped"] == {}
    assert len(run.steps) == NUM_STEPS
    for step in run.steps:
        assert 0 <= step["reward/measure/right/dataset"] <= 1
        assert step["reward/measure/short/dataset"] < 0

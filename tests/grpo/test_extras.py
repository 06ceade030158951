"""What a laptop run does not need may be absent: each use names the extra that brings it, before anything runs."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from grpo.transport.extras import MODULES
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
FOUND = f"sys.path.append({str(ROOT)!r}); from tests.grpo.run_folder import found"
LIBRARIES = sorted({name.partition(".")[0] for names in MODULES.values() for name in names} - {"opentelemetry"})


def without(libraries: list[str], code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Python in which these libraries cannot be imported."""
    script = f"import sys\nfor name in {libraries}: sys.modules[name] = None\n{code}"
    return subprocess.run([sys.executable, "-c", script], cwd=cwd, capture_output=True, text=True, timeout=120)


def test_programs_are_imported_and_a_dry_run_works_without_any_of_them(tmp_path: Path) -> None:
    code = f"""
import grpo, grpo.orchestrator.run, grpo.trainer.startup, grpo.commands.compare, grpo.environments.rewards
import grpo.environments.data.dataset
for name in grpo.__all__: getattr(grpo, name)
sys.argv = ["grpo", {str(ROOT / "configs/quickstart")!r}, "--dry-run"]
from grpo.cli import main
main()
"""
    done = without([*LIBRARIES, "opentelemetry"], code, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "max_steps" in done.stdout


NEEDING: list[tuple[str, tuple[str, ...]]] = [
    ("wandb", ("--orch.report_to", "wandb")),
    ("tensorboard", ("--orch.report_to", "tensorboard")),
    ("telemetry", ("--orch.report_to", "otlp")),
    ("telemetry", ("--orch.report_to", "prometheus")),
    ("bitsandbytes", ("--train.optimizer", "adamw_8bit")),
    ("bitsandbytes", ("--train.qlora_bnb", "true", "--infer.base_quantization", "nf4")),
    ("openenv", ("--orch.env", '[{"id": "openenv", "args": {"base_url": "http://127.0.0.1:9"}}]')),
    ("games", ("--orch.env", '[{"id": "game", "args": {"game": "kuhn_poker"}}]')),
    ("math", ("--orch.env", '[{"id": "dataset", "args": {"path": "sums.csv", "reward": "math"}}]')),
    ("math", ("--orch.env", '[{"id": "dataset", "args": {"path": "HuggingFaceH4/MATH-500"}}]')),
]
"""An extra, and words of a command line by which a run needs it."""


def test_a_run_that_needs_one_does_not_begin_without_it(tmp_path: Path) -> None:
    (tmp_path / "sums.csv").write_text("prompt,answer\n1+1,2\n")
    program = f"""
sys.path.append({str(ROOT)!r})
from tests.grpo.run_folder import grpo
for _, words in {NEEDING!r}:
    done = grpo({str(ROOT / "configs/quickstart")!r}, *words, "--dry-run")
    print((done.returncode, done.stderr))
"""
    done = without(LIBRARIES, program, tmp_path)
    assert done.returncode == 0, done.stderr
    ends = [ast.literal_eval(line) for line in done.stdout.splitlines()]
    for (extra, words), (code, errors) in zip(NEEDING, ends, strict=True):
        assert (code, f"pip install 'grpo-pipeline[{extra}]'" in errors) == (2, True), (words, errors)


@pytest.mark.parametrize(
    ("extra", "code"),
    [
        (
            "plots",
            f"import grpo, sys, pathlib\n{FOUND}\ngrpo.Run(found(pathlib.Path('run'))).metrics",
        ),
        ("math", "from grpo.environments.rewards import math; math('2', {'answer': '2'})"),
        ("math", "from grpo.environments.rewards import make_reward; make_reward('math')"),
        ("openenv", "import grpo.environments.openenv"),
    ],
)
def test_a_use_from_python_names_the_extra(extra: str, code: str, tmp_path: Path) -> None:
    done = without(LIBRARIES, code, tmp_path)
    assert done.returncode == 1
    assert f"UserError: {done.stderr.rpartition('UserError: ')[2]}" in done.stderr
    assert f"pip install 'grpo-pipeline[{extra}]'" in done.stderr.splitlines()[-1]


def test_a_comparison_is_refused_before_its_first_run(tmp_path: Path) -> None:
    words = ["grpo", "compare", str(ROOT / "configs/quickstart"), "--arm", "a:max_steps=1", "--arm", "b:max_steps=2"]
    done = without(LIBRARIES, f"sys.argv = {words}\nfrom grpo.cli import main\nmain()", tmp_path)
    assert done.returncode == 2
    assert "pip install 'grpo-pipeline[plots]'" in done.stderr
    assert not [*tmp_path.rglob("*")]


def test_each_extra_brings_what_is_looked_for_and_the_core_does_not() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    core = {Requirement(one).name for one in project["dependencies"]}
    for extra in MODULES:
        names = {Requirement(one).name for one in extras[extra]}
        assert names
        assert not names & core
    with_tests = {Requirement(one).name for one in extras["dev"]}
    for extra in MODULES.keys() - {"textarena"}:
        assert {Requirement(one).name for one in extras[extra]} <= with_tests, extra

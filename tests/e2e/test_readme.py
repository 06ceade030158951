"""README.md's commands, run as they stand there; those of a run and of a comparison are in test_pipeline.py."""

import re
import sys
from pathlib import Path

import pytest

from tests.e2e.readme import README, blocks, command
from tests.e2e.runs import PROGRAMS, ROOT, Run, done, grpo

pytestmark = pytest.mark.e2e


def test_the_dry_run_prints_settings_and_loads_nothing(tmp_path: Path) -> None:
    words = command("grpo quickstart --orch.sampling.temperature 0.8")
    ended = grpo("-X", "importtime", PROGRAMS / "grpo", *words, program=Path(sys.executable), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "temperature: 0.8" in ended.stdout
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert "configs.orch" in imported
    assert not {"torch", "transformers", "vllm", "openai"} & imported


def test_the_first_environment_is_learned(tmp_path: Path) -> None:
    (code,) = [block for block in blocks("python") if "class CodeWord" in block]
    (tmp_path / "code_word.py").write_text(code)
    words = command("grpo quickstart --output_dir outputs/code")
    words[words.index("--max_steps") + 1] = "9"
    done(*words, cwd=tmp_path)
    summary = Run(tmp_path / "outputs/code").summary
    assert summary["rollouts_trained"] == summary["rollouts_issued"] == 9 * 256
    # In 15 steps it goes from 0.01 to about 0.9; the mean of 256 rewards has a standard error of at most 0.03.
    assert summary["reward_last"] > summary["reward_first"] + 0.2


def test_every_path_that_the_readme_names_is_there() -> None:
    named = re.findall(r"\]\(([\w/.]+)\)|`((?:deploy|docs)/[\w/.]*)`", README)
    assert len(named) > 20
    assert [path for pair in named for path in pair if not (ROOT / path).exists()] == []

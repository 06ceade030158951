"""README.md's commands, run as they stand there; those of a run and of a comparison are in test_pipeline.py."""

import re
import sys
from pathlib import Path

import pytest
from grpo.orchestrator.rollouts.registry import make_environment

from tests.e2e.readme import README, blocks, command
from tests.e2e.runs import PROGRAMS, ROOT, grpo


def test_the_dry_run_prints_settings_and_loads_nothing(tmp_path: Path) -> None:
    words = command("grpo quickstart --orch.sampling.temperature 0.8")
    ended = grpo("-X", "importtime", PROGRAMS / "grpo", *words, program=Path(sys.executable), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "temperature: 0.8" in ended.stdout
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert "grpo.configs.orch" in imported
    assert not {"torch", "transformers", "vllm", "openai"} & imported


def test_the_first_environment_rewards_its_own_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/python.md has the same, which is learned in test_python.py."""
    (code,) = [block for block in blocks("python") if "class CodeWord" in block]
    (tmp_path / "code_word.py").write_text(code)
    env_id = command("grpo quickstart --output_dir outputs/code")[-1]
    monkeypatch.chdir(tmp_path)
    made = make_environment(env_id, {})
    for split in ("train", "eval"):
        for example in made.dataset(split):
            answer = example["prompt"].removeprefix("Code: ")[-4:][::-1]
            assert sys.modules[type(made).__module__].right(f" {answer} ", example) == 1.0


def test_every_path_that_the_readme_names_is_there() -> None:
    named = re.findall(r"\]\(([\w/.]+)\)|`((?:deploy|docs)/[\w/.]*)`", README)
    assert len(named) > 20
    assert [path for pair in named for path in pair if not (ROOT / path).exists()] == []

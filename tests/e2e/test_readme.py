"""README.md's commands, run as they stand there; those of a run and of a comparison are in test_pipeline.py."""

import sys
from pathlib import Path

import pytest
from grpo.orchestrator.rollouts.registry import make_environment

from tests.e2e.runs import PROGRAMS, grpo
from tests.pages import README


def test_the_dry_run_prints_settings_and_loads_nothing(tmp_path: Path) -> None:
    words = README.command("grpo quickstart --orch.sampling.temperature 0.8")
    ended = grpo("-X", "importtime", PROGRAMS / "grpo", *words, program=Path(sys.executable), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "temperature: 0.8" in ended.stdout
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert "grpo.configs.orch" in imported
    assert not {"torch", "transformers", "vllm", "openai"} & imported


def test_the_first_environment_rewards_its_own_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/python.md has the same, which is trained in test_python.py."""
    [code] = [block.text for block in README.of("python") if "class CodeWord" in block.text]
    (tmp_path / "code_word.py").write_text(code)
    env_id = README.command("grpo quickstart --output_dir outputs/code")[-1]
    monkeypatch.chdir(tmp_path)
    made = make_environment(env_id, {})
    for split in ("train", "eval"):
        for example in made.dataset(split):
            answer = example["prompt"].removeprefix("Code: ")[-4:][::-1]
            assert sys.modules[type(made).__module__].right(f" {answer} ", example) == 1.0

"""A run's last version leaves it: vLLM loads what is exported, and the base and the policy are talked to."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.infer.server_process import running

pytestmark = pytest.mark.e2e

END_S = 240.0


def grpo(*words: object, said: str = "") -> str:
    command = [str(Path(sys.executable).with_name("grpo")), *map(str, words)]
    done = subprocess.run(command, input=said, capture_output=True, text=True, timeout=END_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_vllm_serves_an_exported_model_with_the_policys_numbers(first_run: Path, tmp_path: Path) -> None:
    folder = Path(grpo("export", first_run, "--merged", "--output", tmp_path / "merged").strip())
    newest = max((first_run / "broadcasts").glob("step_*"))
    canary = json.loads((newest / "canary.json").read_text())
    with running(log=tmp_path / "infer.log", model=folder, output_dir=tmp_path / "run", max_model_len=64) as server:
        found = server.answer("/policy/score", version=None, token_ids=canary["token_ids"])["logprobs"]
    assert max(abs(one - other) for one, other in zip(found, canary["logprobs"], strict=True)) < 1e-4


def test_base_and_policy_answer_in_a_terminal(first_run: Path) -> None:
    output = grpo("chat", first_run, said="hello\n")
    answers = output.partition("policy\n")[2].removeprefix("> ")
    assert "  |  " in answers
    assert "no answer" not in answers

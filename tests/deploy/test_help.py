"""The commands answer --help at once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo.cli import COMMANDS
from tests.grpo.run_folder import grpo

TAKE_LONG = {"torch", "transformers", "peft", "vllm", "numpy", "aiohttp", "fastapi", "huggingface_hub", "matplotlib"}


@pytest.mark.parametrize("command", ["grpo", "grpo-infer", "grpo-orch", "grpo-train"])
def test_help_imports_nothing_that_takes_long(command: str) -> None:
    program = Path(sys.executable).with_name(command)
    variables = os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run([program, "--help"], env=variables, capture_output=True, text=True, check=True)
    assert "--dry-run" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "argparse" in imported
    assert not TAKE_LONG & imported


@pytest.mark.parametrize("command", ["grpo", "grpo-infer", "grpo-orch", "grpo-train"])
def test_each_key_has_a_whole_sentence_and_its_alternatives(command: str) -> None:
    program = Path(sys.executable).with_name(command)
    text = subprocess.run([program, "--help"], capture_output=True, text=True, check=True).stdout
    assert "sections:\n\n" not in text
    keys = " ".join(text.split())
    assert command == "grpo-orch" or "--device Where to compute (auto; or cpu, cuda)." in keys
    if command == "grpo-infer":
        assert "`qlora_fp4` (nvfp4) computes with" in keys


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_each_command_begins_as_it_is_described(command: str) -> None:
    text = " ".join(grpo(command, "--help").stdout.split())
    about = COMMANDS[command]
    assert about[1:] in text

"""The commands answer --help at once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TAKE_LONG = {"torch", "transformers", "peft", "vllm", "numpy", "aiohttp", "fastapi", "huggingface_hub", "matplotlib"}


@pytest.mark.parametrize("command", ["grpo", "grpo-infer", "grpo-orch", "grpo-train"])
def test_help_imports_nothing_that_takes_long_and_has_whole_sentences_and_alternatives(command: str) -> None:
    program = Path(sys.executable).with_name(command)
    variables = os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run([program, "--help"], env=variables, capture_output=True, text=True, check=True)
    assert "--dry-run" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "argparse" in imported
    assert not TAKE_LONG & imported
    assert "sections:\n\n" not in done.stdout
    keys = " ".join(done.stdout.split())
    assert command == "grpo-orch" or "--device Where to compute (auto; or cpu, cuda)." in keys
    if command == "grpo-infer":
        assert "`qlora_fp4` (nvfp4) (null; or nf4, fp8, nvfp4)." in keys

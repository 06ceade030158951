"""The first section of docs/environments.md, from its file to a model that has learned it, as it stands there."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.environments_page import commands, write_files
from transport.traces import trace_path

pytestmark = pytest.mark.e2e


def run(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    program, *arguments = shlex.split(line)
    installed = Path(sys.executable).parent / program
    words = [str(installed) if installed.exists() else program, *arguments]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=240)


def test_the_first_environment_is_learned_by_the_command_of_the_page(tmp_path: Path) -> None:
    write_files(tmp_path)
    [training] = commands("grpo quickstart --output_dir outputs/code_word")
    done = run(training, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "outputs/code_word/summary.json").read_text())
    assert summary["steps"] == 15
    assert summary["rollouts_dropped"] == {}
    assert summary["rollouts_trained"] == summary["rollouts_issued"] == 15 * 256
    # It goes from 0.01 to about 0.9; the mean of 256 rewards has a standard error of at most 0.03.
    assert summary["reward_last"] > summary["reward_first"] + 0.3
    assert summary["accuracy_after"] > summary["accuracy_before"]

    first = pq.read_table(trace_path(tmp_path / "outputs/code_word", 1)).to_pylist()[0]
    assert first["env"] == "code-word"
    assert json.loads(first["messages"])[0]["content"].startswith("Code: ")

    [asking] = commands("grpo ledger ")
    ledger = run(asking, tmp_path)
    assert ledger.returncode == 0, ledger.stderr
    assert "3,840" in ledger.stdout

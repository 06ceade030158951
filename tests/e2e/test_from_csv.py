"""docs/from_csv.md as it stands there: from a CSV to a model that transformers loads."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e
PAGE = (Path(__file__).parents[2] / "docs" / "from_csv.md").read_text()


def test_the_page_leads_to_a_model_that_has_learned(tmp_path: Path) -> None:
    for name, text in re.findall(r'^```\w+ title="([\w.]+)"\n(.*?)^```', PAGE, flags=re.M | re.S):
        (tmp_path / name).write_text(text)
    for line in re.findall(r"^```sh\n(.*?)\n```", PAGE, flags=re.M | re.S):
        program, *words = shlex.split(line.replace("--max_steps 15", "--max_steps 8"))  # enough to see that it learns
        run(str(Path(sys.executable).with_name(program)), *words, cwd=tmp_path)
    summary = json.loads((tmp_path / "outputs/codes/summary.json").read_text())
    assert summary["rollouts_dropped"] == {}
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.2
    answer = run(sys.executable, "ask.py", cwd=tmp_path).strip()
    assert 2 <= len(answer) <= 8, answer


def run(*words: str, cwd: Path) -> str:
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout

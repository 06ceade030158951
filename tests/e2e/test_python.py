"""`grpo.train` in a notebook's kernel, with an environment from its cells and a live curve; docs/python.md's script."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

pytestmark = pytest.mark.e2e
PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
CELLS = (
    "import grpo\nfrom grpo import Environment, Rubric\nWORDS = 'garden window butter planet silver market'.split()",
    "def right(completion, example):\n    return float(completion.strip() == example['answer'])",
    "class CodeWord(Environment):\n    rubric = Rubric([right])\n\n"
    "    def __init__(self, letters):\n        self.letters = letters\n\n"
    "    def dataset(self, split):\n"
    "        return [{'prompt': f'Code: {word}', 'answer': word[: -self.letters - 1 : -1]} for word in WORDS]",
    "run = grpo.train('quickstart', env=CodeWord(4), steps=2, orch={'batch_size': 32}, output_dir='outputs/o')",
    "run.wait()",
    "print(run, len(run.metrics), len(run.evaluations), len(run.rollouts(2)), run.summary['steps'])",
    "run.plot()",
    "print(sorted(path.name for path in run.export('exported', step=1).iterdir())[:2])",
    "grpo.train('quickstart', env=CodeWord(3), steps=2, orch={'batch_size': 32}, output_dir='outputs/o')",
)


def test_an_environment_of_a_cell_is_trained_while_its_curve_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setattr("jupyter_client.manager.KernelManager.kernel_spec", _kernel())
    cells = [nbformat.v4.new_code_cell(cell) for cell in CELLS]  # type: ignore[no-untyped-call]
    notebook = nbformat.v4.new_notebook(cells=cells)  # type: ignore[no-untyped-call]
    client = NotebookClient(
        notebook,
        timeout=240,
        allow_errors=True,
        kernel_manager_class=AsyncKernelManager,
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    outputs: list[list[Any]] = [cell.outputs for cell in notebook.cells]
    assert [one.get("output_type") for some in outputs[:8] for one in some if one.output_type == "error"] == []
    assert "image/png" in outputs[4][0].data
    assert "ended, step 2" in outputs[5][0].text
    assert outputs[5][0].text.split("> ")[1] == "2 2 32 2\n"
    assert "image/png" in outputs[6][0].data
    assert outputs[7][0].text == "['README.md', 'adapter_config.json']\n"
    assert outputs[8][0].ename == "RunFailed"  # a run of other settings is there
    assert "letters" in outputs[8][0].evalue


def _kernel() -> KernelSpec:
    """This interpreter's, whatever kernels are installed here."""
    return KernelSpec(argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"])


def test_the_pages_script_trains_and_its_run_is_opened_again(tmp_path: Path) -> None:
    script, opened, *_ = re.findall(r"^```python.*?\n(.*?)^```", PAGE, flags=re.M | re.S)
    (tmp_path / "script.py").write_text(script.replace("steps=20", "steps=2"))
    (tmp_path / "opened.py").write_text(f"import grpo\n{opened.replace('(20)', '(2)')}")
    for name in ("script.py", "opened.py"):
        done = subprocess.run([sys.executable, name], cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "Code: " in done.stdout

"""docs/python.md's lines as cells of a notebook: `grpo.train` in its kernel, with an environment from its cells and a
live curve. That such words are learned: test_from_csv.py."""

import sys
import textwrap
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

from tests.pages import Page
from tests.support import END_S

pytestmark = pytest.mark.e2e
SCRIPT, _, OPENED, *_ = (block.text for block in Page("docs/python.md").blocks if block.language == "python")
DEFINITIONS, _, MAIN = SCRIPT.partition('if __name__ == "__main__":\n')
TRAIN, WAIT, *PRINTS = textwrap.dedent(MAIN).splitlines()
NUM_STEPS, BATCH_SIZE = 3, 32
SMALL = TRAIN.replace("steps=20", f"steps={NUM_STEPS}, orch__batch_size={BATCH_SIZE}")
ASKED = "print(run, len(run.metrics), len(run.evaluations), len(run.rollouts(2)), run.summary['steps'])"
EXPORT = "print(sorted(path.name for path in run.export('exported', step=2).iterdir())[:2])"
OWN = "import configs, orchestrator, trainer, transport; print(configs.MINE, trainer.MINE)"
OTHER = SMALL.replace("letters=4", "letters=3")
CELLS = (
    OWN,
    *DEFINITIONS.strip().split("\n\n\n"),
    SMALL,
    WAIT,
    *PRINTS,
    OPENED.replace("(20)", f"({NUM_STEPS})"),
    ASKED,
    EXPORT,
    OTHER,
)


def test_an_environment_of_a_cell_is_trained_while_its_curve_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    # This interpreter's kernel, whatever kernels are installed here.
    spec = KernelSpec(argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"])
    monkeypatch.setattr("jupyter_client.manager.KernelManager.kernel_spec", spec)
    cells = [nbformat.v4.new_code_cell(cell) for cell in CELLS]  # type: ignore[no-untyped-call]
    # Modules of a person's own, which have the names of our folders.
    for name in ("configs", "orchestrator", "trainer", "transport"):
        (tmp_path / f"{name}.py").write_text(f"MINE = 'my {name}'")
    notebook = nbformat.v4.new_notebook(cells=cells)  # type: ignore[no-untyped-call]
    client = NotebookClient(
        notebook,
        timeout=int(END_S),
        startup_timeout=int(END_S),
        allow_errors=True,
        kernel_manager_class=AsyncKernelManager,
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    outputs: dict[str, list[Any]] = {cell.source: cell.outputs for cell in notebook.cells}
    failed = [cell for cell, shown in outputs.items() if any(one.output_type == "error" for one in shown)]
    assert failed == [OTHER], outputs
    assert outputs[OWN][0].text == "my configs my trainer\n"
    assert "image/png" in outputs[WAIT][0].data
    assert "Code: " in outputs[OPENED.replace("(20)", f"({NUM_STEPS})")][0].text
    assert f"ended, step {NUM_STEPS}" in outputs[ASKED][0].text
    assert outputs[ASKED][0].text.split("> ")[1] == f"{NUM_STEPS} 2 {BATCH_SIZE} {NUM_STEPS}\n"
    assert outputs[EXPORT][0].text == "['README.md', 'adapter_config.json']\n"
    assert outputs[OTHER][0].ename == "RunFailed"  # a run of other settings is there
    assert "letters" in outputs[OTHER][0].evalue

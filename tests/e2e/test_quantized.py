"""The quickstart on a quantized base and one copy of its values: the server has the trainer's numbers. A quantized base
of which each has a copy is in test_inflight_updates.py."""

from pathlib import Path

import pytest

from tests.e2e.runs import trained
from transport.weights.dequantized import FOLDER

pytestmark = pytest.mark.e2e


def test_the_quickstart_learns_on_a_quantized_base_and_its_canaries_agree(tmp_path: Path) -> None:
    words = ("--max_steps", "6", "--train.qlora_fp8", "true", "--colocate", "--orch.eval.num_examples", "100")
    run = trained("configs/quickstart", tmp_path / "run", *words)
    assert run.summary["accuracy_after"] > run.summary["accuracy_before"] + 0.08
    assert run.summary["canary_max_abs"] < 1e-4
    assert (run.folder / FOLDER / "STABLE").exists()

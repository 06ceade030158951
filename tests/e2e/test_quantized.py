"""The quickstart on a quantized base: the server has the trainer's numbers, apart and on one copy."""

from pathlib import Path

import pytest

from tests.e2e.runs import trained
from transport.weights.dequantized import FOLDER

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(("setting", "more"), [("qlora_bnb", ()), ("qlora_fp8", ("--colocate",))])
def test_the_quickstart_learns_on_a_quantized_base_and_its_canaries_agree(
    tmp_path: Path, setting: str, more: tuple[str, ...]
) -> None:
    words = ("--max_steps", "6", f"--train.{setting}", "true", "--orch.eval.num_examples", "100", *more)
    run = trained("configs/quickstart", tmp_path / "run", *words)
    assert run.summary["accuracy_after"] > run.summary["accuracy_before"] + 0.08
    assert run.summary["canary_max_abs"] < 1e-4
    assert (run.folder / FOLDER / "STABLE").exists()

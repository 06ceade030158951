"""Models whose layers have other names than Llama's, through all programs with the default adapter."""

import json
from pathlib import Path

import pytest
from grpo.transport.records import Canary, PolicyManifest

from tests.e2e.runs import trained
from tests.support import options
from tools.random_models import make_small

pytestmark = pytest.mark.e2e

SHORT: dict[str, object] = {
    "max_steps": 1,
    "orch.batch_size": 32,
    "orch.eval.num_examples": 0,
    # Random models are seldom right, and groups of equal rewards teach nothing.
    "train.loss.entropy_tau": 0.01,
}


@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("phi3", {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}),
        (
            "granitemoehybrid",
            {"q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "out_proj", "input_linear", "output_linear"},
        ),
    ],
)
def test_a_type_with_layers_of_its_own_is_trained_and_served(tmp_path: Path, kind: str, targets: set[str]) -> None:
    model = make_small(tmp_path / "model", kind)
    run = trained("configs/quickstart", tmp_path / "run", "--model", model, *options(SHORT))
    assert len(run.steps) == 1
    version = run.folder / "broadcasts/step_000001"
    assert set(json.loads((version / "adapter_config.json").read_text())["target_modules"]) == targets
    assert set(PolicyManifest.from_json((version / "manifest.json").read_bytes()).spec.target_modules) == targets
    assert not Canary.from_json((version / "canary.json").read_bytes()).is_zero

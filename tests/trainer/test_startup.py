"""A server that ends while the model is loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.bench import settings_for
from tests.trainer.exported import imported
from tests.trainer.models import save_tiny_model
from trainer.distributed import ONE
from trainer.errors import ExporterGone
from trainer.startup import policy_for


@pytest.mark.parametrize("lives", [True, False])
def test_a_server_that_ends_while_its_base_is_loaded_has_ended_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lives: bool
) -> None:
    base = imported(save_tiny_model(tmp_path / "model"))

    def fail(*_: Any, **__: Any) -> None:
        object.__setattr__(base, "lives", lives)
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr("trainer.startup.load_policy", fail)
    with pytest.raises(RuntimeError if lives else ExporterGone):
        policy_for(settings_for(tmp_path), tmp_path, torch.device("cpu"), ONE, imported=base)

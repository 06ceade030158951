"""A server that ends while the model is loaded, and how many threads there are."""

from pathlib import Path
from typing import Any

import pytest
import torch
from grpo.trainer import startup
from grpo.trainer.errors import ExporterGone
from grpo.trainer.model import load_policy

from tests.trainer.bench import settings_for
from tests.trainer.exported import imported
from tests.trainer.models import save_tiny_model


@pytest.mark.parametrize("lives", [True, False])
def test_a_server_that_ends_while_its_base_is_loaded_has_ended_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lives: bool
) -> None:
    base = imported(save_tiny_model(tmp_path / "model"))

    def fail(*_: Any, **__: Any) -> None:
        object.__setattr__(base, "lives", lives)
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr("grpo.trainer.model._loaded", fail)
    with pytest.raises(RuntimeError if lives else ExporterGone):
        load_policy(settings_for(tmp_path), tmp_path, torch.device("cpu"), imported=base)


@pytest.mark.parametrize(
    ("cores", "num_threads", "num_ranks", "expected"), [(3, None, 1, 3), (8, None, 2, 2), (1, None, 4, 1), (1, 2, 1, 2)]
)
def test_threads_are_a_ranks_share_of_the_cores_that_may_be_used(
    monkeypatch: pytest.MonkeyPatch, cores: int, num_threads: int | None, num_ranks: int, expected: int
) -> None:
    monkeypatch.setattr(startup, "available_cores", lambda: cores)
    before = torch.get_num_threads()
    torch.set_num_threads(4)  # what torch would take
    try:
        startup.set_threads(num_threads, num_local_ranks=num_ranks)
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)

"""The trainer's device, and a server that ends while the model is loaded."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.bench import settings_for
from tests.trainer.exported import imported
from tests.trainer.models import save_tiny_model
from trainer.distributed import ONE
from trainer.errors import ExporterGone
from trainer.startup import device_for, policy_for


@pytest.mark.parametrize(
    ("listed", "setting", "for_cuda", "warned"),
    [
        ("7", "auto", True, True),
        ("7", "auto", False, False),  # a build of torch for CPUs
        ("7", "cpu", True, False),
        ("", "auto", True, False),
        ("-1", "auto", True, False),
        (None, "auto", True, False),
    ],
)
def test_a_gpu_that_is_listed_and_not_found_is_told_before_the_cpu_is_taken(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    listed: str | None,
    setting: str,
    for_cuda: bool,
    warned: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: for_cuda)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if listed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert device_for(setting) == torch.device("cpu")
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert ["CUDA_VISIBLE_DEVICES" in line for line in said] == [True] * warned


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

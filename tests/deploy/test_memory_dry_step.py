"""A step on made-up tokens, and what it is said to allocate."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.train import TrainSettings
from deploy.memory.dry_step import DryStepError, _allocated_on_cpu, batches, main, measure
from deploy.memory.estimate import MIB, estimate
from deploy.memory.shapes import ModelShape
from tests.tiny_models import make_tiny_random
from trainer.batch import check_step, check_totals

LOSSES: dict[str, dict[str, Any]] = {
    "policy": {},
    "teacher": {"teacher_tau": 0.5},
    "hints": {"alpha_sdpo": 0.1},
    "pairs": {"beta_replay": 0.1},
    "all": {"teacher_tau": 0.5, "alpha_sdpo": 0.1, "beta_replay": 0.1},
}


def settings(**changes: Any) -> TrainSettings:
    return TrainSettings(model="tiny", **({"device": "cpu", "recipe": "fp32", "num_threads": 1} | changes))


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_the_made_up_batches_are_ones_that_the_trainer_takes(loss: dict[str, Any]) -> None:
    chosen = settings(loss=loss, sequence_len=40)
    made = batches(chosen, num_tokens=40, vocab_size=50)
    counts = check_step(made, sequence_len=40, vocab_size=50, settings=chosen.loss)
    assert (counts.loss_tokens, counts.hint_tokens, counts.pairs) == (
        2 * 39,
        2 * 39 if chosen.loss.alpha_sdpo else 0,
        2 if chosen.loss.beta_replay else 0,
    )
    stated = [replace(one, num_hint_tokens=counts.hint_tokens, num_pairs=counts.pairs) for one in made]
    check_totals(stated, counts, chosen.loss)


def test_allocations_are_counted_to_the_byte() -> None:
    def step() -> None:
        first = torch.empty(8 * MIB, dtype=torch.uint8)
        second = torch.empty(4 * MIB, dtype=torch.uint8)
        del first
        third = torch.empty(2 * MIB, dtype=torch.uint8)
        del second, third

    assert _allocated_on_cpu(step) == 12 * MIB


def test_a_dry_step_of_a_real_model_is_near_its_estimate(tmp_path: Path) -> None:
    folder, loss = make_tiny_random(tmp_path / "model"), LOSSES["all"] | {"sdpo": {"teacher": "ema"}}
    chosen = settings(sequence_len=512, gpus=2, zero_level=2, loss=loss)
    need = estimate(chosen, ModelShape.of_folder(folder), device="cpu")
    measured = measure(chosen, folder, timeout_s=200)
    assert need.step == pytest.approx(measured.allocated, rel=0.1)
    assert measured.held > measured.allocated


def test_a_model_that_cannot_be_trained_is_told_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("sys.argv", ["dry_step", str(tmp_path)])
    monkeypatch.setattr("sys.stdin", io.StringIO(settings().model_dump_json()))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("error: the base model in")


def test_the_reason_of_a_process_that_fails_is_its_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho one >&2\necho error: another >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    with pytest.raises(DryStepError, match=r"ended with exit status 1: error: another$"):
        measure(settings(), tmp_path, timeout_s=30)
    python.write_text("#!/bin/sh\necho GPU $CUDA_VISIBLE_DEVICES >&2\nexit 1\n")
    with pytest.raises(DryStepError, match=r"GPU 3$"):
        measure(settings(), tmp_path, timeout_s=30, environment={"CUDA_VISIBLE_DEVICES": "3"})


def test_a_dry_step_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with pytest.raises(DryStepError, match=r"longer than 0.01 s; lower sequence_len"):
        measure(settings(), tmp_path, timeout_s=0.01)

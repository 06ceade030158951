"""How a GPU is divided between trainer and server: what a dry step measures, and what follows from it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo.configs.defaults import GIB
from grpo.configs.facts import Hardware
from grpo.configs.run import load_run
from grpo.configs.train import TrainSettings
from grpo.deploy.memory import NoRoom, measure, utilization, with_split
from grpo.deploy.plan import resolve
from grpo.trainer.batch import check_step
from grpo.trainer.dry_step import Measurement, batches
from grpo.trainer.memory import checkpointing_kinds
from grpo.transport.errors import UserError

from tools.random_models import TINY, make_random

ALL_LOSSES = {"teacher_tau": 0.5, "alpha_sdpo": 0.1, "beta_replay": 0.1}
FOUND = Measurement(
    checkpointing="selective",
    total=80 * GIB,
    in_step=28 * GIB,  # 8 of base, 5 that stay, 15 of the step
    between=13 * GIB,
    base=8 * GIB,
    kv=GIB // 4096,
    longest=32768,
)


def settings(**changes: Any) -> TrainSettings:
    return TrainSettings(model="tiny", **({"device": "cpu", "recipe": "fp32", "num_threads": 1} | changes))


def test_the_dry_steps_batches_are_ones_that_the_trainer_takes() -> None:
    chosen = settings(loss=ALL_LOSSES, sequence_len=16, micro_batch_tokens=40)
    made = batches(chosen, num_tokens=40, vocab_size=50)
    check_step(made, sequence_len=16, pack_tokens=40, vocab_size=50, settings=chosen.loss)


def test_a_dry_step_measures_a_real_step(tmp_path: Path) -> None:
    folder = make_random(tmp_path / "model", TINY)
    found = measure(settings(sequence_len=512, loss=ALL_LOSSES), folder)
    assert found.in_step - found.between > 512 * TINY["hidden_size"] * TINY["num_hidden_layers"] * 4
    size = (folder / "model.safetensors").stat().st_size
    assert 0.95 * size < found.base < 1.05 * size
    assert found.kv == 2 * 4 * 2 * 32 * 4  # keys and values, layers, heads, their size, float32
    assert found.longest == TINY["max_position_embeddings"]
    assert found.checkpointing == "none"


def test_the_server_gets_nine_tenths_of_what_the_trainer_leaves_the_base_included() -> None:
    # 80 - (28 - 8) = 60 GiB are left in a step, 75 between steps.
    assert utilization(FOUND, max_model_len=4096, sleep_mode=False, colocate=True) == 0.675
    assert utilization(FOUND, max_model_len=4096, sleep_mode=True, colocate=True) == 0.843  # 0.84375
    # Of two copies the trainer's stays its own: 80 - 28 = 52 GiB.
    assert utilization(FOUND, max_model_len=4096, sleep_mode=False, colocate=False) == 0.585


@pytest.mark.parametrize(
    ("found", "num_tokens", "sleeps"),
    [
        (replace(FOUND, total=30 * GIB), None, False),
        (FOUND, 200_000, False),
        (replace(FOUND, in_step=80 * GIB), 128, True),
    ],
)
def test_a_server_that_leaves_no_room_or_has_none_is_refused_with_remedies(
    found: Measurement, num_tokens: int | None, sleeps: bool
) -> None:
    with pytest.raises(NoRoom, match="gradient_checkpointing"):
        utilization(found, max_model_len=num_tokens, sleep_mode=sleeps, colocate=True)


@pytest.mark.parametrize(("measured", "setting"), [("none", False), ("selective", "selective"), ("full", True)])
def test_server_and_trainer_get_what_was_measured_as_settings(measured: Any, setting: Any) -> None:
    run = load_run(
        "configs/quickstart", ["--colocate", "--infer.max_model_len", "4096"], hardware=Hardware(gpus=("0",))
    )
    found = replace(FOUND, checkpointing=measured)
    after, line = with_split(resolve(run), Path("model"), dry_step=lambda *_: found)
    assert after.infer.gpu_memory_utilization == 0.675
    assert "gpu_memory_utilization" in after.infer.model_fields_set
    assert after.train.gradient_checkpointing == setting
    assert checkpointing_kinds(after.train, torch.device("cuda")) == (measured,)
    assert "20.00 GiB" in line


def test_a_server_that_gets_too_little_makes_the_trainer_keep_less() -> None:
    run = load_run("configs/quickstart", ["--colocate"], hardware=Hardware(gpus=("0",)))
    kinds = list[Any]()

    def dry_step(train: TrainSettings, _: Path) -> Measurement:
        kinds.append(train.gradient_checkpointing)
        full = train.gradient_checkpointing is True
        return replace(
            FOUND, total=24 * GIB, in_step=(14 if full else 22) * GIB, checkpointing="full" if full else "selective"
        )

    after, _ = with_split(resolve(run), Path("model"), dry_step=dry_step)
    assert (kinds, after.train.gradient_checkpointing) == ([None, True], True)
    fixed = load_run(
        "configs/quickstart", ["--colocate", "--train.gradient_checkpointing=selective"], hardware=run.hardware
    )
    with pytest.raises(NoRoom):
        with_split(resolve(fixed), Path("model"), dry_step=dry_step)


@pytest.mark.parametrize(
    ("said", "kind"), [("error: no such layer", UserError), ("error: CUDA out of memory. Tried", NoRoom)]
)
def test_a_dry_step_that_fails_says_why(
    said: str, kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    with pytest.raises(kind, match=said.removeprefix("error: ")):
        measure(settings(), tmp_path)

"""What server and trainer of a co-located run get of their device."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from configs.train import TrainSettings
from deploy.arguments import parse
from deploy.gpus import VisibleGpus
from deploy.memory.device import DeviceError, DeviceMemory
from deploy.memory.dry_step import DryStep
from deploy.memory.estimate import GIB, estimate
from deploy.memory.shapes import ModelShape, ShapeError
from deploy.memory.split import NoRoom
from deploy.plan import Plan, resolve
from deploy.room import with_room

PRESET = "configs/quickstart"
MODEL = Path(PRESET) / "model"
SHAPE = ModelShape.of_folder(MODEL)


def plan(*argv: str) -> Plan:
    return resolve(parse([PRESET, "--colocate", *argv]))


def gpu_of(gib: float, asked: list[str | None] | None = None) -> dict[str, Any]:
    """One of so many GiB, all free, and a dry step that held 1 GiB; `asked` takes what is visible to each."""
    asked = [] if asked is None else asked

    def dry_step(train: TrainSettings, folder: Path, environment: Mapping[str, str]) -> DryStep:
        assert folder == MODEL
        asked.append(environment.get("CUDA_VISIBLE_DEVICES"))
        return DryStep(allocated=GIB // 2, held=GIB)

    def memory(environment: Mapping[str, str]) -> DeviceMemory:
        asked.append(environment.get("CUDA_VISIBLE_DEVICES"))
        return DeviceMemory(total=int(gib * GIB), free=int(gib * GIB))

    return {"gpu": True, "memory": memory, "dry_step": dry_step}


def test_on_a_cpu_the_need_is_told_and_nothing_is_divided() -> None:
    before = plan("--train.device", "cpu")
    after, lines = with_room(before, MODEL, gpu=False)
    assert after == before
    text = "\n".join(lines)
    assert "base weights of its own                              0.0 MiB" in text
    saved = SHAPE.num_parameters * 4 / 2**20
    assert f"base weights saved by sharing{saved:>27.1f} MiB" in text


def test_on_a_gpu_the_server_gets_what_a_dry_step_leaves() -> None:
    train = plan().train
    estimated = estimate(train, SHAPE, device="cuda", shared="all")
    need = estimated.total - estimated.step + GIB
    after, lines = with_room(plan(), MODEL, **gpu_of(24))
    assert after.infer.gpu_memory_utilization == pytest.approx(0.9 * (24 * GIB - need) / (24 * GIB), abs=0.001)
    assert "gpu_memory_utilization" in after.infer.model_fields_set
    assert any(line.endswith(f"{'1.00 GiB':>12}") and line.startswith("a step") for line in lines)
    assert f"server: gpu_memory_utilization {after.infer.gpu_memory_utilization:g}, by itself" in "\n".join(lines)


def test_the_dry_step_and_the_driver_are_asked_of_the_gpu_that_both_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    arguments = parse([PRESET, "--colocate", "--train_gpus", "1"])
    asked: list[str | None] = []
    with_room(resolve(arguments, visible=VisibleGpus(names=("4", "6"), listed=True)), MODEL, **gpu_of(24, asked))
    assert asked == ["6", "6"]
    asked.clear()
    with_room(plan(), MODEL, **gpu_of(24, asked))
    assert asked == ["4,6", "4,6"]


def test_in_turns_the_server_gets_the_memory_of_the_step_too() -> None:
    taking = plan("--sleep_mode", "--orch.max_async_level", "0")
    estimated = estimate(taking.train, SHAPE, device="cuda", shared="all")
    after, lines = with_room(taking, MODEL, **gpu_of(24))
    share = 0.9 * (24 * GIB - estimated.stays) / (24 * GIB)
    assert after.infer.gpu_memory_utilization == pytest.approx(share, abs=0.001)
    assert any(line.startswith("  of it gained by taking turns") and line.endswith("0.90 GiB") for line in lines)


def test_a_share_that_the_user_set_is_kept_and_no_dry_step_is_made() -> None:
    chosen = plan("--infer.gpu_memory_utilization", "0.95")
    after, lines = with_room(chosen, MODEL, **gpu_of(24) | {"dry_step": None})
    assert after.infer == chosen.infer
    assert "0.95, as infer.yaml says" in "\n".join(lines)
    assert lines[-1].startswith("warning: trainer and server together exceed what is free")


def test_where_the_driver_tells_nothing_a_share_that_the_user_set_is_taken_as_it_is() -> None:
    def silent(environment: Mapping[str, str]) -> DeviceMemory:
        raise DeviceError("nvidia-smi does not tell it: no such file; set gpu_memory_utilization (infer.yaml) yourself")

    chosen = plan("--infer.gpu_memory_utilization", "0.5")
    after, lines = with_room(chosen, MODEL, **gpu_of(24) | {"memory": silent})
    assert after == chosen
    assert lines[-1] == "whether both have room is not known: nvidia-smi does not tell it: no such file"
    with pytest.raises(DeviceError):
        with_room(plan(), MODEL, **gpu_of(24) | {"memory": silent})


def test_where_nothing_is_left_for_the_server_the_run_is_refused() -> None:
    with pytest.raises(NoRoom, match=r"the trainer needs .*gradient_checkpointing: true"):
        with_room(plan(), MODEL, **gpu_of(4))


def test_a_model_whose_need_is_unknown_is_refused_only_where_the_share_depends_on_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3"}))
    with pytest.raises(ShapeError, match="set gpu_memory_utilization"):
        with_room(plan(), tmp_path, **gpu_of(24))
    told = ("the trainer's memory is not estimated: model_type is 'gemma3', and memory is estimated for",)
    for options in ({"gpu": False}, gpu_of(24)):
        one = plan() if not options["gpu"] else plan("--infer.gpu_memory_utilization", "0.5")
        after, lines = with_room(one, tmp_path, **options)
        assert after == one
        assert lines[0].startswith(told)

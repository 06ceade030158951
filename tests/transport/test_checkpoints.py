"""Checkpoints decide where a run goes on, and a run can go back to an earlier one."""

import json
from pathlib import Path

import pytest

from tests.transport.samples import damage, micro_batch
from transport.batches.store import StepStore
from transport.checkpoints import TRAINER, Checkpoints
from transport.codec import encode
from transport.errors import RunFolderError
from transport.folders import step_folder, write_folder
from transport.run import RunFolder, create_run, only_one


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return create_run(tmp_path / "run")


def trainer_writes(run: RunFolder, *steps: int) -> None:
    for step in steps:
        folder = step_folder(run.checkpoints, step) / TRAINER
        about = json.dumps({"step": step, "run_id": run.run_id}).encode()
        write_folder(folder, {"weights": b"w"}, lambda _, about=about: about)  # type: ignore[misc]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_going_back_sets_aside_what_came_later_once(run: RunFolder) -> None:
    checkpoints = Checkpoints(run)
    trainer_writes(run, 2, 4)
    for folder in (run.batches, run.broadcasts):
        for step in (2, 3, 5):
            step_folder(folder, step).mkdir()
    checkpoints.go_back_to(2, role="orch")
    checkpoints.go_back_to(2, role="train")
    assert names(run.batches) == names(run.broadcasts) == names(run.checkpoints) == ["step_000002"]
    [aside] = run.superseded.iterdir()
    assert names(aside / "batches") == names(aside / "broadcasts") == ["step_000003", "step_000005"]
    assert names(aside / "checkpoints") == ["step_000004"]


def test_a_step_without_a_checkpoint_is_refused_with_those_that_have_one(run: RunFolder) -> None:
    with pytest.raises(RunFolderError, match="resume_step"):
        Checkpoints(run).go_back_to(3, role="train")
    trainer_writes(run, 2, 4)
    with pytest.raises(RunFolderError, match=r"\[2, 4\]"):
        Checkpoints(run).go_back_to(3, role="train")


def test_nobody_goes_back_while_the_other_program_is_at_work(run: RunFolder) -> None:
    trainer_writes(run, 2, 4)
    with only_one(run.path, "orch"):
        with pytest.raises(RunFolderError, match="grpo-orch"):
            Checkpoints(run).go_back_to(2, role="train")
        Checkpoints(run).go_back_to(4, role="train")
    Checkpoints(run).go_back_to(2, role="train")
    assert Checkpoints(run).steps() == [2]


def test_a_damaged_batch_and_what_it_gave_are_set_aside(run: RunFolder) -> None:
    store = StepStore(run.batches, run_id=run.run_id)
    for step in (1, 2, 3):
        store.write(step, [encode([micro_batch(run_id=run.run_id, step=step)])])
        step_folder(run.broadcasts, step).mkdir()
    assert Checkpoints(run).settle() == 3
    damage(step_folder(run.batches, 2) / "rank_0.msgpack", "flip")
    with only_one(run.path, "train"), pytest.raises(RunFolderError, match="grpo-train"):
        Checkpoints(run).settle()
    assert Checkpoints(run).settle() == 1
    assert names(run.batches) == names(run.broadcasts) == ["step_000001"]

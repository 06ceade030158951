"""Checkpoints decide where a run goes on, and a run can go back to an earlier one."""

import json
import os
from pathlib import Path

import pytest
from grpo.transport.batches.store import StepStore
from grpo.transport.checkpoints import TRAINER, Checkpoints
from grpo.transport.codec import encode
from grpo.transport.errors import RunFolderError
from grpo.transport.folders import step_folder, write_folder
from grpo.transport.run import RunFolder, create_run, only_one

from tests.transport.samples import damage, micro_batch


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


def test_batches_before_the_newest_checkpoint_are_not_needed(run: RunFolder) -> None:
    store = StepStore(run.batches, run_id=run.run_id)
    trainer_writes(run, 2, 4)
    for step in (4, 5, 6):
        store.write(step, [encode([micro_batch(run_id=run.run_id, step=step)])])
    assert Checkpoints(run).settle() == 6
    assert names(run.batches) == ["step_000004", "step_000005", "step_000006"]
    assert not run.superseded.exists()


def test_a_kill_while_the_run_goes_back_leaves_no_holes_and_the_next_start_goes_on_with_it(run: RunFolder) -> None:
    trainer_writes(run, 2, 4, 6)
    for folder in (run.batches, run.broadcasts):
        for step in range(1, 8):
            step_folder(folder, step).mkdir()
    rename, seen = os.rename, list[str]()

    def killed(source: Path, target: Path) -> None:
        rename(source, target)
        for folder in (run.batches, run.broadcasts, run.checkpoints):
            steps = [int(name[5:]) for name in names(folder)]
            assert steps == list(range(steps[0], steps[-1] + 1, 2 if folder == run.checkpoints else 1))
        seen.append(names(run.checkpoints)[-1])
        raise KeyboardInterrupt

    for _ in range(7 - 2 + 7 - 2 + 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "rename", killed)
            with pytest.raises(KeyboardInterrupt):
                Checkpoints(run).go_back_to(2, role="train")
    assert set(seen) == {"step_000006", "step_000004"}, "as long as anything is left to do, a later checkpoint says so"
    Checkpoints(run).go_back_to(2, role="train")
    assert names(run.checkpoints) == ["step_000002"]
    assert names(run.batches) == names(run.broadcasts) == ["step_000001", "step_000002"]


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

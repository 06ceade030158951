"""Checkpoints of two programs: one manifest ties their parts together, and a run can go back to an earlier one."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from transport.checkpoints import ORCHESTRATOR, TRAINER, Checkpoints
from transport.errors import CorruptError, RunFolderError, StaleRunError
from transport.folders import step_folder, write_folder
from transport.run import RunFolder, found_run, only_one


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return found_run(tmp_path / "run")


def trainer_writes(run: RunFolder, *steps: int) -> None:
    for step in steps:
        folder = step_folder(run.checkpoints, step) / TRAINER
        about = json.dumps({"step": step, "run_id": run.run_id}).encode()
        write_folder(folder, {"weights": b"w"}, lambda _, about=about: about)  # type: ignore[misc]


def state_after(step: int) -> Mapping[str, Any]:
    return {"after": step}


def test_the_orchestrator_completes_what_the_trainer_has_written(run: RunFolder) -> None:
    checkpoints = Checkpoints(run)
    checkpoints.complete(state_after)
    assert checkpoints.steps() == []
    trainer_writes(run, 2, 4)
    assert checkpoints.completion(2) is None
    checkpoints.complete(state_after)
    for step in (2, 4):
        completion = checkpoints.completion(step)
        assert completion is not None
        assert (completion.run_id, completion.step) == (run.run_id, step)
        assert completion.digests.keys() == {TRAINER, ORCHESTRATOR}
        assert checkpoints.state(step) == {"after": step}


def test_a_step_without_a_state_stays_incomplete_until_there_is_one(run: RunFolder) -> None:
    checkpoints = Checkpoints(run)
    trainer_writes(run, 2)
    checkpoints.complete(lambda step: None)
    assert checkpoints.completion(2) is None
    assert checkpoints.state(2) is None
    Checkpoints(run).complete(state_after)
    assert checkpoints.completion(2) is not None


def test_parts_that_do_not_belong_together_are_not_complete(run: RunFolder) -> None:
    checkpoints = Checkpoints(run)
    trainer_writes(run, 2)
    checkpoints.complete(state_after)
    manifest = checkpoints.part(2, TRAINER) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 2', '"step": 3'))
    assert checkpoints.completion(2) is None


def test_what_the_trainer_removes_goes_whole(run: RunFolder) -> None:
    checkpoints = Checkpoints(run)
    trainer_writes(run, 2, 4)
    checkpoints.complete(state_after)
    (checkpoints.part(2, TRAINER)).rename(run.path / "gone")
    checkpoints.complete(state_after)
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_000004"]


def test_a_damaged_state_and_one_of_another_run_are_refused(run: RunFolder) -> None:
    checkpoints = Checkpoints(run)
    trainer_writes(run, 2)
    checkpoints.complete(state_after)
    other = Checkpoints(RunFolder(path=run.path, run_id="another"))
    for ask in (other.completion, other.state):
        with pytest.raises(StaleRunError):
            ask(2)
    (checkpoints.part(2, ORCHESTRATOR) / "state.json").write_text('{"after": 9}')
    with pytest.raises(CorruptError, match="state"):
        checkpoints.state(2)


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


def test_going_back_to_the_newest_changes_nothing(run: RunFolder) -> None:
    trainer_writes(run, 2)
    step_folder(run.batches, 3).mkdir()
    Checkpoints(run).go_back_to(2, role="orch")
    assert names(run.batches) == ["step_000003"]
    assert not run.superseded.exists()


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

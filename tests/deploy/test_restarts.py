"""Which programs of a run are started again, with which arguments, and what is kept of it."""

import json
from pathlib import Path

import pytest

from configs.errors import SettingsError
from configs.loading import load
from configs.orch import OrchSettings
from configs.run import load_run
from configs.train import TrainSettings
from deploy.launcher import make_programs
from deploy.plan import Plan, resolve, with_run, write_settings
from deploy.processes import Exit, Program
from deploy.restarts import again_of, keep_restarts, overrule, read_restarts, whence, with_restarts
from deploy.work_done import trainers_end
from transport.checkpoints import Checkpoints
from transport.errors import START_AGAIN
from transport.folders import step_folder
from transport.run import RunFolder, found_run, join_run

PRESET = "configs/quickstart"


def plan(*argv: str) -> Plan:
    return resolve(load_run(PRESET, argv))


def programs(folder: Path, *argv: str) -> dict[str, Program]:
    ready = with_run(plan(*argv), "abc")
    return {one.role: one for one in make_programs(ready, write_settings(ready, folder / "settings"), folder)}


def test_each_program_may_be_started_again_three_times_or_as_often_as_is_asked_for(tmp_path: Path) -> None:
    assert {one.again.limit for one in programs(tmp_path).values() if one.again is not None} == {3}
    assert {one.again.limit for one in programs(tmp_path, "--restarts", "7").values() if one.again is not None} == {7}
    assert {one.again for one in programs(tmp_path, "--restarts", "0").values()} == {None}


def test_where_weights_are_broadcast_none_is_and_asking_for_it_is_an_error(tmp_path: Path) -> None:
    nccl = ["--weight_broadcast.type", "nccl", "--device", "cuda"]
    assert plan(*nccl).restarts == plan(*nccl, "--restarts", "0").restarts == 0
    with pytest.raises(SettingsError, match=r"restarts = 2: has no effect: with weight_broadcast\.type nccl"):
        plan(*nccl, "--restarts", "2")


def test_after_which_ends_each_is_started_again() -> None:
    killed, engine, error = (Exit(status=status, at_s=0.0) for status in (-9, START_AGAIN, 1))
    mended = {}
    for role in ("infer", "train", "orch", "teacher"):
        again = again_of(role, limit=3)
        assert again is not None
        mended[role] = [again.mends(one) for one in (killed, engine, error)]
    assert mended == {
        "infer": [True, True, False],
        "train": [True, True, False],
        "orch": [True, False, False],
        "teacher": [True, True, True],
    }


CHOICES = ("--orch.ckpt.skip_progress", "true", "--orch.buffer.easy_threshold", "1", "--orch.buffer.easy_fraction", "1")


@pytest.mark.parametrize("options", [("--overwrite_output_dir",), ("--resume_step", "3", *CHOICES)])
def test_trainer_and_orchestrator_go_on_where_they_were_and_nothing_else_changes(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    started = programs(tmp_path, *options)
    for role, cls in (("train", TrainSettings), ("orch", OrchSettings)):
        again, file = started[role].again, Path(started[role].command[-1])
        assert again is not None
        first, second = load(cls, file=file).settings, load(cls, file=file, arguments=again.arguments).settings
        before, after = first.model_dump(), second.model_dump()
        assert after["ckpt"].pop("resume_step") == -1
        before["ckpt"].pop("resume_step")
        assert before == after
        assert not after.get("overwrite_output_dir")


def test_how_a_run_was_resumed_holds_until_the_first_batch_after_that(tmp_path: Path) -> None:
    run = found_run(tmp_path / "run")
    (step_folder(run.checkpoints, 3) / "trainer").mkdir(parents=True)
    step_folder(run.batches, 4).mkdir(parents=True)
    began_after = Checkpoints(run).newest_batch()
    assert overrule("orch", run, began_after=began_after) == ()
    step_folder(run.batches, 5).mkdir()
    assert overrule("train", run, began_after=began_after) == ()
    orch = programs(tmp_path, "--resume_step", "-1", *CHOICES)["orch"]
    assert orch.again is not None
    arguments = (*orch.again.arguments, *overrule("orch", run, began_after=began_after))
    settings = load(OrchSettings, file=Path(orch.command[-1]), arguments=arguments).settings
    assert (settings.ckpt.skip_progress, settings.ckpt.skip_buffer) == (False, False)
    assert (settings.buffer.easy_fraction, settings.buffer.easy_threshold) == (0.0, 1.0)


def test_it_is_said_from_where_a_trainer_goes_on(tmp_path: Path) -> None:
    run = found_run(tmp_path / "run")
    assert whence("train", run) == ", from version 0: there is no checkpoint yet"
    (step_folder(run.checkpoints, 12) / "trainer").mkdir(parents=True)
    assert whence("train", run) == ", from the checkpoint of step 12"


def trained(folder: Path, *, interval: int | None) -> RunFolder:
    """A run whose versions up to 5 are published."""
    run = found_run(folder)
    settings = {"ckpt": {"interval": interval}}
    join_run(folder, role="train", settings=settings, run_id=run.run_id, timeout_s=1)
    step_folder(run.broadcasts, 5).mkdir()
    return run


def test_a_trainers_work_is_done_with_the_last_version_and_a_checkpoint_that_is_missing_is_named(
    tmp_path: Path,
) -> None:
    plain = trained(tmp_path / "plain", interval=None)
    assert (trainers_end(plain, 5), trainers_end(plain, 6), trainers_end(plain, None)) == ("", None, None)
    run = trained(tmp_path / "saved", interval=2)
    assert trainers_end(run, 5) == "; the checkpoint of step 5 is missing, and --resume_step -1 makes it"
    (step_folder(run.checkpoints, 5) / "trainer").mkdir(parents=True)
    assert trainers_end(run, 5) == ""


def test_how_often_it_was_is_kept_for_others_and_added_to_the_summary(tmp_path: Path) -> None:
    assert read_restarts(tmp_path) == {}
    keep_restarts(tmp_path, {"orch": 2})
    assert read_restarts(tmp_path) == {"orch": 2}
    summary = tmp_path / "summary.json"
    summary.write_text('{"steps": 5}')
    with_restarts(summary, {})
    assert json.loads(summary.read_text()) == {"steps": 5}
    with_restarts(summary, {"orch": 2})
    assert json.loads(summary.read_text()) == {"steps": 5, "restarts": {"orch": 2}}

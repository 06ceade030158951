"""Which GPUs each program takes: as asked, divided, shared, refused. No GPU is needed: the machine's are made up."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from configs.errors import SettingsError
from configs.run import load_run
from deploy.gpus import VARIABLE, VisibleGpus, visible_gpus
from deploy.launcher import make_programs
from deploy.plan import Plan, resolve, with_run, write_settings
from transport.run import RunFolder

PRESET = "configs/quickstart"
TAUGHT = ("--train.loss.teacher_tau", "0.5", "--orch.teacher_model.model.name", "configs/tiny/model")
TURNS = ("--sleep_mode", "--orch.max_async_level", "0")
ALL_OF = {num: VisibleGpus(names=tuple(map(str, range(num)))) for num in range(9)}
LISTED = VisibleGpus(names=("4", "6"))
BY_UUID = VisibleGpus(names=("GPU-8f", "GPU-11"))


def plan(visible: VisibleGpus, *argv: str) -> Plan:
    return resolve(load_run(PRESET, argv), visible=visible)


def seen(visible: VisibleGpus, *argv: str) -> Mapping[str, tuple[str, ...]]:
    return plan(visible, *argv).gpus.sees


def problems(visible: VisibleGpus, *argv: str) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        plan(visible, *argv)
    return str(caught.value).splitlines()


# --- what is there ---


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        (None, ("0", "1")),
        ("1,0", ("1", "0")),
        ("GPU-8f, GPU-11", ("GPU-8f", "GPU-11")),
        ("-1", ()),
        ("1,-1,0", ("1",)),
        ("7,0", ()),
        ("0,2,1", ("0",)),
        ("GPU-8f,7", ("GPU-8f",)),
    ],
)
def test_gpus_are_those_of_the_machine_that_the_environment_leaves(
    tmp_path: Path, listed: str | None, names: tuple[str, ...]
) -> None:
    for name in ("nvidiactl", "nvidia0", "nvidia1", "nvidia-uvm"):
        (tmp_path / name).touch()
    environment = {} if listed is None else {VARIABLE: listed}
    assert visible_gpus(environment, tmp_path) == VisibleGpus(names=names)
    assert visible_gpus(environment, tmp_path / "absent").names == ()


def test_where_only_the_driver_shows_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "nvidiactl").touch()
    assert visible_gpus({}, tmp_path).names == ("0",)
    assert visible_gpus({VARIABLE: "0,7"}, tmp_path).names == ("0", "7")  # nothing shows how many there are


# --- who gets what ---


def test_each_program_is_started_with_the_gpus_that_were_asked_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "0,1,2,3")
    asked = ("--infer_gpus", "0", "--train_gpus", "2,1", "--train.gpus", "2", "--teacher_gpus", "3")
    ready = with_run(plan(ALL_OF[4], *TAUGHT, *asked), "abc")
    programs = make_programs(
        ready, write_settings(ready, tmp_path / "settings"), RunFolder(path=tmp_path, run_id="abc")
    )
    visible = {program.role: program.environment[VARIABLE] for program in programs}
    assert visible == {"infer": "0", "train": "2,1", "teacher": "3", "orch": "0,1,2,3"}


def test_an_index_counts_in_what_the_launcher_sees() -> None:
    assert seen(LISTED, "--infer_gpus", "1", "--train_gpus", "0") == {"infer": ("6",), "train": ("4",)}
    assert seen(BY_UUID, "--infer_gpus", "1", "--train_gpus", "GPU-8f") == {"infer": ("GPU-11",), "train": ("GPU-8f",)}
    apart = seen(ALL_OF[2], "--infer_gpus", "GPU-1", "--train_gpus", "GPU-0")
    assert apart == {"infer": ("GPU-1",), "train": ("GPU-0",)}


def test_programs_for_which_none_is_named_take_the_next_ones() -> None:
    assert seen(ALL_OF[2]) == {"infer": ("0",), "train": ("1",)}
    assert seen(LISTED) == {"infer": ("4",), "train": ("6",)}
    assert seen(ALL_OF[2], "--train_gpus", "0") == {"infer": ("1",), "train": ("0",)}
    assert seen(ALL_OF[4], *TAUGHT, "--teacher_gpus", "1")["train"] == ("2",)
    larger = ("--infer.tp", "2", "--infer.dp", "2", "--train.gpus", "3", *TAUGHT)
    divided = {"infer": ("0", "1", "2", "3"), "train": ("4", "5", "6"), "teacher": ("7",)}
    assert seen(ALL_OF[8], *larger) == divided
    assert seen(ALL_OF[2], "--infer.device", "cpu") == {"train": ("0",)}


def test_where_the_gpus_are_too_few_for_all_nothing_is_divided() -> None:
    assert seen(ALL_OF[0]) == seen(ALL_OF[1]) == {}
    assert seen(ALL_OF[2], "--train.gpus", "2") == {}
    assert seen(ALL_OF[1], "--infer_gpus", "0") == {"infer": ("0",)}


@pytest.mark.parametrize("together", [("--colocate",), TURNS, ("--colocate", *TURNS)])
def test_programs_that_are_to_share_their_device_do(together: tuple[str, ...]) -> None:
    assert seen(ALL_OF[2], *together) == {}
    assert plan(ALL_OF[2], *together).gpus.takes == {"infer": ("0",), "train": ("0",)}
    for named in (["--infer_gpus", "1"], ["--train_gpus", "1"], ["--infer_gpus", "1", "--train_gpus", "1"]):
        assert seen(ALL_OF[2], *together, *named) == {"infer": ("1",), "train": ("1",)}
    two = ("--infer.dp", "2", "--infer_gpus", "2,3")
    assert seen(ALL_OF[4], *together, *two) == {"infer": ("2", "3"), "train": ("2", "3")}
    [problem] = problems(ALL_OF[2], *together, "--infer_gpus", "0", "--train_gpus", "1")
    assert "train_gpus" in problem


def test_a_program_for_which_a_gpu_is_named_does_not_fall_back_to_the_cpu() -> None:
    named = plan(ALL_OF[2], "--train_gpus", "1")
    assert (named.train.device, named.infer.device) == ("cuda", "auto")
    assert plan(ALL_OF[2]).train.device == "auto"
    [problem] = problems(ALL_OF[2], "--train_gpus=1", "--train.num_threads=3")
    assert "num_threads = 3" in problem


# --- what is refused ---


@pytest.mark.parametrize(
    ("visible", "argv"),
    [
        (0, ["--infer_gpus=0"]),
        (2, ["--infer_gpus=2"]),
        (2, ["--train_gpus=0", "--train.device=cpu"]),
        (2, ["--infer_gpus=0", "--infer.tp=2"]),
        (4, ["--train_gpus=1,2"]),
        (4, ["--teacher_gpus=0,1", *TAUGHT]),
        (4, ["--teacher_gpus=0"]),
        (2, ["--teacher_gpus=1", "--infer.device=cpu", *TAUGHT]),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_option(visible: int, argv: list[str]) -> None:
    [problem] = problems(ALL_OF[visible], *argv)
    assert f"{argv[0][2:].partition('=')[0]} = " in problem

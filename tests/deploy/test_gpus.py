"""Which GPUs each program takes. No GPU is needed: the machine's are made up."""

from pathlib import Path

import pytest
from grpo.configs.facts import VARIABLE, Hardware, visible_gpus
from grpo.configs.run import load_run
from grpo.deploy.launcher import make_programs
from grpo.deploy.plan import Plan, resolve, with_run, write_settings
from grpo.transport.run import RunFolder

TAUGHT = ("--train.loss.teacher_tau", "0.5", "--orch.teacher_model.model.name", "configs/tiny/model")


def plan(visible: tuple[str, ...], *argv: str) -> Plan:
    return resolve(load_run("configs/quickstart", argv, hardware=Hardware(gpus=visible)))


def all_of(num: int) -> tuple[str, ...]:
    return tuple(map(str, range(num)))


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        (None, ("0", "1")),
        ("0", ("0",)),
        ("1,0", ("1", "0")),
        ("GPU-8f, GPU-11", ("GPU-8f", "GPU-11")),
        ("", ()),
        ("-1", ()),
        ("1,-1,0", ("1",)),
        ("0,7", ("0",)),
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
    assert visible_gpus(environment, tmp_path) == names
    assert visible_gpus(environment, tmp_path / "absent") == ()


def test_where_only_the_driver_shows_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "nvidiactl").touch()
    assert visible_gpus({}, tmp_path) == ("0",)
    assert visible_gpus({VARIABLE: "0,7"}, tmp_path) == ("0", "7")  # nothing shows how many there are


def test_each_program_is_started_with_its_gpus_and_each_of_several_servers_with_its_part(tmp_path: Path) -> None:
    words = ("--infer_replicas", "2", "--train.gpus", "2")
    ready = with_run(plan(all_of(5), *TAUGHT, *words), "abc")
    files = write_settings(ready, tmp_path / "settings")
    programs = make_programs(ready, files, RunFolder(path=tmp_path, run_id="abc"))
    visible = {program.role: program.environment.get(VARIABLE) for program in programs if program.role != "orch"}
    assert visible == {"infer.0": "0", "infer.1": "1", "train": "2,3", "teacher": "4"}


def test_programs_take_the_next_gpus_and_the_launcher_says_which() -> None:
    assert plan(("4", "6")).gpus == {"infer": ("4",), "train": ("6",)}
    larger = ("--infer.tp", "2", "--infer.dp", "2", "--train.gpus", "3", *TAUGHT)
    divided = {"infer": ("0", "1", "2", "3"), "train": ("4", "5", "6"), "teacher": ("7",)}
    assert plan(all_of(8), *larger).gpus == divided
    assert plan(all_of(2), "--infer.device", "cpu").gpus == {"train": ("0",)}
    assert plan(all_of(2)).notes == ["GPUs: grpo-infer takes 0, grpo-train takes 1"]


def test_where_the_gpus_are_too_few_or_shared_nothing_is_divided() -> None:
    assert plan(()).gpus == plan(("0",)).gpus == {}
    assert plan(all_of(2), "--train.gpus", "2", "--infer.gpu_memory_utilization", "0.4").gpus == {}
    assert plan(all_of(2), "--colocate").gpus == {}
    assert plan(all_of(2), "--sleep_mode", "--orch.max_async_level", "0").gpus == {}

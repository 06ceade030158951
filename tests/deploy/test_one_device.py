"""Server and trainer on one device: `grpo --colocate` and `grpo --sleep_mode`."""

from pathlib import Path

import pytest
from grpo.configs.errors import SettingsError
from grpo.configs.facts import Hardware
from grpo.configs.run import load_run
from grpo.deploy.plan import Plan, resolve

PRESET = "configs/quickstart"
SLEEP = ("--sleep_mode", "--orch.max_async_level", "0")
ONE_GPU = ("0",)


def plan(*argv: str, visible: tuple[str, ...] = ONE_GPU) -> Plan:
    return resolve(load_run(PRESET, argv, hardware=Hardware(gpus=visible)))


def test_one_flag_is_for_all_and_off_by_default() -> None:
    neither, both = plan(), plan(*SLEEP, "--colocate")
    assert {neither.train.colocate, neither.infer.colocate, neither.train.sleep_mode} == {False}
    assert {both.train.colocate, both.infer.colocate} == {True}
    assert {both.train.sleep_mode, both.infer.sleep_mode, both.orch.sleep_mode} == {True}
    assert plan("--infer.colocate", "true").train.colocate


@pytest.mark.parametrize(
    ("argv", "visible"),
    [
        (("--train.colocate", "true", "--infer.colocate", "false"), ONE_GPU),
        (("--sleep_mode", "--orch.max_async_level", "1"), ONE_GPU),
        ((*SLEEP, "--train.sleep_mode", "false"), ONE_GPU),
        ((*SLEEP, "--infer.device", "cuda", "--train.device", "cpu"), ONE_GPU),
        ((*SLEEP, "--infer.device", "cpu"), ONE_GPU),
        (SLEEP, ()),
    ],
)
def test_one_alone_and_what_contradicts_it_and_sleep_without_a_gpu_is_refused(
    argv: tuple[str, ...], visible: tuple[str, ...]
) -> None:
    with pytest.raises(SettingsError, match=r"(sleep_mode|colocate) = "):
        plan(*argv, visible=visible)


def test_a_server_that_shares_computes_in_the_trainers_type_and_on_its_device(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(Path(PRESET, "run.yaml").read_text().replace("  dtype: float32\n", ""))
    model = ["--model", f"{PRESET}/model"]
    assert resolve(load_run(tmp_path, [*model, "--colocate"])).infer.dtype == "float32"
    assert resolve(load_run(tmp_path, model)).infer.dtype == "float32"
    assert resolve(load_run(tmp_path, [*model, "--train.recipe", "bf16"])).infer.dtype == "bfloat16"
    assert plan("--colocate", "--train.device", "cpu").infer.device == "cpu"
    assert plan("--colocate", "--infer.device", "cpu").train.device == "cpu"
    assert plan("--train.device", "cpu").infer.device == "auto"


def test_the_dry_run_says_who_sets_the_servers_share_of_a_gpu() -> None:
    note = "gpu_memory_utilization to what the trainer leaves"
    assert note in plan("--colocate").effective()
    assert note in plan().effective()
    assert note not in plan("--colocate", "--infer.gpu_memory_utilization", "0.5").effective()


def test_one_gpu_for_both_is_divided_by_a_measurement_and_the_plan_says_so() -> None:
    shared = plan()
    assert (shared.splits, shared.gpus) == (True, {})
    assert any("one GPU for server and trainer" in note for note in shared.notes)
    assert "gpu_memory_utilization" not in shared.infer.model_fields_set
    for other in (plan(visible=()), plan(visible=("0", "1")), plan(*SLEEP), plan("--train.device", "cpu")):
        assert not other.splits


def test_a_share_that_stands_in_the_way_of_the_measurement_is_told() -> None:
    for words in (("--colocate",), ()):
        kept = plan(*words, "--infer.gpu_memory_utilization", "0.5")
        assert not kept.splits
        assert any("infer.gpu_memory_utilization = 0.5 (command line)" in note for note in kept.notes)
    assert not plan("--infer.gpu_memory_utilization", "0.5", visible=("0", "1")).chosen


TAUGHT = ("--train.loss.teacher_tau", "0.5", "--orch.teacher_model.model.name", "configs/tiny/model")


@pytest.mark.parametrize(
    ("words", "visible"),
    [
        (("--train.gpus", "2"), ONE_GPU),
        (("--infer.tp", "2"), ("0", "1")),
        (TAUGHT, ONE_GPU),
        ((*TAUGHT, "--infer.gpu_memory_utilization", "0.4"), ONE_GPU),
        ((*TAUGHT, "--infer.gpu_memory_utilization", "0.6", "--teacher.gpu_memory_utilization", "0.5"), ONE_GPU),
    ],
)
def test_programs_that_would_take_the_same_gpu_are_refused_with_what_can_be_done(
    words: tuple[str, ...], visible: tuple[str, ...]
) -> None:
    with pytest.raises(SettingsError) as caught:
        plan(*words, visible=visible)
    [problem] = caught.value.problems
    assert problem.key == "infer.gpu_memory_utilization"


def test_shares_that_a_person_gave_of_one_gpu_hold() -> None:
    shares = ("--infer.gpu_memory_utilization", "0.4", "--teacher.gpu_memory_utilization", "0.3")
    assert plan(*TAUGHT, *shares).teacher is not None

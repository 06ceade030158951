"""The settings of a teacher's server: when there is one, what follows from the run, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from configs.errors import SettingsError
from configs.infer import InferSettings
from configs.loading import load
from configs.orch import OrchSettings
from configs.run import load_run
from deploy.launcher import make_programs, run, run_plan
from deploy.plan import Plan, resolve, with_run, write_settings
from deploy.teacher import within_model
from grpo.status import shown
from transport.run import RunFolder

PRESET = "configs/quickstart"
MODEL = "configs/tiny/model"
NAMED = ("--orch.teacher_model.model.name", MODEL)
TAUGHT = ("--train.loss.teacher_tau", "0.5", *NAMED)


def plan(*argv: str) -> Plan:
    return resolve(load_run(PRESET, argv))


def server(*argv: str) -> InferSettings:
    teacher = plan(*TAUGHT, *argv).teacher
    assert teacher is not None
    return teacher


def problems(*argv: str) -> str:
    with pytest.raises(SettingsError) as caught:
        plan(*argv)
    return str(caught.value)


def test_a_teachers_server_is_started_only_with_a_weight_and_a_model_that_nobody_serves_yet() -> None:
    assert plan(*TAUGHT).teacher is not None
    assert plan().teacher is None
    assert plan(*NAMED).teacher is None
    assert plan(*TAUGHT[:2], "--orch.teacher_model.reference", "true").teacher is None
    assert plan(*TAUGHT, "--orch.teacher_model.client.base_url", "http://far:1/v1").teacher is None


def test_a_teacher_with_weight_0_is_said_to_teach_nobody(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = "no teacher is asked or started: the trainer's loss.teacher_tau is 0"
    assert plan(*NAMED).notes == [line]
    assert plan().notes == plan(*TAUGHT).notes == []
    assert run(load_run(PRESET, NAMED), shown, dry_run=True) == 0
    assert f"# {line}\n" in capsys.readouterr().out
    assert run_plan(plan(*NAMED, "--model", "./no/model", "--output_dir", str(tmp_path)), shown) == 2
    assert capsys.readouterr().out == f"{line}\n"


def test_its_settings_follow_from_the_runs() -> None:
    teacher = server("--infer.device", "cpu", "--output_dir", "outputs/x")
    assert (teacher.model, teacher.host, teacher.device, teacher.dtype) == (MODEL, "127.0.0.1", "cpu", "auto")
    assert teacher.enable_lora is False
    assert teacher.output_dir == "outputs/x/teacher"
    assert teacher.num_threads is not None
    assert teacher.max_model_len == 129  # the policy's server takes 128, and scoring needs room for one more
    assert server("--infer.max_model_len", "null").max_model_len == 4097  # seq_len is 4096
    key = "--orch.teacher_model.client.api_key_var"
    assert server(key, "TEACHERS_KEY").api_key_var == "TEACHERS_KEY"


def test_its_own_settings_come_from_options_before_its_environment_before_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.yaml"
    settings = yaml.safe_load(Path(PRESET, "run.yaml").read_text())
    settings["teacher"] = {"dtype": "bfloat16", "max_model_len": 512, "seed": 1}
    file.write_text(yaml.safe_dump(settings))
    monkeypatch.setenv("GRPO_TEACHER_MAX_MODEL_LEN", "1024")
    monkeypatch.setenv("GRPO_INFER_SEED", "5")
    teacher = resolve(load_run(tmp_path, [*TAUGHT, "--teacher.dtype", "float32"])).teacher
    assert teacher is not None
    assert (teacher.dtype, teacher.max_model_len, teacher.seed) == ("float32", 1024, 1)


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        ((), "the trainer's loss.teacher_tau is 0"),
        (NAMED, "the trainer's loss.teacher_tau is 0"),
        (
            (*TAUGHT[:2], "--orch.teacher_model.reference", "true"),
            "the teacher is the model before training",
        ),
        ((*TAUGHT, "--orch.teacher_model.client.base_url", "http://far:1/v1"), "is served at http://far:1/v1"),
    ],
)
def test_settings_of_a_server_that_is_not_started_are_refused_with_the_reason(argv: tuple[str, ...], why: str) -> None:
    text = problems(*argv, "--teacher.port", "9")
    assert "command line: teacher.port = 9: has no effect: no server of a teacher is started, because " in text
    assert why in text


def test_so_are_those_in_the_environment_but_not_those_of_the_runs_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(f"{PRESET}/run.yaml", tmp_path)
    with (tmp_path / "run.yaml").open("a") as file:
        file.write("teacher: {seed: 4}\n")
    assert resolve(load_run(tmp_path)).teacher is None
    monkeypatch.setenv("GRPO_TEACHER_SEED", "5")
    assert (
        "environment variable GRPO_TEACHER_SEED: teacher.seed = 5: has no effect: no server of a teacher" in problems()
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--teacher.model", "other"), "is given by the orchestrator's teacher_model.model.name"),
        (("--teacher.api_key_var", "K"), "is given by the orchestrator's teacher_model.client.api_key_var"),
        (("--teacher.max_model_len", "128"), "must be at least 129, one more than the longest sample"),
        (("--teacher.enable_lora", "true"), "enable_lora = 'true': is for the server of the policy and its versions"),
        (("--teacher.output_dir", "x"), "output_dir = 'x': is for the server of the policy"),
        (("--teacher.colocate", "true"), "colocate = 'true': is for the server of the policy"),
        (("--teacher.sleep_mode", "true"), "sleep_mode = 'true': is for the server of the policy"),
        (("--teacher.max_loras", "3"), "max_loras = '3': is for the server of the policy"),
        (("--teacher.prot", "3"), "command line: teacher.prot = '3': unknown key; did you mean teacher.port?"),
    ],
)
def test_what_contradicts_the_run_or_is_for_policy_versions_is_refused(argv: tuple[str, ...], message: str) -> None:
    assert message in problems(*TAUGHT, *argv)


def test_the_orchestrator_is_led_to_the_port_that_is_chosen_for_it(tmp_path: Path) -> None:
    ready = with_run(plan(*TAUGHT), "abc")
    assert ready.teacher is not None
    assert ready.orch.teacher_model is not None
    assert ready.teacher.port not in (8000, ready.infer.port)
    assert ready.orch.teacher_model.client.base_url == (f"http://127.0.0.1:{ready.teacher.port}/v1",)
    files = write_settings(ready, tmp_path)
    assert load(InferSettings, file=files["teacher"]).settings == ready.teacher
    assert load(OrchSettings, file=files["orch"]).settings == ready.orch
    assert not yaml.safe_load(files["teacher"].read_text())["enable_lora"]
    chosen = with_run(plan(*TAUGHT, "--teacher.port", "4321"), "abc")
    assert chosen.orch.teacher_model is not None
    assert chosen.orch.teacher_model.client.base_url == ("http://127.0.0.1:4321/v1",)


def test_it_is_started_as_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_TEACHER_SEED", "1")
    ready = with_run(plan(*TAUGHT, "--teacher.num_threads", "3"), "abc")
    programs = make_programs(ready, write_settings(ready, tmp_path), RunFolder(path=tmp_path, run_id="abc"))
    assert [program.role for program in programs] == ["infer", "train", "orch", "teacher"]
    teacher = programs[-1]
    assert (teacher.name, teacher.is_server) == ("grpo-teacher", True)
    assert teacher.command[-2:] == ("infer.cli", str(tmp_path / "teacher.yaml"))
    assert teacher.log == tmp_path / "logs" / "teacher.log"
    assert teacher.environment["OMP_NUM_THREADS"] == "3"
    assert "GRPO_TEACHER_SEED" not in teacher.environment


def test_it_is_asked_for_no_more_than_its_model_can_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"max_position_embeddings": 64}))
    assert within_model(server(), tmp_path).max_model_len == 64
    assert f"the teacher {MODEL} reads 63 tokens at most; longer samples get no" in capsys.readouterr().out
    for fields in (
        {"max_position_embeddings": 512},
        {"max_position_embeddings": 64, "rope_scaling": {"factor": 4}},
        {},
    ):
        config.write_text(json.dumps(fields))
        assert within_model(server(), tmp_path).max_model_len == 129
    assert capsys.readouterr().out == ""


def test_a_teacher_that_is_not_there_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output_dir = tmp_path / "run"
    argv = [*TAUGHT[:3], "./no/teacher", "--output_dir", str(output_dir)]
    assert run(load_run(PRESET, argv), shown) == 2
    assert "error: model './no/teacher': no such folder" in capsys.readouterr().err
    assert not output_dir.exists()

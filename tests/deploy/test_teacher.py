"""The settings of a teacher's server: when there is one, what follows from the run, and what is refused."""

import json
from pathlib import Path

import pytest
import yaml
from grpo.configs.errors import SettingsError
from grpo.configs.infer import InferSettings
from grpo.configs.loading import load
from grpo.configs.run import load_run
from grpo.deploy.plan import Plan, resolve, with_run, write_settings
from grpo.deploy.teacher import within_model

PRESET = "configs/quickstart"
MODEL = "configs/tiny/model"
NAMED = ("--orch.teacher_model.model.name", MODEL)
SCALED = {"rope_scaling": {"factor": 4}}
TAUGHT = ("--train.loss.teacher_tau", "0.5", *NAMED)


def plan(*argv: str) -> Plan:
    return resolve(load_run(PRESET, argv))


def server(*argv: str) -> InferSettings:
    teacher = plan(*TAUGHT, *argv).teacher
    assert teacher is not None
    return teacher


def problems(*argv: str) -> dict[str, str]:
    """Where each key that is to blame was given."""
    with pytest.raises(SettingsError) as caught:
        plan(*argv)
    return {problem.key: problem.origin for problem in caught.value.problems}


WITHOUT = [
    (),
    NAMED,
    (*TAUGHT[:2], "--orch.teacher_model.reference", "true"),
    (*TAUGHT, "--orch.teacher_model.client.base_url", "http://far:1/v1"),
]


@pytest.mark.parametrize("argv", WITHOUT)
def test_a_teachers_server_is_started_only_with_a_weight_and_a_model_that_nobody_serves_yet(
    argv: tuple[str, ...],
) -> None:
    assert plan(*TAUGHT).teacher is not None
    assert plan(*argv).teacher is None
    assert problems(*argv, "--teacher.port", "9") == {"teacher.port": "command line"}


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


def test_its_settings_in_the_environment_are_refused_then_but_not_those_of_the_runs_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = Path(PRESET, "run.yaml").read_text()
    (tmp_path / "run.yaml").write_text(f"{text}\nteacher: {{seed: 4}}\n")
    assert resolve(load_run(tmp_path, ["--model", f"{PRESET}/model"])).teacher is None
    monkeypatch.setenv("GRPO_TEACHER_SEED", "5")
    assert problems() == {"teacher.seed": "environment variable GRPO_TEACHER_SEED"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", "other"),
        ("api_key_var", "K"),
        ("max_model_len", "128"),
        ("enable_lora", "true"),
        ("output_dir", "x"),
        ("prot", "3"),
    ],
)
def test_what_contradicts_the_run_or_is_for_policy_versions_is_refused(key: str, value: str) -> None:
    assert [found.rpartition(".")[2] for found in problems(*TAUGHT, f"--teacher.{key}", value)] == [key]


def test_the_orchestrator_is_led_to_the_port_that_is_chosen_for_it(tmp_path: Path) -> None:
    ready = with_run(plan(*TAUGHT), "abc")
    assert ready.teacher is not None
    assert ready.orch.teacher_model is not None
    assert ready.teacher.port not in (8000, ready.infer.port)
    assert ready.orch.teacher_model.client.base_url == (f"http://127.0.0.1:{ready.teacher.port}/v1",)
    files = write_settings(ready, tmp_path)
    assert load(InferSettings, file=files["teacher"]).settings == ready.teacher
    assert not yaml.safe_load(files["teacher"].read_text())["enable_lora"]
    chosen = with_run(plan(*TAUGHT, "--teacher.port", "4321"), "abc")
    assert chosen.orch.teacher_model is not None
    assert chosen.orch.teacher_model.client.base_url == ("http://127.0.0.1:4321/v1",)


def test_it_is_asked_for_no_more_than_its_model_can_do(tmp_path: Path) -> None:
    config, short = tmp_path / "config.json", {"max_position_embeddings": 64}
    for fields, length in ((short, 64), ({"max_position_embeddings": 512}, 129), (short | SCALED, 129), ({}, 129)):
        config.write_text(json.dumps(fields))
        assert within_model(server(), tmp_path).max_model_len == length

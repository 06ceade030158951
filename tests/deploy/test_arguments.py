"""Taking the command line of `grpo` apart."""

from pathlib import Path

import pytest

from deploy.arguments import ArgumentsError, parse

PRESET = "configs/quickstart"


def problems(*argv: str) -> tuple[str, ...]:
    with pytest.raises(ArgumentsError) as caught:
        parse(argv)
    return caught.value.messages


def test_a_folder_gives_the_file_of_each_program() -> None:
    files = parse([PRESET]).files
    assert files == {role: Path(PRESET) / f"{role}.yaml" for role in ("train", "infer", "orch")}


def test_a_file_option_replaces_one_file_of_the_folder() -> None:
    files = parse([PRESET, "--orch", "configs/quickstart/infer.yaml"]).files
    assert files["orch"] == Path("configs/quickstart/infer.yaml")
    assert files["train"] == Path("configs/quickstart/train.yaml")


def test_three_files_need_no_folder() -> None:
    parsed = parse([part for role in ("train", "infer", "orch") for part in (f"--{role}", f"{PRESET}/{role}.yaml")])
    assert parsed.files["infer"] == Path(PRESET) / "infer.yaml"
    assert not parsed.dry_run


def test_overrides_go_to_their_program_wherever_they_stand() -> None:
    parsed = parse(["--train.learning_rate", "1e-3", PRESET, "--orch.sampling.max_tokens=64", "--infer.port", "9"])
    assert parsed.options == {
        "train": ("--learning_rate=1e-3",),
        "orch": ("--sampling.max_tokens=64",),
        "infer": ("--port=9",),
        "teacher": (),
    }


def test_shared_options_go_to_every_program_that_has_the_key() -> None:
    parsed = parse([PRESET, "--output_dir", "o", "--max_steps", "3", "--seed", "-1", "--model=m"])
    assert parsed.options == {
        "train": ("--output_dir=o", "--max_steps=3", "--seed=-1", "--model=m"),
        "infer": ("--output_dir=o", "--seed=-1", "--model=m"),
        "orch": ("--output_dir=o", "--max_steps=3", "--seed=-1", "--model.name=m"),
        "teacher": (),
    }


def test_an_override_of_one_program_beats_the_shared_option() -> None:
    options = parse(["--train.seed", "7", PRESET, "--seed", "1"]).options
    assert options["train"] == ("--seed=7",)
    assert options["orch"] == ("--seed=1",)


def test_overwrite_output_dir_is_a_flag() -> None:
    assert parse(["--overwrite_output_dir", PRESET]).options["train"] == ("--overwrite_output_dir=true",)


def test_all_problems_are_listed_with_suggestions() -> None:
    found = problems(PRESET, "extra", "--learning_rate", "1", "--seeed=3", "--trian.lora_rank", "8", "--train.seed")
    assert found == (
        "--train.seed: needs a value, as in --train.seed VALUE",
        "extra: unexpected; one FOLDER is taken, and options start with --",
        "--learning_rate: unknown option; did you mean --train.learning_rate?",
        "--seeed: unknown option; did you mean --seed?",
        "--trian.lora_rank: unknown option; did you mean --train.lora_rank?",
    )


def test_settings_of_a_teachers_server_are_taken_from_a_file_the_folder_or_options(tmp_path: Path) -> None:
    assert "teacher" not in parse([PRESET]).files
    assert not parse([PRESET]).teacher_wanted
    for role in ("train", "infer", "orch", "teacher"):
        (tmp_path / f"{role}.yaml").touch()
    of_folder = parse([str(tmp_path)])
    assert (of_folder.files["teacher"], of_folder.teacher_wanted) == (tmp_path / "teacher.yaml", False)
    given = parse([PRESET, "--teacher", str(tmp_path / "teacher.yaml")])
    assert (given.files["teacher"], given.teacher_wanted) == (tmp_path / "teacher.yaml", True)
    by_key = parse([PRESET, "--teacher.port", "9"])
    assert (by_key.options["teacher"], by_key.teacher_wanted) == (("--port=9",), True)
    assert problems(PRESET, "--teacher", "nowhere.yaml")[0].startswith("--teacher: nowhere.yaml: no such file")


def test_missing_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").touch()
    assert problems(str(tmp_path)) == tuple(
        f"--{role}: {tmp_path}/{role}.yaml: no such file; give the path of a YAML file with settings"
        for role in ("infer", "orch")
    )
    assert problems("--train", str(tmp_path / "train.yaml"))[0].startswith("--infer: no file; give a folder")


def test_how_often_a_program_is_started_again_is_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse([PRESET]).restarts is None
    assert parse([PRESET, "--restarts", "0"]).restarts == 0
    assert parse([PRESET, "--restarts=12"]).restarts == 12
    for wrong in ("-1", "often", ""):
        assert "--restarts: " in problems(PRESET, f"--restarts={wrong}")[0]


def test_gpus_are_indices_or_uuids_named_once() -> None:
    assert parse([PRESET]).gpus == {}
    parsed = parse([PRESET, "--train_gpus", "1, 02", "--infer_gpus=GPU-8f1c-11,MIG-3/1/0"])
    assert parsed.gpus == {"infer": ("GPU-8f1c-11", "MIG-3/1/0"), "train": ("1", "2")}
    for wrong in ("", ",", "0,", "-1", "first", "0;1"):
        [message] = problems(PRESET, f"--infer_gpus={wrong}")
        assert f"argument --infer_gpus: {wrong!r} names no GPUs, expected indices or UUIDs" in message
    assert "--train_gpus: '0,00' names a GPU twice; name each once" in problems(PRESET, "--train_gpus", "0,00")[0]
    twice = problems(PRESET, "--teacher_gpus", "0", "--teacher_gpus", "1")
    assert "argument --teacher_gpus: is given twice; give it once, as in 0,1" in twice[0]
    assert problems(PRESET, "--train_gpu", "1") == ("--train_gpu: unknown option; did you mean --train_gpus?",)

"""The settings of a run, from one file or from one for each program."""

import contextlib
import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from grpo.configs import keys
from grpo.configs.entry import load_settings
from grpo.configs.errors import Problem, SettingsError
from grpo.configs.infer import InferSettings
from grpo.configs.keys import known_keys
from grpo.configs.orch import OrchSettings
from grpo.configs.run import PRESETS, LoadedRun, RunSettings, load_run, presets
from grpo.configs.train import TrainSettings

from tests.grpo.run_folder import grpo

RUN: dict[str, Any] = {"model": "m", "orch": {"env": [{"id": "reverse-text"}], "rollouts_per_example": 4}}


def run_of(folder: Path, *arguments: str, **changes: Any) -> LoadedRun:
    (folder / "run.yaml").write_text(yaml.safe_dump(RUN | changes))
    return load_run(folder, arguments)


def problems(*arguments: str, target: Path | str | None = "quickstart") -> list[Problem]:
    with pytest.raises(SettingsError) as caught:
        load_run(target, arguments)
    return caught.value.problems


@pytest.mark.parametrize(
    ("words", "key", "said"),
    [
        (("--num_generations", "8"), "num_generations", "orch.rollouts_per_example"),
        (("--lr", "1e-3"), "lr", "train.learning_rate"),
        (("--train.lr", "1e-3"), "train.lr", "train.learning_rate"),
        (("--max_completion_length", "9"), "max_completion_length", "mean max_tokens?"),
        (("--orch.max_new_tokens", "9"), "orch.max_new_tokens", "max_tokens"),
        (("--max_prompt_length", "9"), "max_prompt_length", "orch.buffer.max_prompt_length"),
        (("--temperature", "0.5"), "temperature", "mean orch.sampling.temperature?"),
        (("--per_device_train_batch_size", "4"), "per_device_train_batch_size", "orch.batch_size"),
        (("--gradient_accumulation_steps", "4"), "gradient_accumulation_steps", "orch.batch_size"),
        (("--train_batch_size", "4"), "train_batch_size", "orch.batch_size"),
        (("--actor_rollout_ref.rollout.n", "4"), "actor_rollout_ref.rollout.n", "orch.rollouts_per_example"),
        (("--rollout_n", "4"), "rollout_n", "orch.rollouts_per_example"),
        (("--train.group_size", "4"), "train.group_size", "orch.rollouts_per_example"),
        (("--epochs", "3"), "epochs", "max_steps"),
        (("--trainer.total_epochs", "3"), "trainer.total_epochs", "max_steps"),
        (("--beta", "0.1"), "beta", "orch.teacher_model.reference"),
        (("--algorithm.kl_ctrl.kl_coef", "1"), "algorithm.kl_ctrl.kl_coef", "train.loss.teacher_tau"),
        (("--seq_len", "9"), "seq_len", "mean sequence_len?"),
        (("--gpus", "2"), "gpus", "mean train.gpus?"),
        (("--dataset", "x"), "dataset", "--env"),
        (("--reward_funcs", "f"), "reward_funcs", "--env FILE:CLASS"),
        (("--train.lora_rank", "32"), "lora_rank", "set lora_rank"),
        (("--orch.max_steps", "5"), "orch.max_steps", "set max_steps"),
        (("--max_tokens", "600"), "max_tokens", "512"),
        (("--orch.env.0.id", "x"), "orch.env.0.id", "--env FILE:CLASS"),
        (("--orch.filters", "x"), "orch.filters", "expected a list"),
        (("--output_dir", ""), "output_dir", "must not be empty"),
        (("--max_steps", "-5"), "max_steps", "greater than 0"),
        (("--train.output_dir", "elsewhere"), "output_dir", ""),
    ],
)
def test_words_of_others_and_keys_of_one_program_are_answered_with_what_to_write(
    words: tuple[str, ...], key: str, said: str
) -> None:
    [problem] = problems(*words)
    assert problem.key == key
    assert said in problem.message


@pytest.mark.parametrize("word", sorted({**keys._INSTEAD, **keys._OTHER_NAMES}))
def test_the_keys_that_are_named_instead_are_keys(word: str) -> None:
    message = keys.unknown(RunSettings, word)
    named = re.findall(r"\b(?:train|orch|infer|topology)(?:\.[a-z_0-9]+)+", message)
    named += re.findall(r"did you mean (\S+)\?", message)
    assert [one for one in named if one not in known_keys(RunSettings)] == []


def test_an_environments_id_alone_stands_for_it(tmp_path: Path) -> None:
    def ids(run: LoadedRun) -> list[str]:
        return [env.id for env in run.orch.settings.env]

    assert ids(load_run("quickstart", ["--env", "a.py:A"])) == ["a.py:A"]
    several = ["--env", "a.py:A", "--env", '{"id": "b", "args": {"n": 1}}']
    assert ids(load_run("quickstart", several)) == ["a.py:A", "b"]
    assert ids(load_run("quickstart", ["--orch.env", "b"])) == ["b"]
    assert ids(load_run("quickstart", ["--env", "a", "--orch.env", '[{"id": "b"}]'])) == ["b"]
    (tmp_path / "run.yaml").write_text("model: m\nenv: reverse-text\n")
    assert ids(load_run(tmp_path)) == ["reverse-text"]
    with pytest.raises(SettingsError) as caught:
        load_run("quickstart", ["--env", "a", "--env", '[{"id": "b"}]'])
    assert [one.key for one in caught.value.problems] == ["env"]


def test_a_model_and_an_environment_are_a_run_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    run = load_run(None, ["--model", "org/Model-1B", "--env", "my_env.py:MyEnv", "--orch.batch_size", "32"])
    assert (run.infer.settings.model, run.orch.settings.model.name) == ("org/Model-1B", "org/Model-1B")
    assert [env.id for env in run.orch.settings.env] == ["my_env.py:MyEnv"]
    assert {one.settings.output_dir for one in (run.train, run.infer, run.orch)} == {"outputs/MyEnv-Model-1B"}
    codes = '{"id": "dataset", "args": {"path": "data/codes.csv"}}'
    for words, folder in (
        (("--model", "m", "--env", "a.py:A", "--env", codes), "outputs/A-codes-m"),
        (("--model", "/some/where/m/", "--orch.arena", "own.py:Schedule"), "outputs/Schedule-m"),
        (("--model", "m", "--env", "a", "--output_dir", "mine"), "mine"),
    ):
        assert load_run(None, words).train.settings.output_dir == folder
    assert [one.key for one in problems("--model", "m", target=None)] == ["orch.env"]
    assert [one.key for one in problems("--env", "a", target=None)] == ["model"]
    assert [one.key for one in problems("--max_steps", "3", target=None)] == ["run"]
    monkeypatch.setenv("GRPO_RUN_MODEL", "m")
    monkeypatch.setenv("GRPO_RUN_ENV", "reverse-text")
    assert load_run(None).train.settings.output_dir == "outputs/reverse-text-m"


def test_a_run_without_a_folder_or_an_end_gets_them_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "codes").mkdir()
    run = run_of(tmp_path / "codes")
    assert run.train.settings.output_dir == "outputs/codes"
    assert (run.train.settings.max_steps, run.orch.settings.max_steps) == (200, 200)
    assert "200 steps" in "".join(run.notes)
    (tmp_path / "first.yaml").write_text(yaml.safe_dump(RUN))
    assert load_run(tmp_path / "first.yaml").orch.settings.output_dir == "outputs/first"
    for run in (run_of(tmp_path, "--max_steps", "null"), run_of(tmp_path, max_steps=None)):
        assert (run.train.settings.max_steps, run.orch.settings.max_steps, run.notes) == (-1, None, ())
    assert run_of(tmp_path, "--orch.max_steps", "5").orch.settings.max_steps == 5


def test_another_model_in_a_preset_is_told_of_the_start_without_one() -> None:
    assert "grpo --model" in "".join(load_run("quickstart", ["--model", "org/Model"]).notes)
    assert load_run("quickstart").notes == ()


@pytest.mark.parametrize(
    ("word", "said"),
    [("Qwen/Qwen3-4B", "--model Qwen/Qwen3-4B"), (PRESETS / "quickstart/model", "--model"), ("e.py:E", "--env")],
)
def test_a_model_or_an_environment_in_the_place_of_a_run_is_told_where_it_goes(word: Path | str, said: str) -> None:
    [problem] = problems(target=word)
    assert said in problem.message


def test_what_the_programs_share_is_said_once(tmp_path: Path) -> None:
    run = run_of(tmp_path, seed=7, lora_rank=64, lora_alpha=8, sequence_len=512, max_steps=5, api_key_var="K")
    train, infer, orch = run.train.settings, run.infer.settings, run.orch.settings
    assert (train.model, infer.model, orch.model.name) == ("m", "m", "m")
    assert (train.seed, infer.seed, orch.seed) == (7, 7, 7)
    assert (train.lora_rank, infer.max_lora_rank, orch.model.lora_rank) == (64, 64, 64)
    assert (train.lora_alpha, orch.model.lora_alpha) == (8, 8)
    assert (train.sequence_len, orch.seq_len, train.max_steps, orch.max_steps) == (512, 512, 5, 5)
    assert (infer.api_key_var, orch.client.api_key_var) == ("K", "K")


def test_what_follows_for_one_program_from_another_need_not_be_said(tmp_path: Path) -> None:
    merged = run_of(tmp_path, weight_broadcast={"type": "nccl"}, train={"recipe": "fp32"}, infer={"tp": 2})
    way: Any = merged.train.settings.weight_broadcast
    assert (way.type, way.format, way.inference_world_size) == ("nccl", "merged", 2)
    assert merged.orch.settings.weight_broadcast == way
    assert merged.infer.settings.weight_broadcast_type == "nccl"
    assert not merged.infer.settings.enable_lora
    whole = run_of(tmp_path, lora=False)
    assert {one.settings.weight_broadcast.format for one in (whole.train, whole.orch)} == {"full"}
    noisy = run_of(tmp_path, max_steps=20, train={"noise_scheduler": {"enabled": True}})
    assert (noisy.infer.settings.norm_noise, noisy.infer.settings.max_loras) == (True, 20)
    assert run_of(tmp_path, "--orch.max_off_policy_steps", "2").infer.settings.max_loras == 4
    assert run_of(tmp_path, train={"qlora_bnb": True}).infer.settings.base_quantization == "nf4"


def test_a_programs_own_key_holds_before_the_shared_one_and_the_command_line_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path, seed=1, train={"seed": 2})
    assert [one.settings.seed for one in (run.train, run.infer, run.orch)] == [2, 1, 1]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN | {"seed": 1, "train": {"seed": -2}}))
    assert [(problem.key, problem.value) for problem in problems(target=tmp_path)] == [("train.seed", -2)]
    run = run_of(tmp_path, "--seed", "3", "--orch.seed", "4", seed=1, train={"seed": 2})
    assert [one.settings.seed for one in (run.train, run.infer, run.orch)] == [3, 3, 4]
    monkeypatch.setenv("GRPO_RUN_SEED", "8")
    monkeypatch.setenv("GRPO_INFER_SEED", "9")
    run = run_of(tmp_path, seed=1)
    assert [one.settings.seed for one in (run.train, run.infer, run.orch)] == [8, 9, 8]


def test_a_variable_that_nothing_reads_is_refused_with_the_one_that_was_meant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("GRPO_LEARNING_RATE", "GRPO_MAX_STEPS", "GRPO_TRAINER_SEED", "GRPO_HELLO", "GRPO_RUN_SED"):
        monkeypatch.setenv(name, "3")
    monkeypatch.setenv("GRPO_ENV_KEY", "k")
    monkeypatch.setenv("GRPO_MY_JUDGES_KEY", "k")
    found = {one.key: one.message for one in problems()}
    assert found.keys() == {"GRPO_LEARNING_RATE", "GRPO_MAX_STEPS", "GRPO_TRAINER_SEED", "GRPO_HELLO", "sed"}
    assert "GRPO_TRAIN_LEARNING_RATE" in found["GRPO_LEARNING_RATE"]
    assert "GRPO_RUN_MAX_STEPS" in found["GRPO_MAX_STEPS"]
    assert "GRPO_TRAIN_SEED" in found["GRPO_TRAINER_SEED"]
    assert "did you mean" not in found["GRPO_HELLO"]


def test_problems_name_the_key_as_it_was_given(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN | {"seed": -1, "learning_rate": 1}))
    found = problems(
        *("--train.learning_rate", "inf", "--train.replay", "/nope", "--orch.env.id", "x", "--max_steps", "3"),
        *("--max_steps=4", "--infer.prot", "9"),
        target=tmp_path,
    )
    by_key = {problem.key: problem for problem in found}
    keys = ["infer.prot", "learning_rate", "max_steps", "orch.env.id", "seed", "train.learning_rate", "train.replay"]
    assert sorted(problem.key for problem in found) == keys
    assert by_key["seed"].origin == str(tmp_path / "run.yaml")
    assert by_key["infer.prot"].origin == "command line"
    assert "train.learning_rate" in by_key["learning_rate"].message
    assert "infer.port" in by_key["infer.prot"].message


def test_a_key_that_is_missing_for_several_programs_is_missed_once(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("seed: 1\n")
    assert [problem.key for problem in problems(target=tmp_path)] == ["model"]


@pytest.mark.parametrize(
    ("target", "arguments", "key"),
    [
        ("nonsuch", (), "run"),
        (None, (), "run"),
        (None, ("--train", "a"), "infer"),
        ("quickstart", ("--orch", "orch.yaml"), "orch"),
        (None, ("--train", "a", "--train", "b"), "train"),
    ],
)
def test_a_run_is_one_file_or_one_for_each_program(target: str | None, arguments: tuple[str, ...], key: str) -> None:
    assert key in [problem.key for problem in problems(*arguments, target=target)]


@pytest.mark.parametrize("name", presets())
def test_every_preset_loads_by_its_name_from_anywhere(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = load_run(name)
    assert run.train.settings.model == run.orch.settings.model.name
    if not run.train.settings.model.startswith(("Qwen/", "meta-llama/")):
        assert Path(run.train.settings.model, "config.json").is_file()
    for target in (PRESETS / name, PRESETS / name / "run.yaml"):
        assert load_run(target).orch.settings == run.orch.settings


@pytest.mark.parametrize(
    ("preset", "words", "gone"),
    [
        ("debate", ("--orch.eval.num_examples", "0"), "orch.eval.rollouts_per_example"),
        ("critique", ("--orch.eval.num_examples", "0"), "orch.eval.rollouts_per_example"),
        ("quickstart", ("--train.optimizer", "muon"), "train.adam_beta2"),
    ],
)
def test_what_a_preset_says_and_an_option_makes_idle_is_no_error_and_what_a_person_says_is_one(
    preset: str, words: tuple[str, ...], gone: str, tmp_path: Path
) -> None:
    run = load_run(preset, words)
    assert gone not in run.given
    value = "0.5" if "adam" in gone else "3"
    assert gone in [one.key for one in problems(*words, f"--{gone}", value, target=preset)]
    (tmp_path / "run.yaml").write_text((PRESETS / preset / "run.yaml").read_text())
    assert gone in [one.key for one in problems(*words, target=tmp_path)]


@pytest.mark.parametrize(
    ("cls", "key"), [(TrainSettings, "learning_rate"), (InferSettings, "max_model_len"), (OrchSettings, "batch_size")]
)
def test_a_program_takes_its_part_of_a_run(
    cls: type[TrainSettings], key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = getattr(getattr(load_run("quickstart"), cls.role).settings, key)
    settings = load_settings(cls, [str(PRESETS / "quickstart" / "run.yaml"), "--output_dir", "outputs/apart"])
    assert (getattr(settings, key), settings.output_dir) == (expected, "outputs/apart")
    assert getattr(load_settings(cls, ["quickstart"]), key) == expected
    with pytest.raises(SystemExit) as ended:
        load_settings(cls, ["quickstart", f"--{cls.role}.{key}", "1", f"--{cls.role}.seed", "1"])
    problems = capsys.readouterr().err.splitlines()
    assert (ended.value.code, len(problems)) == (2, 2)
    assert f"--{key}" in problems[0], "without the program's name"


def test_the_command_lines_help_is_short() -> None:
    done = grpo("--help")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) <= 80
    assert all(
        f"--{key}" in done.stdout or f" {key} " in done.stdout or f" {key}[] " in done.stdout
        for key in RunSettings.model_fields
    )
    assert "--train.learning_rate" in grpo("--help", "train").stdout


@pytest.mark.parametrize(
    ("words", "variable"),
    [
        (("--orch.env", '[{"id": "reverse-text"'), ""),
        (("--seed", "1", "--seed", "2"), ""),
        (("--nothing",), ""),
        (("twice",), ""),
        ((), "[{"),
    ],
)
def test_what_cannot_be_understood_ends_with_2_and_one_line_a_problem(
    words: tuple[str, ...], variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable:
        monkeypatch.setenv("GRPO_ORCH_ENV", variable)
    done = grpo("quickstart", *words, "--dry-run")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)


INFINITE, NO_NUMBER = float("inf"), float("nan")
VALUES = (None, True, 0, -1, 10**400, INFINITE, NO_NUMBER, "", "x", "nccl", [], ["a"], {}, {"type": []}, [[]], {1: 2})
TEXTS = ("", "null", "[", "{}", "[1]", '{"a": 1}', "1e400", "-1", '[{"id": "a", "arg": 1}]')


def test_whatever_a_key_is_given_there_are_settings_or_problems(tmp_path: Path) -> None:
    rng, keys, preset = random.Random(0), known_keys(RunSettings), (PRESETS / "quickstart" / "run.yaml").read_text()
    for _ in range(60):
        tree = yaml.safe_load(preset)
        *path, last = rng.choice(keys).split(".")
        section = tree
        for name in path:
            section[name] = section[name] if isinstance(section.get(name), dict) else {}
            section = section[name]
        section[last] = rng.choice(VALUES)
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
        for target, arguments in ((tmp_path, []), ("quickstart", [f"--{rng.choice(keys)}={rng.choice(TEXTS)}"])):
            with contextlib.suppress(SettingsError):
                load_run(target, arguments)

"""Where values come from, and the errors for what is no value."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from grpo.configs.entry import load_settings
from grpo.configs.errors import Problem, SettingsError
from grpo.configs.infer import InferSettings
from grpo.configs.loading import dump, load, split
from grpo.configs.orch import OrchSettings
from grpo.configs.train import TrainSettings

ORCH = {"model": {"name": "m"}, "env": [{"id": "reverse-text"}], "rollouts_per_example": 4}


@pytest.fixture
def orch_file(tmp_path: Path) -> Path:
    path = tmp_path / "orch.yaml"
    path.write_text(yaml.safe_dump(ORCH))
    return path


def problems(cls: Any, *arguments: str, file: Path | None = None) -> list[Problem]:
    with pytest.raises(SettingsError) as caught:
        load(cls, file=file, arguments=arguments)
    return caught.value.problems


def test_command_line_beats_environment_beats_file_beats_default(
    orch_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orch_file.write_text(yaml.safe_dump(ORCH | {"batch_size": 8, "seq_len": 100, "seed": 1}))
    monkeypatch.setenv("GRPO_ORCH_SEQ_LEN", "200")
    monkeypatch.setenv("GRPO_ORCH_SEED", "2")
    loaded = load(OrchSettings, file=orch_file, arguments=["--seed", "3"])
    settings = loaded.settings
    assert (settings.seed, settings.seq_len, settings.batch_size, settings.max_async_level) == (3, 200, 8, 1)
    assert [loaded.origin(key) for key in ("seed", "seq_len", "batch_size", "max_async_level")] == [
        "command line",
        "environment variable GRPO_ORCH_SEQ_LEN",
        str(orch_file),
        f"{orch_file} (default)",
    ]


def test_nested_keys_lists_switches_and_null_are_given_as_texts(
    orch_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPO_ORCH_SAMPLING__TEMPERATURE", "0.5")
    arguments = ["--sampling.max_tokens=64", "--client.base_url", "http://a/v1,http://b/v1", "--sleep_mode"]
    arguments += ["--max_async_level", "0", "--env", '[{"id": "x", "args": {"a": 1}}]', "--eval.interval", "3"]
    settings = load(OrchSettings, file=orch_file, arguments=[*arguments, "--traces.every", "null"]).settings
    assert (settings.sampling.max_tokens, settings.sampling.temperature) == (64, 0.5)
    assert settings.client.base_url == ("http://a/v1", "http://b/v1")
    assert (settings.sleep_mode, settings.traces.every) == (True, None)
    assert (settings.env[0].id, settings.env[0].args) == ("x", {"a": 1})


def test_a_switch_with_words_of_its_own_takes_them_as_its_value() -> None:
    words = ["--gradient_checkpointing", "selective", "--lora", "--lora_rank", "3"]
    given = [("gradient_checkpointing", "selective"), ("lora", "true"), ("lora_rank", "3")]
    assert split(TrainSettings, words) == given


def test_a_key_of_a_mapping_is_answered_with_the_mapping(orch_file: Path) -> None:
    with pytest.raises(SettingsError, match=r"model\.chat_template_kwargs is a mapping"):
        load(OrchSettings, file=orch_file, arguments=["--model.chat_template_kwargs.enable_thinking", "true"])


@pytest.mark.parametrize(
    ("tree", "key", "hint"),
    [
        ({"batchsize": 7}, "batchsize", "batch_size"),
        ({"sampling": {"top_p": 0.9}}, "sampling.top_p", "is refused"),
        ({"sampling": {"temp": 0.9}}, "sampling.temp", "sampling.temperature"),
        ({"max_tokens": 7}, "max_tokens", "sampling.max_tokens"),
        ({"BATCH_SIZE": 7}, "BATCH_SIZE", "batch_size"),
        ({"env": [{"id": "a", "arg": {}}]}, "env.0.arg", "env.args"),
        ({"rollout_transport": {"port": 1}}, "rollout_transport.port", "type: zmq"),
        ({"advantage": {"type": "custom", "import_path": "m:f", "value": 1}}, "advantage.value", "type: constant"),
        ({"filters": [{"type": "repetition", "logprob_offset": 1}]}, "filters.0.logprob_offset", "type: gibberish"),
    ],
)
def test_an_unknown_key_is_answered_with_the_right_one(
    orch_file: Path, tree: dict[str, Any], key: str, hint: str
) -> None:
    orch_file.write_text(yaml.safe_dump(ORCH | tree))
    [problem] = problems(OrchSettings, file=orch_file)
    assert (problem.origin, problem.key) == (str(orch_file), key)
    assert hint in problem.message


def test_what_people_write_is_read_as_they_mean_it(orch_file: Path) -> None:
    file = orch_file.with_name("own.yaml")
    file.write_text("model: m\nhost: null\n")
    assert load(InferSettings, file=file).settings.host == "0.0.0.0", "all interfaces"
    assert load(InferSettings, file=file, arguments=["--host", "::1"]).settings.host == "::1"
    file.write_text("model: m\nlearning_rate: 5e-7\n")
    assert load(TrainSettings, file=file).settings.learning_rate == 5e-7, "a text in YAML 1.1"
    reports = load(OrchSettings, file=orch_file, arguments=["--report_to", "tensorboard"]).settings.report_to
    assert reports is not None
    assert reports.to == ("tensorboard",)


def test_unknown_options_and_variables_are_errors(orch_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_ORCH_SAMPLING__TEMPERATUR", "1")
    found = problems(OrchSettings, "--sampling.max_tokes", "3", "--env.id", "x", "--seed", file=orch_file)
    keys = ["sampling.temperatur", "sampling.max_tokes", "env.id", "seed"]
    assert [problem.key for problem in found] == keys
    assert found[0].origin == "environment variable GRPO_ORCH_SAMPLING__TEMPERATUR"
    assert {problem.origin for problem in found[1:]} == {"command line"}
    assert "env is a list" in found[2].message


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["--seed", "many"], "seed"),
        (["--seed", "1", "--seed", "2"], "seed"),
        (["--sleep_mode", "--sleep_mode=false"], "sleep_mode"),
        (["--env", '[{"id": "x"'], "env"),
        (["--filters", '[{"type": "rude"}]'], "filters.0"),
        (["--sampling.temp_scheduler.type", "linear"], "sampling.temp_scheduler.start_temperature"),
        (["--oversampling_factor", "0.9"], "oversampling_factor"),
        (["--batch_size", "6"], "batch_size"),
    ],
)
def test_values_that_are_none_are_errors(orch_file: Path, arguments: list[str], key: str) -> None:
    assert key in [problem.key for problem in problems(OrchSettings, *arguments, file=orch_file)]


@pytest.mark.parametrize(
    ("cls", "given"),
    [
        *((TrainSettings, one) for one in ("learning_rate=inf", f"seed={10**20}", "loss.kl_tau=1e308", "output_dir= ")),
        *((TrainSettings, one) for one in ("weight_decay=inf", "wait_timeout_s=1e-9")),
        *((InferSettings, one) for one in ("canary_tolerance=1e30", "canary_timeout_s=1e-9")),
        *((OrchSettings, one) for one in ("sampling.temperature=1e-9", "oversampling_factor=1e308")),
    ],
)
def test_numbers_that_would_switch_a_promise_off_are_refused(cls: Any, given: str, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(ORCH if cls is OrchSettings else {"model": "m"}))
    [problem] = problems(cls, f"--{given}", file=tmp_path / "own.yaml")
    assert problem.key == given.partition("=")[0]


def bomb(levels: int = 10) -> str:
    """Aliases of aliases: 10 ** levels values."""
    lines = ["a0: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]"]
    lines += [f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 10)}]" for n in range(levels - 1)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        "yes: 1\n",
        "~: 1\n",
        "sampling: {1.5: 1}\n",
        "env: [{id: a, args: {2020-01-01: 1}}]\n",
        bomb(),
        "- a\n",
        "model: [1,",
        "model: &b {name: *b}\n",
        "a: &a [x, x]\nb: &b [*a, *a]\n",
        "model: " + "[" * 20_000,
        "seed: " + "9" * 5000,
        "model: \xff".encode("latin-1"),
    ],
)
def test_a_file_that_is_no_mapping_of_keys_to_values_is_an_error(tmp_path: Path, text: str | bytes) -> None:
    path = tmp_path / "orch.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    found = problems(OrchSettings, file=path)
    assert {problem.origin for problem in found} == {str(path)}
    assert sum(len(str(problem)) for problem in found) < 3000


@pytest.mark.parametrize(
    ("twice", "key"),
    [("batch_size: 8\nbatch_size: 16\n", "batch_size"), ("sampling: {seed: 1, max_tokens: 3, seed: 1}\n", "seed")],
)
def test_a_key_that_stands_twice_in_a_mapping_is_an_error(orch_file: Path, twice: str, key: str) -> None:
    orch_file.write_text(orch_file.read_text() + twice)
    [problem] = problems(OrchSettings, file=orch_file)
    assert problem.origin == str(orch_file)
    assert key in problem.message


def test_thousands_of_unknown_keys_are_all_named(tmp_path: Path) -> None:
    (tmp_path / "orch.yaml").write_text(yaml.safe_dump(ORCH | {f"key_number_{n}": n for n in range(5000)}))
    assert len(problems(OrchSettings, file=tmp_path / "orch.yaml")) == 5000


@pytest.mark.parametrize("name", [[], {}, None])
def test_a_name_that_is_no_text_is_an_error(name: Any, tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text(yaml.safe_dump({"model": "m", "loss": {"name": name}}))
    assert [one.key for one in problems(TrainSettings, file=tmp_path / "train.yaml")] == ["loss.name"]


def test_a_file_that_is_missing_or_python_is_an_error(tmp_path: Path) -> None:
    [problem] = problems(TrainSettings, file=tmp_path / "none.yaml")
    assert problem.value == str(tmp_path / "none.yaml")
    (tmp_path / "my_env.py").write_text("x = 1\n")
    [problem] = problems(TrainSettings, file=tmp_path / "my_env.py")
    assert "--env my_env.py:CLASS" in problem.message


@pytest.mark.parametrize("key", ["seed", "advantage.type", "model.lora_rank", "traces." + "x" * 100_000, "batch_size"])
def test_values_are_cut_in_messages(orch_file: Path, key: str) -> None:
    [problem] = problems(OrchSettings, f"--{key}", "x" * 100_000, file=orch_file)
    assert len(str(problem)) < 1500


def test_paths_in_a_file_are_relative_to_it_and_ids_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "own.py").touch()
    path = tmp_path / "orch.yaml"
    env = [{"id": "own.py:Task", "args": {"data": "./own.py", "name": "model"}}, {"id": "reverse-text"}]
    path.write_text(yaml.safe_dump(ORCH | {"model": {"name": "model"}, "env": env, "output_dir": "model"}))
    settings = load(OrchSettings, file=path).settings
    assert settings.model.name == str(tmp_path / "model")
    assert [one.id for one in settings.env] == [f"{tmp_path}/own.py:Task", "reverse-text"]
    assert settings.env[0].args == {"data": f"{tmp_path}/own.py", "name": "model"}
    assert settings.output_dir == "model"


@pytest.mark.parametrize("cls", [TrainSettings, InferSettings, OrchSettings])
def test_help_is_short_and_has_every_key(cls: type[TrainSettings], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load_settings(cls, ["--help"])
    assert not ended.value.code
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 86
    assert max(map(len, lines)) <= 120
    for key in cls.model_fields:
        assert any(line.split()[:1] in ([f"--{key}"], [key], [f"{key}[]"]) for line in lines), key


def test_help_goes_deeper_by_section(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_settings(OrchSettings, ["--help", "sampling"])
    text = capsys.readouterr().out
    assert "--sampling.temperature" in text
    assert "--batch_size" not in text
    with pytest.raises(SystemExit) as ended:
        load_settings(OrchSettings, ["--help", "smapling"])
    assert ended.value.code == 2


def test_dry_run_prints_settings_that_load_again(
    orch_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        load_settings(OrchSettings, [str(orch_file), "--dry-run", "--rollout_transport.type", "zmq"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    (tmp_path / "again.yaml").write_text(printed)
    assert dump(load(OrchSettings, file=tmp_path / "again.yaml").settings) == printed

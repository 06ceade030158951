"""`grpo.Run` and `grpo.train`: a run from Python."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from grpo.configs.errors import SettingsError
from grpo.transport.traces import SCHEMA, make_table, trace_path, write_table

import grpo
from grpo.run import command
from grpo.run_files import NoRun
from grpo.start import _texts
from grpo.view.data import curves
from tests.grpo.run_folder import finish, found, says, write_metrics


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = found(tmp_path / "run")
    write_metrics(run)
    return run


def test_metrics_and_evaluations_are_tables_by_step_and_version(folder: Path) -> None:
    run = grpo.Run(folder)
    assert run.metrics["reward/mean"].to_dict() == {1: 0.5, 2: 0.3125}
    assert run.evaluations["eval/accuracy"].to_dict() == {0: 0.5}
    assert (run.metrics.index.name, run.evaluations.index.name) == ("step", "version")
    (folder / "metrics.jsonl").unlink()
    assert len(run.metrics) == len(run.evaluations) == 0
    run.plot()


def test_rollouts_are_a_table_and_a_step_without_any_is_named(folder: Path) -> None:
    write_table(make_table([{"rollout": "0/1", "reward": 0.5, "token_ids": [1, 2]}], SCHEMA), trace_path(folder, 2))
    run = grpo.Run(folder)
    assert run.rollouts(2).iloc[0]["reward"] == 0.5
    assert list(run.rollouts(2).iloc[0]["token_ids"]) == [1, 2]
    with pytest.raises(ValueError, match=r"\[2\]"):
        run.rollouts(3)
    with pytest.raises(ValueError, match="none"):
        run.rollouts(2, evaluation=True)


def test_a_plot_is_a_figure_that_a_notebook_shows(folder: Path) -> None:
    figure: Any = grpo.Run(folder).plot("rollout/num", "eval/accuracy")
    assert [line.get_label() for line in figure.axes[0].lines] == ["rollout/num", "eval/accuracy"]
    assert figure._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="nonsense"):
        grpo.Run(folder).plot("nonsense")


def test_code_that_changed_between_two_starts_is_a_line_in_the_curves(folder: Path) -> None:
    record = json.loads((folder / "run.json").read_text())
    change = {"joined": "then", "step": 3, "key": "code env.0.id my_env.py", "before": "a", "now": "b"}
    record["programs"].setdefault("orch", {})["changes"] = [change]
    (folder / "run.json").write_text(json.dumps(record))
    [axes] = grpo.Run(folder).plot().axes
    assert [list(line.get_xdata()) for line in axes.lines if "my_env.py" in str(line.get_label())] == [[3, 3]]
    assert curves(folder)["changes"] == [(3, ["my_env.py"])]


def test_a_run_that_was_started_elsewhere_is_waited_for_and_not_stopped(folder: Path) -> None:
    for name in ("train", "orch"):
        says(folder, name, "sampling")
    run = grpo.Run(folder)
    assert run.is_running
    with pytest.raises(TimeoutError):
        run.wait(0.01)
    with pytest.raises(ValueError, match="not started here"):
        run.stop()
    finish(folder)
    assert run.wait().summary is not None
    says(folder, "train", "failed", message="ModelError: no such layer")
    with pytest.raises(grpo.RunFailed, match="no such layer"):
        run.wait()


def test_settings_are_given_as_sections_or_with_two_underscores() -> None:
    given = {
        "max_steps": 3,
        "train": {"learning_rate": 1e-3, "loss": {"kl_tau": 0.1}},
        "orch__sampling__max_tokens": 8,
        "orch": {"env": [{"id": "a"}], "advantage": {"type": "custom", "kwargs": {"n": 1}}, "report_to": None},
        "infer": {"vllm": {"max_num_seqs": 4}},
        "lora": False,
        "output_dir": Path("o"),
    }
    assert dict(_texts(given)) == {
        "max_steps": "3",
        "train.learning_rate": "0.001",
        "train.loss.kl_tau": "0.1",
        "orch.sampling.max_tokens": "8",
        "orch.env": '[{"id": "a"}]',
        "orch.advantage.type": "custom",
        "orch.advantage.kwargs": '{"n": 1}',
        "orch.report_to": "null",
        "infer.vllm": '{"max_num_seqs": 4}',
        "lora": "false",
        "output_dir": "o",
    }


@pytest.mark.parametrize(
    "given", [{"nonsense": 1}, {"train": {"learning_rte": 1}}, {"steps": 0}, {"target": "nonesuch"}, {"steps": 2.5}]
)
def test_settings_that_cannot_be_honoured_are_an_error_before_anything_starts(
    given: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(SettingsError) as caught:
        grpo.train(**({"target": "quickstart", "output_dir": tmp_path / "o"} | given))
    assert "command line" not in str(caught.value)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"target": "org/model", "model": "org/other", "env": "a"}, "two models"),
        ({"target": "org/model", "env": "a", "dataset": [{"prompt": "a"}]}, "one of them"),
        ({"target": "org/model", "reward": "exact"}, "give the rows too"),
        ({"target": "org/model", "env": pd.DataFrame([{"prompt": "a"}])}, "dataset=ROWS"),
        ({"target": "org/model", "env": [{"prompt": "a"}]}, "dataset=ROWS"),
        ({"target": "org/model"}, "orch.env"),
        ({"env": "reverse-text"}, "model"),
        ({"target": "org/model", "env": "reverse-text", "num_generations": 8}, "rollouts_per_example"),
    ],
)
def test_what_to_train_and_on_what_is_said_once(
    given: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=said):
        grpo.train(**given)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_cannot_begin_fails_at_once_with_the_last_words_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "o" / "checkpoints").mkdir(parents=True)
    (tmp_path / "o" / "checkpoints" / "x").touch()
    with pytest.raises(grpo.RunFailed, match=r"(?s)exit code 2.*error: .*checkpoints"):
        grpo.train("quickstart", output_dir=tmp_path / "o")


def test_a_folder_without_a_run_and_a_command_that_makes_no_sense_are_errors(tmp_path: Path) -> None:
    with pytest.raises(NoRun):
        grpo.Run(tmp_path)
    with pytest.raises(ValueError, match="no run"):
        command("status", str(tmp_path))

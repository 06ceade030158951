"""What commands share that compare several runs."""

import json
from pathlib import Path

import pytest

from deploy.arguments import ArgumentsError
from deploy.compare import CannotCompare, RunFailed, exit_code_of, last_quarter, mean_and_deviation, steps_of


def raises(error: Exception) -> None:
    raise error


def test_each_way_to_fail_has_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(lambda: None) == 0
    assert exit_code_of(lambda: raises(RunFailed(143))) == 143
    assert capsys.readouterr().err == ""
    assert exit_code_of(lambda: raises(CannotCompare("no metrics"))) == 1
    assert exit_code_of(lambda: raises(ArgumentsError(["--a: wrong", "--b: wrong"]))) == 2
    assert capsys.readouterr().err == (
        "error: no metrics\nerror: command line: --a: wrong\nerror: command line: --b: wrong\n"
    )


def test_steps_are_in_their_order_and_without_evaluations(tmp_path: Path) -> None:
    lines = [{"progress/step": step, "reward/mean": step / 2} for step in (2.0, 1.0)] + [{"progress/step": 2.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [(step, metrics["reward/mean"]) for step, metrics in steps_of(tmp_path).items()] == [(1, 0.5), (2, 1.0)]
    with pytest.raises(CannotCompare, match="nowhere has no metrics of any step"):
        steps_of(tmp_path / "nowhere")


def test_the_last_quarter_is_one_step_at_least_and_leaves_steps_without_the_metric_out() -> None:
    steps = {step: {"a": float(step)} | ({"b": 1.0} if step == 7 else {}) for step in range(1, 9)}
    assert last_quarter(steps, "a") == [7.0, 8.0]
    assert last_quarter(steps, "b") == [1.0]
    assert last_quarter({1: {"a": 5.0}}, "a") == [5.0]


def test_one_value_has_no_deviation() -> None:
    assert mean_and_deviation([2.0]) == (2.0, None)
    mean, deviation = mean_and_deviation([1.0, 3.0])
    assert (mean, deviation) == (2.0, 2**0.5)  # √((1 + 1) / (2 − 1))

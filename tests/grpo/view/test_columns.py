"""Metrics as columns: what was appended, what was written anew, what of a long run is drawn; and what stands out."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo.view.columns import POINTS, MetricColumns, thinned
from grpo.view.findings import findings

STEPS = {"progress/step": np.arange(1.0, 21.0)}


def write(run: Path, *lines: object, mode: str = "a") -> None:
    with (run / "metrics.jsonl").open(mode) as file:
        file.writelines(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)


def test_columns_hold_what_is_appended_and_a_file_that_was_written_anew(tmp_path: Path) -> None:
    columns = MetricColumns(tmp_path)
    assert columns.read() == ({}, {})
    write(tmp_path, {"progress/step": 1, "a": 0.5}, {"progress/step": 0, "eval/failed": 0, "b": 2}, "no JSON\n")
    write(tmp_path, {"progress/step": 2, "a": float("nan"), "c": 1}, '{"progress/step": 3, "a"')
    train, evaluated = columns.read()
    assert train["progress/step"].tolist() == [1, 2]
    assert np.array_equal(train["a"], [0.5, np.nan], equal_nan=True)
    assert np.array_equal(train["c"], [np.nan, 1], equal_nan=True)
    assert evaluated["b"].tolist() == [2]
    write(tmp_path, ": 7}\n")  # the rest of the torn line
    assert columns.read()[0]["a"][-1] == 7
    write(
        tmp_path, {"progress/step": 1, "a": 9.5}, {"progress/step": 2, "a": 1}, {"progress/step": 3, "a": 2}, mode="w"
    )
    assert columns.read()[0]["a"].tolist() == [9.5, 1, 2]
    (tmp_path / "metrics.jsonl").unlink()
    assert columns.read() == ({}, {})


@pytest.mark.parametrize("num", [POINTS, POINTS + 1, 9_999])
def test_a_long_run_is_drawn_with_every_spike_and_a_short_range_of_it_whole(num: int) -> None:
    steps = np.arange(1.0, num + 1)
    values = np.full(num, 0.123456789)
    values[[7, num // 2]] = 50.0, -50.0
    columns = {"progress/step": steps, "a": values, "b": np.where(steps == num, 1.0, np.nan)}
    found = thinned(columns, None, None)
    assert len({len(one) for one in found.values()}) == 1
    assert len(found["a"]) <= POINTS + 2
    known = [value for value in found["a"] if value is not None]
    assert (min(known), max(known)) == (-50, 50)
    assert [value for value in found["b"] if value is not None][-1] == 1
    x = found["progress/step"]
    assert x == sorted(x)
    assert (x[0], x[-1]) == (1, num)
    assert thinned(columns, 5, 10)["a"] == [0.123457, 0.123457, 0.123457, 50, 0.123457, 0.123457]


def told(metrics: dict[str, Any], evaluated: dict[str, Any] | None = None, failures: Any = None) -> list[str]:
    columns = STEPS | {name: np.broadcast_to(np.asarray(value, float), 20) for name, value in metrics.items()}
    held = {name: np.asarray(value, float) for name, value in (evaluated or {}).items()}
    return [one["metric"] for one in findings(columns, held, failures=lambda: failures or {})]


RISING = np.linspace(0.1, 0.9, 20)


@pytest.mark.parametrize(
    ("metrics", "evaluated", "metric"),
    [
        ({"reward/mean": 0, "reward/groups_without_spread": 1}, {}, "reward/groups_without_spread"),
        ({"reward/mean": RISING, "reward/groups_without_spread": 0.7}, {}, "reward/groups_without_spread"),
        ({"reward/mean": RISING}, {"eval/accuracy": [0.5, 0.4]}, "eval/accuracy"),
        ({"reward/mean": RISING[::-1]}, {}, "reward/mean"),
        ({"rollout/truncated": 0.6, "rollout/num_tokens_max": 64}, {}, "rollout/truncated"),
        ({"policy/entropy": np.geomspace(1, 1e-3, 20), "reward/accuracy": 0.3}, {}, "policy/entropy"),
        ({"policy/masked": 0.4}, {}, "policy/masked"),
        ({"policy/mismatch_kl_lag0": 0.1}, {}, "policy/mismatch_kl_lag0"),
        ({"rollout/dropped": 10, "rollout/num": 30}, {}, "rollout/dropped"),
        ({"pairs/judge_asked": 9, "pairs/judge_answered": 1}, {}, "pairs/judge_asked"),
    ],
)
def test_what_keeps_a_run_from_learning_stands_out(
    metrics: dict[str, Any], evaluated: dict[str, Any], metric: str
) -> None:
    assert told(metrics, evaluated) == [metric]


def test_nothing_stands_out_of_a_run_that_learns() -> None:
    metrics = {"reward/mean": RISING, "reward/groups_without_spread": 0.2, "rollout/truncated": 0.01, "rollout/num": 64}
    metrics |= {"policy/entropy": np.geomspace(1, 0.5, 20), "rollout/dropped": 0, "reward/accuracy": RISING}
    assert told(metrics, {"eval/accuracy": [0.1, 0.9]}) == []
    assert findings({}, {}, failures=dict) == []


@pytest.mark.parametrize(
    "metrics",
    [
        {"reward/mean": 0, "reward/groups_without_spread": 1, "policy/teacher_kl": 0.5},
        {"rollout/truncated": 1, "rollout/num_tokens_mean": 2.2, "rollout/num_turns": 2.2},
        {"reward/mean": 0.1 * RISING[::-1], "reward/std": 1.7},
    ],
    ids=["a teacher alone teaches", "moves of one token", "a game's reward is noise about 0"],
)
def test_what_looks_like_a_failure_and_is_none_does_not_stand_out(metrics: dict[str, Any]) -> None:
    assert told(metrics, {"eval/accuracy": [0.1, 0.9]}) == []


def test_of_a_policy_that_falls_apart_the_fall_comes_first_and_its_consequences_are_no_causes() -> None:
    late = np.repeat([0.0, 1.0], [3, 17])
    metrics = {"reward/mean": 0.6 * (1 - late), "reward/groups_without_spread": late, "rollout/truncated": late}
    assert told(metrics) == ["reward/mean", "rollout/truncated"]


@pytest.mark.parametrize(
    ("equal", "told"), [(7, "7 answers of the newest step are the right ones"), (0, "Read answers")]
)
def test_a_reward_that_refuses_right_answers_is_told(equal: int, told: str) -> None:
    columns = STEPS | {"reward/mean": np.zeros(20), "reward/groups_without_spread": np.ones(20)}
    [one] = findings(columns, {}, failures=dict, num_equal=lambda: equal)
    assert told in one["do"]


def test_the_reasons_of_dropped_rollouts_are_told_with_their_errors() -> None:
    columns = STEPS | {"rollout/dropped": np.full(20, 10.0), "rollout/num": np.full(20, 30.0)}
    [one] = findings(columns, {}, failures=lambda: {"env_error": (7, "the judge answered 503")})
    assert "7 env_error" in one["text"]
    assert "503" in one["text"]

"""`metrics.jsonl`: one line a step, and what stays of it where a run goes back."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from grpo.orchestrator.monitoring import metrics
from grpo.orchestrator.monitoring.metrics import NAMES, Figures, MetricsFile, batch_metrics, found_metrics
from grpo.orchestrator.samples import ScoredGroup

from tests.orchestrator import made

DOCS = Path(__file__).parents[2] / "docs"


def test_what_is_no_line_of_metrics_goes_and_so_do_later_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"progress/step": step, "reward/mean": 0.5}) for step in (1, 2, 3)]
    path.write_text("\n".join([lines[0], "{}", "[1]", "5", lines[1], lines[2], lines[2][:9]]))
    file = MetricsFile(path)
    assert [line["progress/step"] for line in file.cut_after(2)] == [1, 2]
    file.write({"progress/step": 3})
    file.close()
    assert [json.loads(line)["progress/step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_a_metric_without_a_name_of_the_table_is_refused(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write({"progress/step": 1.0, "eval/pass@4/a/b.py:Env": 0.5, "policy/mismatch_kl_lag12": 0.0})
    for key in ("speed", "reward/speed", "policy/entropies", "eval/pass@"):
        with pytest.raises(ValueError, match=key):
            file.write({key: 1.0})
    file.close()


def test_a_batchs_metrics_are_means_over_rollouts_with_what_they_spawned() -> None:
    child = made.result("0/0.0", made.step(version=1), metrics={"tries": 3.0})
    parent = made.result("0/0", made.step(version=1), rewards=1.0, metrics={"tries": 1.0}, children=(child,))
    other = made.result("0/1", made.step(version=3), made.step(version=3))
    group = ScoredGroup(results=[parent, other], samples=(), found=["gibberish"], withheld={})
    found = batch_metrics([group], 5) | found_metrics([group], ["gibberish", "repetition"])
    expected = {
        "reward/mean": 0.5,
        "reward/mean/e": 0.5,
        "reward/groups_without_spread": 0,
        "reward/measure/tries/e": 2,  # (1 + 3) / 2
        "rollout/num": 2,
        "rollout/num_turns": 2,  # 1 + 1 + 2 answers of two rollouts
        "policy/lag_mean": 2,  # batch 5 follows version 4: lags 3 and 1
        "policy/lag_max": 3,
        "rollout/found_gibberish": 0.5,
        "rollout/found_repetition": 0,
    }
    assert {key: found[key] for key in expected} == expected


def test_a_step_has_what_was_counted_since_the_step_before() -> None:
    def figures(dropped: Counter[str], mean: tuple[float, float], value: float) -> Figures:
        means = {"reward/overlong_penalty": mean, "perf/server_running": (0.0, 0.0)}
        return metrics.all_figures(
            [metrics.dropped_figures(dropped), Figures(means=means, values={"pairs/cost": value})]
        )

    now, before = Counter(env_error=3, stale=1), Counter(env_error=2)
    assert figures(now, (5.0, 4), 7.0).since(figures(before, (2.0, 2), 6.0)) == {
        "rollout/dropped": 2,
        "rollout/dropped_env_error": 1,
        "rollout/dropped_stale": 1,
        "reward/overlong_penalty": 1.5,
        "pairs/cost": 7,
    }


def test_the_pages_tell_what_every_metric_means_and_of_no_other() -> None:
    pages = [(DOCS / f"{name}.md").read_text() for name in ("metrics", "auxiliary_losses", "environments", "servers")]
    groups = "|".join({name.partition("/")[0] for name in NAMES})
    of_lists = rf"^- ((?:`(?:{groups})/[^`]+`,?\s+)*`(?:{groups})/[^`]+`): "
    of_tables = rf"^\| (`(?:{groups})/.*?`) \|"
    found = [one for pattern in (of_lists, of_tables) for one in re.findall(pattern, "\n".join(pages), flags=re.M)]
    told = {name for names in found for name in re.findall("`([^`]+)`", names)}
    for name in told:
        metrics.check_name(name)
    untold = [name for name in NAMES if not any(re.fullmatch(re.sub("[A-Z]+", ".+", name), one) for one in told)]
    assert untold == []

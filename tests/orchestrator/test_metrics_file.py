"""`metrics.jsonl`: one line a step, and what stays of it where a run goes back."""

import json
from pathlib import Path

import pytest

from orchestrator.monitoring.metrics import MetricsFile


def test_what_is_no_line_of_metrics_goes_and_so_do_later_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"progress/step": step, "reward/mean": 0.5}) for step in (1, 2, 3)]
    path.write_text("\n".join([lines[0], "{}", "[1]", "5", lines[1], lines[2], lines[2][:9]]))
    file = MetricsFile(path)
    assert [line["progress/step"] for line in file.cut_after(2)] == [1, 2]
    file.write({"progress/step": 3})
    file.close()
    assert [json.loads(line)["progress/step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_a_metric_of_no_group_is_refused(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="'speed'"):
        file.write({"speed": 1.0})
    file.close()

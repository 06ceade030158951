"""The timeline of a run: what is written, what is read again, and that it stays cheap and small."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
from grpo.orchestrator.ledger import Ledger
from grpo.orchestrator.monitoring.timeline import Span, Timeline, covered_s, merged, read_timeline


def span(who: str, what: str, start_s: float, end_s: float, step: int | None = None) -> Span:
    return Span(who=who, what=what, start_s=start_s, end_s=end_s, step=step)


def test_the_file_is_a_list_of_chrome_trace_events_without_its_end(tmp_path: Path) -> None:
    for start_s in (1.0, 2.0):
        timeline = Timeline(tmp_path)
        timeline.add("grpo-orch", "pack", start_s=start_s, end_s=start_s + 0.5, step=3)
        timeline.close()
    text = (tmp_path / "timeline.jsonl").read_text()
    name, event, *_ = json.loads(text.rstrip(",\n") + "]")
    assert (name["ph"], name["args"]) == ("M", {"name": "grpo-orch"})
    assert (event["name"], event["ph"], event["ts"], event["dur"]) == ("pack", "X", 1_000_000, 500_000)
    assert event["pid"] == name["pid"]


def test_generation_is_told_from_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ledger, timeline = Mock(return_value=100.0), Ledger(tmp_path / "ledger.sqlite"), Timeline(tmp_path)
    monkeypatch.setattr("grpo.orchestrator.ledger.time.time", clock)

    def issued(at_s: float, group: int, num: int = 1) -> None:
        clock.return_value = at_s
        ledger.issued(group, num=num, env="e", example=0, version=0)

    def scored(at_s: float, rollout_id: str) -> None:
        clock.return_value = at_s
        ledger.scored(rollout_id, reward=1.0, num_tokens=1)

    issued(100.0, 0, num=2)
    scored(100.5, "0/0")
    scored(101.0, "0/1")
    issued(102.0, 1)
    issued(103.0, 2)
    scored(104.0, "1/0")
    clock.return_value = 105.0
    ledger.dropped(["2/0"], "env_error")
    issued(110.0, 3)
    clock.return_value = 111.0  # which group 3 is sampled beyond
    assert timeline.generated(1, ledger.span_s(["0/0", "1/0"]), ledger.sampled_s()) == 5.0
    scored(112.5, "3/0")
    clock.return_value = 120.0
    assert timeline.generated(2, ledger.span_s(["3/0"]), ledger.sampled_s()) == 1.5
    assert ledger.sampled_s() == []
    timeline.close()
    ledger.close()
    assert read_timeline(tmp_path) == [
        span("grpo-infer", "generate", 100.0, 104.0, step=1),
        *(span("grpo-infer", "busy", *times) for times in ((100.0, 101.0), (102.0, 105.0), (110.0, 111.0))),
        span("grpo-infer", "generate", 110.0, 112.5, step=2),
        span("grpo-infer", "busy", 111.0, 112.5),
    ]


def test_spans_that_overlap_or_almost_touch_are_one() -> None:
    spans = [(5.0, 6.0), (1.0, 3.0), (2.0, 2.5), (3.01, 4.0)]
    assert merged(spans, min_break_s=0.02) == [(1.0, 4.0), (5.0, 6.0)]
    assert merged(spans) == [(1.0, 3.0), (3.01, 4.0), (5.0, 6.0)]
    assert covered_s([span("a", "b", *one) for one in spans]) == pytest.approx(3.99)


def test_a_step_of_the_trainer_comes_with_its_metrics(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path)
    times = {"time/train_s": 2.0, "time/train_at_s": 50.0, "time/wait_batch_s": 1.0, "time/wait_batch_at_s": 49.0}
    timeline.trained(3, times | {"time/publish_s": 0.5, "time/publish_at_s": 48.5, "time/load_s": 9.0})
    timeline.trained(4, {"time/train_s": 2.0, "time/publish_s": 0.0, "time/publish_at_s": 0.0})
    timeline.close()
    assert read_timeline(tmp_path) == [
        span("grpo-train", "publish", 48.5, 49.0, step=2),
        span("grpo-train", "wait", 49.0, 50.0, step=3),
        span("grpo-train", "train", 50.0, 52.0, step=3),
    ]

"""The timeline of a run: what is written, what is read again, and that it stays cheap and small."""

import json
from pathlib import Path

import pytest
from grpo.orchestrator.monitoring.timeline import Span, Timeline, read_timeline

from tests.orchestrator.fakes import FakeServer
from tests.orchestrator.running import run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The wall clock, to be set."""
    now_s = [100.0]
    monkeypatch.setattr("grpo.orchestrator.monitoring.timeline.time.time", lambda: now_s[0])
    return now_s


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


def test_a_group_counts_for_its_batch_from_the_first_start_to_the_last_end(tmp_path: Path, clock: list[float]) -> None:
    timeline = Timeline(tmp_path)
    with timeline.group(0):
        clock[0] = 101.0
    clock[0] = 102.0
    with timeline.group(1):
        clock[0] = 104.0
    clock[0] = 110.0
    with timeline.group(2):
        clock[0] = 111.0
    timeline.came_to_nothing(2)
    timeline.generated(1, [0, 1])
    timeline.close()
    assert read_timeline(tmp_path) == [
        span("grpo-infer", "generate", 100.0, 104.0, step=1),
        span("grpo-infer", "busy", 100.0, 101.0),
        span("grpo-infer", "busy", 102.0, 104.0),
        span("grpo-infer", "busy", 110.0, 111.0),
    ]


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


async def test_a_run_tells_who_did_what_for_each_step(tmp_path: Path, server: FakeServer) -> None:
    await run(tmp_path, server)
    spans = read_timeline(tmp_path)
    steps = {what: [one.step for one in spans if one.what == what] for what in ("load", "generate", "pack", "ship")}
    assert steps == {"load": [0, 1, 2, 3], "generate": [1, 2, 3], "pack": [1, 2, 3], "ship": [1, 2, 3]}
    assert [one.step for one in spans if one.what == "evaluate"] == [0, 3]
    assert {one.who for one in spans if one.what in ("load", "busy")} - {"grpo-infer"} == {
        f"grpo-infer {server.url.removesuffix('/v1')}"
    }
    generated = {one.step: one for one in spans if one.what == "generate"}
    for shipped in [one for one in spans if one.what == "ship"]:
        assert generated[shipped.step].end_s <= shipped.start_s
    assert all(one.seconds >= 0 for one in spans)

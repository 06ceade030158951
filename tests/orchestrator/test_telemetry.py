"""Spans and metrics, as a collector of OTLP and a Prometheus get them: by HTTP, decoded with OpenTelemetry's schema."""

import gzip
import json
import re
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from grpo.configs.reporting import ReportSettings
from grpo.orchestrator.monitoring.timeline import Timeline
from grpo.orchestrator.monitoring.trackers import TRACKERS, Reporter, check_reports
from grpo.transport.ports import free_port
from grpo.transport.run import create_run
from grpo.transport.status import StatusFile

from tests.orchestrator.fakes import FakeServer
from tests.orchestrator.running import run

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra telemetry is not installed")
pytest.importorskip("prometheus_client", reason="the extra telemetry is not installed")
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families


class Collector:
    """Takes what is sent to it, or refuses all."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.metrics: list[Any] = []
        self.status = 200
        got = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
                if got.status == 200 and self.path == "/v1/traces":
                    got._traces(ExportTraceServiceRequest.FromString(body))
                elif got.status == 200 and self.path == "/v1/metrics":
                    got._metrics(ExportMetricsServiceRequest.FromString(body))
                self.send_response(got.status)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def _traces(self, request: Any) -> None:
        for resource in request.resource_spans:
            about = {one.key: one.value.string_value for one in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [(about, span) for span in scope.spans]

    def _metrics(self, request: Any) -> None:
        for resource in request.resource_metrics:
            for scope in resource.scope_metrics:
                self.metrics += scope.metrics

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    made = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{made.server.server_port}")
    yield made
    made.close()


async def test_each_step_of_a_run_is_a_trace_of_the_programs_that_made_it(
    tmp_path: Path, server: FakeServer, collector: Collector
) -> None:
    made = await run(tmp_path / "my-run", server, max_steps=4, report_to={"to": ["otlp"], "project": "team"})
    roots = {span.span_id: span for _, span in collector.spans if span.name == "rl.loop"}
    below = [(about, span) for about, span in collector.spans if span.parent_span_id]
    iteration = {one: next(a.value.int_value for a in root.attributes if a.key == "rl.loop.iteration")
                 for one, root in roots.items()}  # fmt: skip
    for step in (1, 2, 3, 4):
        [root] = [one for one, number in iteration.items() if number == step]
        own = [(about, span) for about, span in below if span.parent_span_id == root]
        names = {(about["service.name"], span.name) for about, span in own}
        assert {("grpo-infer", "rl.sample"), ("grpo-infer", "rl.sync"), ("grpo-orch", "grpo.ship")} <= names
        for about, span in own:
            assert span.trace_id == roots[root].trace_id
            assert roots[root].start_time_unix_nano <= span.start_time_unix_nano
            assert span.start_time_unix_nano <= span.end_time_unix_nano <= roots[root].end_time_unix_nano
            assert (about["rl.system"], about["rl.run.id"]) == ("grpo", made.summary.run_id)
            assert about["service.namespace"] == "team"
    found = {one.name: one for one in collector.metrics}
    assert found["grpo.reward.mean"].gauge.data_points[0].as_double == made.summary.reward_last
    assert found["rl.loop.duration"].unit == "s"
    assert found["rl.loop.duration"].histogram.data_points[0].count == 4


def test_spans_of_a_resumed_run_are_sent_once_and_a_torn_line_waits_for_its_end(
    tmp_path: Path, collector: Collector
) -> None:
    folder = create_run(tmp_path / "run", overwrite=False)
    timeline = Timeline(folder.path)

    def trained(step: int) -> None:
        timeline.add("grpo-train", "train", start_s=float(step), end_s=step + 0.5, step=step)
        timeline.flush()

    file = folder.path / "timeline.jsonl"
    opened = threading.Event()

    def slow(*about: Any) -> Any:
        assert opened.wait(60)
        return TRACKERS["otlp"](*about)

    trained(1)
    reporter = Reporter(folder, ReportSettings(to=["otlp"]), trackers={"otlp": slow})
    trained(2)
    trained(3)
    opened.set()
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    reporter.metrics({"progress/step": 9.0, "reward/mean": 0.5})
    while not any(span.name == "rl.train" for _, span in collector.spans):
        time.sleep(0.01)
    file.write_bytes(whole)
    reporter.end(None)
    starts = [span.start_time_unix_nano for _, span in collector.spans if span.name == "rl.train"]
    assert starts == [2_000_000_000, 3_000_000_000]


def test_what_no_collector_takes_is_lost_and_counted(
    tmp_path: Path, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.status = 400  # of which OTLP says that it is not tried again
    reporter = Reporter(create_run(tmp_path / "run", overwrite=False), ReportSettings(to=["otlp"]))
    reporter.metrics({"progress/step": 1.0, "reward/mean": 0.5})
    reporter.end(None)
    assert reporter.num_lost == 1
    assert "did not take the metrics" in caplog.text


def test_prometheus_reads_the_newest_metrics_and_what_each_program_does(tmp_path: Path) -> None:
    folder, port = create_run(tmp_path / "my-run", overwrite=False), free_port()
    for name, state, step in (("train", "waiting", 3), ("infer.127.0.0.1_8000", "serving", 2)):
        StatusFile(folder.status / f"{name}.json").set(state, step=step)
    reporter = Reporter(folder, ReportSettings(to=["prometheus"], prometheus_port=port))
    reporter.metrics({"progress/step": 1.0, "reward/mean": 0.25, "reward/mean/words": 0.5, "eval/pass@2/words": 1.0})
    reporter.metrics({"progress/step": 2.0, "reward/mean": 0.75})
    waiting = threading.Event()
    while reporter.num_lost:
        waiting.wait(0.01)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    reporter.end({})
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    values = {(one.name, one.labels.get("of") or one.labels.get("program")): one.value for one in samples}
    assert values["grpo_reward_mean", None] == 0.75
    assert values["grpo_reward_mean", "words"] == 0.5
    assert values["grpo_eval_pass_2", "words"] == 1.0
    assert values["grpo_program_step", "train"] == 3
    states = {(one.labels["program"], one.labels["state"]) for one in samples if one.name == "grpo_program_state"}
    assert states == {("train", "waiting"), ("infer.127.0.0.1_8000", "serving")}
    assert {one.labels["run"] for one in samples} == {"my-run"}
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30)


def test_another_protocol_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(ValueError, match=r"http/protobuf.*grpc"):
        check_reports(ReportSettings(to=["otlp"]))


def test_every_metric_on_the_board_is_one_that_is_there() -> None:
    from grpo.orchestrator.monitoring.metrics import check_name

    board = json.loads((Path(__file__).parents[2] / "deploy/grafana.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]

    names = {name for one in asked for name in re.findall(r"\bgrpo_(?!program_)(\w+)", one)}
    assert len(names) > 10
    for name in names:
        check_name(name.replace("_", "/", 1))

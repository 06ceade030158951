"""A run in a company's tools: spans and metrics by OTLP, and metrics for Prometheus.

Names of spans and of what they have in common are those that are proposed as `rl.*` semantic conventions
(https://github.com/open-telemetry/semantic-conventions-genai/issues/88, open): a step of training is a trace whose root
is `rl.loop`, with `rl.sample`, `rl.train` and `rl.sync` below it, each of the program that did it. Other work has names
of our own, `grpo.*`. Spans are read from the run's timeline, so that no loop does anything for them.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo.configs.reporting import ReportSettings
from grpo.orchestrator.monitoring.samples import Rollouts
from grpo.orchestrator.monitoring.timeline import ORCHESTRATOR, TIMELINE_FILE, Span, parsed
from grpo.transport.run import RunFolder, recorded_settings
from grpo.transport.status import read_status
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricExportResult
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace import Tracer, set_span_in_context
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric

SPANS = {
    "generate": "rl.sample",
    "train": "rl.train",
    "load": "rl.sync",
    "publish": "rl.sync",
    "evaluate": "grpo.evaluate",
    "pack": "grpo.pack",
    "ship": "grpo.ship",
    "wait": "grpo.wait",
    "sleep": "grpo.sleep",
}
"""Names of spans by what the timeline calls them. The times in which servers are busy overlap all steps, and are left
out."""
DURATIONS = {
    "time/step_s": "rl.loop.duration",
    "time/generate_s": "rl.sample.duration",
    "time/train_s": "rl.train.duration",
    "time/load_s": "rl.sync.duration",
}
"""Histograms of seconds, besides the gauges that all metrics are."""


class NotTaken(RuntimeError):
    """The collector did not take what was sent."""


class _Kept(SpanProcessor):
    """Keeps spans that are over until they are sent."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


class Otlp:
    """Sends spans and metrics by OTLP over HTTP, to where the environment variables of OpenTelemetry say
    (`OTEL_EXPORTER_OTLP_ENDPOINT`, http://localhost:4318 by default, `OTEL_EXPORTER_OTLP_HEADERS` …)."""

    def __init__(self, run: RunFolder, settings: ReportSettings, num_old_bytes: int) -> None:
        """`num_old_bytes` of the timeline are of before, and have been sent."""
        self._run, self._about = run, _about(run, settings)
        self._spans, self._metrics = OTLPSpanExporter(), OTLPMetricExporter()
        self._kept = _Kept()
        self._tracers: dict[str, Tracer] = {}
        self._reader = InMemoryMetricReader()
        meter = MeterProvider([self._reader], resource=self._resource(ORCHESTRATOR)).get_meter("grpo")
        self._durations = {key: meter.create_histogram(name, unit="s") for key, name in DURATIONS.items()}
        self._gauge = meter.create_gauge
        self._gauges: dict[str, Any] = {}
        self._path = run.path / TIMELINE_FILE
        self._read = num_old_bytes
        self._steps: dict[int, list[Span]] = defaultdict(list)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends one line of metrics, and the spans of steps before it."""
        for key, value in metrics.items():
            if key not in self._gauges:
                self._gauges[key] = self._gauge("grpo." + key.replace("/", "."))
            self._gauges[key].set(value)
        for key, histogram in self._durations.items():
            if key in metrics:
                histogram.record(metrics[key])
        self._send_spans(before=step - 1)  # publishing a version is known with the step after it
        data = self._reader.get_metrics_data()
        if data is not None and self._metrics.export(data) is not MetricExportResult.SUCCESS:
            raise NotTaken("the OTLP collector did not take the metrics; see the log for what it said")

    def log_rollouts(self, rollouts: Rollouts) -> None:
        """Texts and distributions are not sent."""

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Sends the last steps."""
        try:
            self._send_spans(before=None)
        finally:
            self._spans.shutdown()  # type: ignore[no-untyped-call]
            self._metrics.shutdown()

    def _send_spans(self, *, before: int | None) -> None:
        """Sends the traces of all steps before one; None: of all. Evaluations, which go on beside steps, have traces of
        their own."""
        for span in self._new():
            if span.what == "evaluate":
                self._span(span).end(_ns(span.end_s))
            elif span.step is not None and span.what in SPANS:
                self._steps[span.step].append(span)
        for step in sorted(one for one in self._steps if before is None or one < before):
            self._trace(step, self._steps.pop(step))
        spans, self._kept.spans = self._kept.spans, []
        if spans and self._spans.export(spans) is not SpanExportResult.SUCCESS:
            raise NotTaken("the OTLP collector did not take the spans; see the log for what it said")

    def _new(self) -> Iterator[Span]:
        """Yields what the timeline has got since the last time, in whole lines."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            lines = file.read()
        whole = lines[: lines.rfind(b"\n") + 1]
        self._read += len(whole)
        yield from (span for line in whole.splitlines() if (span := parsed(line)) is not None)

    def _trace(self, step: int, spans: list[Span]) -> None:
        root = self._tracer(ORCHESTRATOR).start_span(
            "rl.loop",
            start_time=_ns(min(one.start_s for one in spans)),
            attributes={"rl.loop.iteration": step},
        )
        for one in spans:
            self._span(one, set_span_in_context(root)).end(_ns(one.end_s))
        root.end(_ns(max(one.end_s for one in spans)))

    def _span(self, one: Span, context: Context | None = None) -> OtelSpan:
        program, _, server = one.who.partition(" ")
        attributes: dict[str, Any] = {"grpo.what": one.what}
        attributes |= {} if one.step is None else {"rl.loop.iteration": one.step}
        attributes |= {"server.address": server} if server else {}
        name, start = SPANS[one.what], _ns(one.start_s)
        return self._tracer(program).start_span(name, context, start_time=start, attributes=attributes)

    def _tracer(self, program: str) -> Tracer:
        if program not in self._tracers:
            provider = TracerProvider(resource=self._resource(program))
            provider.add_span_processor(self._kept)
            self._tracers[program] = provider.get_tracer("grpo")
        return self._tracers[program]

    def _resource(self, program: str) -> Resource:
        return Resource.create({"service.name": program, "service.instance.id": self._run.run_id, **self._about})


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)


def _about(run: RunFolder, settings: ReportSettings) -> dict[str, Any]:
    """Returns the attributes that all of a run has in common."""
    orch = recorded_settings(run.path, "orch") or {}
    environments = sorted({str(one.get("name") or one.get("id")) for one in orch.get("env", [])})
    return {
        "rl.system": "grpo",
        "rl.run.id": run.run_id,
        "rl.algorithm": "grpo",
        "rl.model.name": Path(str(orch.get("model", {}).get("name", ""))).name,
        "rl.environment.name": environments,
        "service.namespace": settings.project,
        "grpo.run.name": settings.name or run.path.resolve().name,
    }


class Prometheus:
    """Answers GET /metrics while the run goes on: the newest value of each metric, and the state of each program."""

    def __init__(self, run: RunFolder, settings: ReportSettings) -> None:
        self._folder, self._newest = run.path, dict[str, float]()
        self._labels = {"run": settings.name or run.path.resolve().name, "run_id": run.run_id}
        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(
            settings.prometheus_port, addr=settings.prometheus_host, registry=registry
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes one line of metrics."""
        self._newest = {**self._newest, **metrics}

    def log_rollouts(self, rollouts: Rollouts) -> None:
        """Texts and distributions have no place there."""

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Closes the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[Metric]:
        """Yields what /metrics shows. `reward/mean/ENV` is `grpo_reward_mean` with the label `of="ENV"`."""
        families: dict[str, GaugeMetricFamily] = {}
        names = ("run", "run_id", "of")
        for key, value in self._newest.items():
            group, _, rest = key.partition("/")
            name, _, of = rest.partition("/")
            title = "grpo_" + "".join(one if one.isalnum() else "_" for one in f"{group}_{name}")
            if title not in families:
                families[title] = GaugeMetricFamily(title, f"{group}/{name}, see `grpo docs metrics`", labels=names)
            families[title].add_metric((*self._labels.values(), of), value)
        yield from families.values()
        yield from self._programs()

    def _programs(self) -> Iterator[Metric]:
        names = ("run", "run_id", "program")
        state = GaugeMetricFamily(
            "grpo_program_state", "1 for the state that a program is in", labels=(*names, "state")
        )
        step = GaugeMetricFamily("grpo_program_step", "The step that a program is at", labels=names)
        for path in sorted((self._folder / "status").glob("*.json")):
            if (fields := read_status(path)) is not None and isinstance(fields.get("state"), str):
                labels = (*self._labels.values(), path.stem)
                state.add_metric((*labels, fields["state"]), 1)
                if isinstance(fields.get("step"), int):
                    step.add_metric(labels, fields["step"])
        yield state
        yield step

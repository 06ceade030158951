"""Settings of what is written down beside metrics, on this machine and in experiment trackers."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from grpo.configs.common import Conflicts, Listed, OnlyWith, Section
from pydantic import Field, PositiveInt, model_validator


class TraceSettings(Section):
    """Which rollouts are kept token by token, in `traces/`, for `grpo view` and for analysis."""

    every: PositiveInt | None = 1
    """Steps between traces; the first step and evaluations are always traced (null: no traces)."""
    keep_last: Annotated[PositiveInt | None, OnlyWith("every")] = None
    """Newest steps whose traces stay (null: as many as `max_bytes` allows)."""
    max_bytes: Annotated[PositiveInt, OnlyWith("every")] = 4_000_000_000
    """Size of all steps' traces in bytes; the oldest are removed."""


TrackerName = Literal["wandb", "tensorboard", "otlp", "prometheus"]
TRACKER_EXTRAS: Mapping[TrackerName, Literal["wandb", "tensorboard", "telemetry"]] = {
    "wandb": "wandb",
    "tensorboard": "tensorboard",
    "otlp": "telemetry",
    "prometheus": "telemetry",
}
"""The extra of the package that a tracker needs."""


class ReportSettings(Section):
    """What is reported to experiment trackers: the metrics of every step, settings that cannot be secrets, and on
    demand answers and distributions. Without it nothing leaves the machine."""

    to: Annotated[Listed[TrackerName], Field(min_length=1)] = ("wandb",)
    """Trackers (extras wandb, tensorboard, telemetry). otlp is OpenTelemetry, to `OTEL_EXPORTER_OTLP_ENDPOINT`;
    prometheus answers GET /metrics."""
    project: str = Field(default="grpo", min_length=1)
    """The tracker's project."""
    name: str | None = Field(default=None, min_length=1)
    """Name of the run (null: that of the run's folder)."""
    offline: Annotated[bool, OnlyWith("to", "wandb")] = False
    """W&B writes to the run's folder only, for a later `wandb sync`."""
    prometheus_host: Annotated[str, OnlyWith("to", "prometheus"), Field(min_length=1)] = "127.0.0.1"
    """Address for Prometheus, without a key."""
    prometheus_port: Annotated[int, OnlyWith("to", "prometheus"), Field(ge=1, le=65535)] = 9464
    """Port for Prometheus."""
    samples: PositiveInt | None = None
    """Number of rollouts to report with prompt, answer and reward (null: none)."""
    distributions: bool | None = None
    """Reports histograms of rewards, advantages and lengths (null: none)."""
    interval: PositiveInt = 10
    """Steps between reports of samples and distributions."""

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, given: Any) -> Any:
        """A tracker's name stands for all that is said of it by default."""
        return {"to": given} if isinstance(given, str) else given

    def conflicts(self) -> Conflicts:
        if "interval" in self.changed and self.samples is None and not self.distributions:
            yield "interval", "has no effect without samples or distributions; metrics are reported every step"

"""Settings of what is written down beside metrics, on this machine and in experiment trackers."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from grpo.configs.common import Conflicts, Listed, OnlyWith, Section
from pydantic import Field, PositiveInt, model_validator


class TraceSettings(Section):
    """Which rollouts are kept token by token, in `traces/`, for `grpo view` and for analysis."""

    every: PositiveInt | None = 1
    """Steps between two that are kept, the first one and all evaluations besides (null: nothing is kept)."""
    keep_last: Annotated[PositiveInt | None, OnlyWith("every")] = None
    """Number of the newest steps whose traces stay (null: all that `max_bytes` leaves room for)."""
    max_bytes: Annotated[PositiveInt, OnlyWith("every")] = 4_000_000_000
    """Bytes that the traces of steps may take together; the oldest are removed."""


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
    """Trackers: wandb (Weights & Biases), tensorboard (files in the run's folder), each an extra of the same name;
    otlp (OpenTelemetry: spans and metrics, to where `OTEL_EXPORTER_OTLP_ENDPOINT` says) and prometheus (GET /metrics),
    both in the extra telemetry."""
    project: str = Field(default="grpo", min_length=1)
    """Project that the run belongs to."""
    name: str | None = Field(default=None, min_length=1)
    """Name of the run (null: that of the run's folder)."""
    offline: Annotated[bool, OnlyWith("to", "wandb")] = False
    """W&B writes to the run's folder only, for `wandb sync` to upload later; needs no network and no key."""
    prometheus_host: Annotated[str, OnlyWith("to", "prometheus"), Field(min_length=1)] = "127.0.0.1"
    """Address on which the orchestrator answers Prometheus; nobody needs a key to read there."""
    prometheus_port: Annotated[int, OnlyWith("to", "prometheus"), Field(ge=1, le=65535)] = 9464
    """Port of `prometheus_host`."""
    samples: PositiveInt | None = None
    """Number of rollouts of a step that are reported with prompt, answer and reward (null: none)."""
    distributions: bool | None = None
    """Histograms of a step's rewards, advantages and lengths are reported (null: none)."""
    interval: PositiveInt = 10
    """Steps between two reports of samples and distributions. Metrics are reported at every step."""

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, given: Any) -> Any:
        """A tracker's name stands for all that is said of it by default."""
        return {"to": given} if isinstance(given, str) else given

    def conflicts(self) -> Conflicts:
        if "interval" in self.changed and self.samples is None and not self.distributions:
            yield "interval", "has no effect without samples or distributions; metrics are reported every step"

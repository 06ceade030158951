"""Settings of what is written down beside metrics, on this machine and in experiment trackers."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from configs.common import Listed, OnlyWith, Section


class TraceSettings(Section):
    """Which rollouts are kept token by token, in `traces/`, for `grpo view` and for analysis."""

    every: PositiveInt | None = 1
    """Steps between two that are kept, the first one and all evaluations besides (null: nothing is kept)."""
    keep_last: Annotated[PositiveInt | None, OnlyWith("every")] = None
    """Number of the newest steps whose traces stay (null: all that `max_bytes` leaves room for)."""
    max_bytes: Annotated[PositiveInt, OnlyWith("every")] = 4_000_000_000
    """Bytes that the traces of steps may take together; the oldest are removed."""


TrackerName = Literal["wandb", "tensorboard", "trackio"]


class ReportSettings(Section):
    """What is reported to experiment trackers: the metrics of every step, and settings that cannot be secrets. Without
    it nothing leaves the machine."""

    to: Annotated[Listed[TrackerName], Field(min_length=1)] = ("wandb",)
    """Trackers: wandb (Weights & Biases), tensorboard (files in the run's folder; needs tensorboardX), trackio."""
    project: str = Field(default="grpo", min_length=1)
    """Project that the run belongs to."""
    name: str | None = Field(default=None, min_length=1)
    """Name of the run (null: that of the run's folder)."""
    offline: Annotated[bool, OnlyWith("to", "wandb")] = False
    """W&B writes to the run's folder only, for `wandb sync` to upload later; needs no network and no key."""

"""Settings of what is written down beside metrics, on this machine and in experiment trackers."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from configs.common import Section, changed_fields


class ConversationSettings(Section):
    """Whole conversations of rollouts, `conversations/step_N.jsonl` in the run's folder: a line for each rollout, with
    every message, answer, reward and error."""

    interval: PositiveInt | None = 10
    """Of every so many batches, and of the first one (null: of none)."""
    num_groups: PositiveInt = 1
    """Of so many groups of such a batch."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Keys that have no effect."""
        if self.interval is None and "num_groups" in changed_fields(self):
            yield "conversations.num_groups", "has no effect with conversations.interval: null; remove one"


TrackerName = Literal["wandb", "tensorboard", "trackio"]


class ReportSettings(Section):
    """What is reported to experiment trackers, without which nothing leaves the machine: the metrics of every step,
    the settings of all programs that cannot be secrets, and on demand answers and distributions."""

    to: Annotated[tuple[TrackerName, ...], Field(min_length=1)] = ("wandb",)
    """Trackers: wandb (Weights & Biases), tensorboard (files in the run's folder; needs tensorboardX), trackio."""
    project: str = Field(default="grpo", min_length=1)
    """Project that the run belongs to."""
    name: str | None = Field(default=None, min_length=1)
    """Name of the run (null: that of the run's folder)."""
    offline: bool = False
    """W&B writes to the run's folder alone, for `wandb sync` to upload later; needs no network and no key."""
    samples: PositiveInt | None = None
    """Report so many rollouts of a step, with prompt, answer and reward (null: none)."""
    distributions: bool | None = None
    """Report histograms of a step's rewards, advantages and lengths (null: none)."""
    interval: PositiveInt = 10
    """Report samples and distributions every so many steps. Metrics are reported at every step."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Keys that have no effect."""
        if "interval" in changed_fields(self) and self.samples is None and not self.distributions:
            yield (
                "report_to.interval",
                "has no effect without report_to.samples or report_to.distributions; metrics are reported every step",
            )

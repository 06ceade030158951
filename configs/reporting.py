"""Settings of what is written down beside metrics, on this machine and in Weights & Biases."""

from typing import Annotated

from pydantic import Field, PositiveInt

from configs.common import Conflicts, OnlyWith, Section, changed_fields


class ConversationSettings(Section):
    """Whole conversations of rollouts, kept in `conversations/step_N.jsonl`: a line for each rollout, with every
    message, answer, reward and error."""

    interval: PositiveInt | None = 10
    """Steps between two batches whose conversations are kept, beginning with the first (null: none are)."""
    num_groups: Annotated[PositiveInt, OnlyWith("interval")] = 1
    """Number of groups that are kept of such a batch."""


class ReportSettings(Section):
    """What is reported to Weights & Biases: the metrics of every step, the settings of all programs, and on demand
    answers and distributions."""

    project: str = Field(default="grpo", min_length=1)
    """Project that the run belongs to."""
    name: str | None = Field(default=None, min_length=1)
    """Name of the run (null: that of the run's folder)."""
    offline: bool = False
    """Everything is written to the run's folder only, for `wandb sync` to upload later; needs no network and no key."""
    samples: PositiveInt | None = None
    """Number of rollouts of a step that are reported with prompt, answer and reward (null: none)."""
    distributions: bool | None = None
    """Histograms of a step's rewards, advantages and lengths are reported (null: none)."""
    interval: PositiveInt = 10
    """Steps between two reports of samples and distributions. Metrics are reported at every step."""

    def conflicts(self) -> Conflicts:
        if "interval" in changed_fields(self) and self.samples is None and not self.distributions:
            yield "interval", "has no effect without samples or distributions; metrics are reported every step"

"""What an episode leaves behind: roles, steps, rollouts, scores.

Only roles are trained; whoever judges or answers beside them is no role and leaves no step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.episodes.rows import TrainingRow

Message = Mapping[str, str]
Messages = tuple[Message, ...]
"""Chat messages, `{"role": "user", "content": "Reverse: hello"}`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a policy is sampled. Example: ``SamplingParams(temperature=1.0, max_tokens=64)``"""

    temperature: float
    """0 is greedy."""
    max_tokens: int | None
    """Longest answer in tokens; None for what the context leaves."""
    min_tokens: int = 0
    """Shortest answer in tokens."""
    noisy: bool = False
    """With the policy version's noise on its norm weights, where it has any: to explore, never to evaluate."""
    follow: bool = False
    """Answers that are being sampled go on under each new version as it becomes live."""
    adapter: str | None = None
    """Which of a version's adapters; None: the first, or only one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One example of an environment.

    Example: ``Task(env="reverse-text", split="train", index=12, messages=({"role": "user", ...},))``
    """

    env: str
    """Label of the environment."""
    split: str
    """`train` or `eval`."""
    index: int
    """Its place in the environment's dataset; the rest of the example stays in the environment's process."""
    messages: Messages
    """What the policy is shown."""
    epoch: int = 0
    """In which pass over the training examples it is asked; seeds follow from that, so that they outlive a restart."""
    solution: str = ""
    """The example's own `solution`, for hints; empty where it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What a server sampled for one prompt, as it came: never decoded and tokenized again."""

    token_ids: list[int]
    """[L] sampled ids, the end-of-turn token included where it was sampled."""
    logprobs: list[float]
    """[L] natural log, at the sampling temperature."""
    finish_reason: str
    """`stop` or `length`."""
    versions: tuple[tuple[int, int], ...] = ()
    """Runs of (version, number of tokens) in order, which sum to L; empty where one version sampled them all, the one
    that was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepError:
    """An error that the environment saw in a step: a tool call that failed, for example.

    Example: ``StepError(error_kind="unknown_tool", hint_template_key="tools", message="there is no tool lookup")``
    """

    error_kind: str
    hint_template_key: str
    """Which hint would have helped."""
    message: str = ""
    """What the environment said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One call of the policy."""

    role: str
    """Id of the role that acted."""
    temperature: float
    """That it was sampled at."""
    prompt_token_ids: Sequence[int]
    """[P] what the server was given; empty where the rollout has rows, which hold it."""
    completion: Completion
    text: str
    """The completion decoded without special tokens: for reward functions, never for training."""
    version: int
    """Policy version that was asked for; newer ones may have sampled, where the request follows them."""
    messages: Sequence[Mapping[str, Any]] = ()
    """What is new in the conversation since its answer before this one."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """What could be called, in the OpenAI format, as far as the template was told."""
    observed: Sequence[Mapping[str, Any]] | None = None
    """The state in which it acted as the environment tells all of it without the conversation; None: only the
    conversation tells."""
    error: StepError | None = None
    adapter: int = 0
    """The one that sampled it, by its place among the run's."""

    @property
    def versions(self) -> tuple[tuple[int, int], ...]:
        """Runs of (version that sampled, number of tokens) in order, over the completion."""
        return self.completion.versions or ((self.version, len(self.completion.token_ids)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """The trace of one episode."""

    id: str
    """Unique in the run, `group/number`."""
    task: Task
    steps: tuple[Step, ...]
    rows: tuple["RolloutRow", ...] = ()
    """For training, where steps belong to conversations; otherwise each step is a row by itself."""
    cut: bool = False
    """Ended by the episode because the context was full."""

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that the policy sampled."""
        return sum(len(step.completion.token_ids) for step in self.steps)

    @property
    def versions(self) -> list[int]:
        """Policy versions that sampled any of it, ascending."""
        return sorted({version for step in self.steps for version, _ in step.versions})

    @property
    def truncated(self) -> bool:
        """Whether the last answer ran into its limit, or no room was left for another one."""
        return self.cut or (bool(self.steps) and self.steps[-1].completion.finish_reason == "length")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRow:
    """A row of one of a rollout's conversations."""

    row: TrainingRow
    steps: tuple[int, ...]
    """For each of the row's turns, the index of its step in the rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What a rubric says about one rollout. Example: ``Score(reward=0.5, accuracy=0.0, metrics={"exact": 0.0})``"""

    reward: float
    """Weighted sum of the reward functions."""
    accuracy: float
    """The measure that evaluation reports."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Value of each reward function by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a rollout came to nothing."""

    reason: str
    """`env_error`, `env_timeout`, `env_crashed`, `env_memory`, `env_not_tried` (after others of its group were late),
    `reward_not_finite`, `context_full` (before an episode's first answer), or `prompt_too_long` in an evaluation."""
    message: str
    """For people: the environment's own traceback, where there is one."""
    began_s: float | None = field(default=None, compare=False)
    """When one that was late began, on the monotonic clock; None where no two of them run at a time."""

"""What an episode leaves behind: roles, steps, rollouts, scores.

Only roles are trained; whoever judges or answers beside them is no role and leaves no step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Message = Mapping[str, str]
Messages = tuple[Message, ...]
"""Chat messages, `{"role": "user", "content": "Reverse: hello"}`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A trainable participant and how it is sampled.

    Example: ``Role(id="policy", temperature=1.0, max_tokens=64, min_tokens=0)``
    """

    id: str
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
class Step:
    """One call of the policy."""

    role: Role
    prompt_token_ids: Sequence[int]
    """[P] what the server was given."""
    completion: Completion
    text: str
    """The completion decoded without special tokens: for reward functions, never for training."""
    version: int
    """Policy version that was asked for; newer ones may have sampled, where the role follows them."""

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
        """Whether the last answer ran into its limit."""
        return self.steps[-1].completion.finish_reason == "length"


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
    """`env_error`, `env_timeout`, `env_crashed`, `env_not_tried` (after others of its group were late),
    `reward_not_finite`, or `prompt_too_long` in an evaluation."""
    message: str
    """For people: the environment's own traceback, where there is one."""

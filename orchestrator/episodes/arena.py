"""What an episode needs of the world: a policy to call, a renderer for its prompts, a scorer for its answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from orchestrator.episodes.types import Completion, Failure, Messages, Role, Score, Task


class PromptTooLong(ValueError):
    """A prompt that leaves no room for an answer."""


class PolicyClient(Protocol):
    """Samples token ids from token ids."""

    async def generate(
        self, prompt_token_ids: Sequence[int], *, role: Role, num: int, version: int, seed: int | None
    ) -> list[Completion]:
        """`num` answers of `version` to one prompt. Raises PromptTooLong."""


class Renderer(Protocol):
    """Messages to ids, and ids to text that only reward functions read."""

    def prompt_ids(self, messages: Messages) -> Sequence[int]:
        """Ids of the conversation so far, up to where the policy's answer begins."""

    def texts(self, completions: Sequence[Completion]) -> list[str]:
        """The completions as text, without special tokens."""


class Scorer(Protocol):
    """Rubrics of all environments, in their own processes."""

    async def score(self, task: Task, completions: Sequence[str]) -> list[Score | Failure]:
        """One result for each completion. Raises only where the environment cannot work at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arena:
    """Passed to every episode; has no state of its own."""

    policy: PolicyClient
    renderer: Renderer
    scorer: Scorer

"""What rollouts need: a policy that samples, a renderer for its prompts, a scorer for its answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from orchestrator.client import ServerPool
from orchestrator.episodes.types import Completion, Failure, Messages, SamplingParams, Score, Task


class PromptTooLong(ValueError):
    """A prompt that leaves no room for an answer."""


class PolicyClient(Protocol):
    """Samples token ids from token ids."""

    context_len: int
    """Longest prompt with answer, in tokens."""

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        params: SamplingParams,
        num: int,
        version: int | None,
        seed: int | None,
    ) -> list[Completion]:
        """`num` answers of `version`, or of the base model, to one prompt. Raises PromptTooLong."""


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
class Backends:
    """Passed to every rollout; has no state of its own."""

    policy: PolicyClient
    renderer: Renderer
    scorer: Scorer


class TokenClient:
    """Token ids in, token ids and log-probabilities out, from our servers' `/policy/generate`."""

    def __init__(self, servers: ServerPool, *, context_len: int) -> None:
        """`context_len` is the longest prompt with answer that servers and batches both take, in tokens."""
        self._servers = servers
        self.context_len = context_len

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        params: SamplingParams,
        num: int,
        version: int | None,
        seed: int | None,
    ) -> list[Completion]:
        """`num` answers of `version`, or of the base model, to one prompt. Raises PromptTooLong, and ServerError."""
        room = self.context_len - len(prompt_token_ids)
        max_tokens = room if params.max_tokens is None else params.max_tokens
        if not 1 <= max_tokens <= room:
            raise PromptTooLong(
                f"a prompt of {len(prompt_token_ids)} tokens leaves {room} of {self.context_len} for the answer, "
                f"expected {params.max_tokens or 1}; raise seq_len, the server's max_model_len and that of a teacher, "
                "or lower max_tokens"
            )
        return await self._servers.generate(
            prompt_token_ids=prompt_token_ids,
            num=num,
            version=version,
            max_tokens=max_tokens,
            min_tokens=min(params.min_tokens, max_tokens),
            temperature=params.temperature,
            seed=seed,
            noisy=params.noisy,
            follow=params.follow,
            adapter=params.adapter,
        )

"""The policy as rollouts see it: token ids in, token ids and log-probabilities out."""

from collections.abc import Sequence
from typing import Protocol

from msgspec.structs import replace

from orchestrator.inference.client import InferenceClient
from orchestrator.rollouts.records import Completion, SamplingParams


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


class TokenClient:
    """Token ids in, token ids and log-probabilities out, from our servers' `/policy/generate`."""

    def __init__(self, servers: InferenceClient, *, context_len: int) -> None:
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
        params = replace(params, max_tokens=max_tokens)
        return await self._servers.generate(prompt_token_ids, params=params, num=num, version=version, seed=seed)

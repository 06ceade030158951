"""Clients by which episodes reach a policy."""

from collections.abc import Sequence

from orchestrator.client import ServerPool
from orchestrator.episodes.arena import PromptTooLong
from orchestrator.episodes.types import Completion, Role


class TokenClient:
    """Token ids in, token ids and log-probabilities out, from our servers' `/policy/generate`."""

    def __init__(self, servers: ServerPool, *, context_len: int) -> None:
        """`context_len` is the longest prompt with answer that servers and batches both take, in tokens."""
        self._servers = servers
        self._context_len = context_len

    async def generate(
        self, prompt_token_ids: Sequence[int], *, role: Role, num: int, version: int, seed: int | None
    ) -> list[Completion]:
        """`num` answers of `version` to one prompt. Raises PromptTooLong, and ServerError."""
        room = self._context_len - len(prompt_token_ids)
        max_tokens = room if role.max_tokens is None else role.max_tokens
        if not 1 <= max_tokens <= room:
            raise PromptTooLong(
                f"a prompt of {len(prompt_token_ids)} tokens leaves {room} of {self._context_len} for the answer, "
                f"expected {role.max_tokens or 1}; raise seq_len and the server's max_model_len, or lower "
                "max_tokens"
            )
        return await self._servers.generate(
            prompt_token_ids=prompt_token_ids,
            num=num,
            version=version,
            max_tokens=max_tokens,
            min_tokens=min(role.min_tokens, max_tokens),
            temperature=role.temperature,
            seed=seed,
            noisy=role.noisy,
            follow=role.follow,
        )

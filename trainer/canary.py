"""A fixed sequence whose log-probabilities prove which policy a server serves."""

from collections.abc import Mapping

import numpy as np
import torch

from trainer.batch import PackedTokens, pack
from trainer.model import Policy
from trainer.noise import with_noise
from transport.records import Canary

CANARY_TOKENS = 32


def canary_ids(*, seed: int, vocab_size: int, special_ids: frozenset[int]) -> tuple[int, ...]:
    """Seeded token ids.

    From the lower half of the vocabulary: added special tokens, and rows that pad the embedding and that no
    tokenizer knows, lie at the end.
    """
    candidates = np.setdiff1d(np.arange(max(2, vocab_size // 2)), sorted(special_ids))
    drawn = np.random.default_rng(seed).choice(candidates, size=CANARY_TOKENS)
    return tuple(int(token) for token in drawn)


def base_logprobs(policy: Policy, token_ids: tuple[int, ...]) -> tuple[float, ...]:
    """[L - 1] log-probabilities without the adapter, which stay the same over all versions."""
    with torch.no_grad(), policy.without_adapter():
        return tuple(policy.logprobs(_packed(token_ids, policy.device)).tolist())


def canary_of(
    policy: Policy,
    token_ids: tuple[int, ...],
    *,
    version: int,
    base: tuple[float, ...],
    noise: Mapping[str, torch.Tensor] | None = None,
    adapter: int = 0,
) -> Canary:
    """The canary of `policy` with this adapter as it is now, at temperature 1; `base` is what `base_logprobs` gives,
    `noise` are the version's noisy norm weights, if it has any."""
    tokens, noisy = _packed(token_ids, policy.device, adapter), None
    with torch.no_grad():
        logprobs = policy.logprobs(tokens)
        if noise:
            with with_noise(policy.norms(), noise):
                noisy = tuple(policy.logprobs(tokens).tolist())
    return Canary(
        version=version,
        token_ids=token_ids,
        logprobs=tuple(logprobs.tolist()),
        base_logprobs=base,
        dtype=policy.dtype_name,
        is_zero=policy.is_base(version, adapter=adapter),
        noisy_logprobs=noisy,
    )


def _packed(token_ids: tuple[int, ...], device: torch.device, adapter: int = 0) -> PackedTokens:
    """One sample, with every log-probability wanted."""
    length = len(token_ids)
    return pack(
        np.array(token_ids, dtype=np.int32),
        np.array([length], dtype=np.int32),
        loss_mask=np.arange(length) > 0,
        position_ids=np.arange(length, dtype=np.int32),
        temperatures=np.ones(length, dtype=np.float32),
        adapters=np.array([adapter], dtype=np.int32) if adapter else None,
        device=device,
    )

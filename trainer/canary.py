"""A fixed sequence whose log-probabilities prove which policy a server serves."""

import numpy as np
import torch

from trainer.batch import PackedTokens, pack
from trainer.model import Policy
from transport.types import Canary

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


def canary_of(policy: Policy, token_ids: tuple[int, ...], *, version: int, base: tuple[float, ...]) -> Canary:
    """The canary of `policy` as it is now, at temperature 1; `base` is what `base_logprobs` gives."""
    with torch.no_grad():
        logprobs = policy.logprobs(_packed(token_ids, policy.device))
    return Canary(
        version=version,
        token_ids=token_ids,
        logprobs=tuple(logprobs.tolist()),
        base_logprobs=base,
        dtype=policy.dtype_name,
        is_zero=policy.adapter_is_zero(),
    )


def _packed(token_ids: tuple[int, ...], device: torch.device) -> PackedTokens:
    """One sample, with every log-probability wanted."""
    length = len(token_ids)
    return pack(
        np.array(token_ids, dtype=np.int32),
        np.array([length], dtype=np.int32),
        loss_mask=np.arange(length) > 0,
        position_ids=np.arange(length, dtype=np.int32),
        temperatures=np.ones(length, dtype=np.float32),
        device=device,
    )

"""The pseudo-random signs by which a step's gradient tells which samples are in it.

The trainer trains one more parameter of zeros, the witness, of which each loss token is a multiple: its weight in the
loss times the signs of its sample. So the parameter's gradient is the sum over what was really accumulated. The
orchestrator computes the same sum from the samples that it sent. Both do it by the functions here.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from grpo.transport.receipts import WITNESS_SIZE
from grpo.transport.records import PreferencePair
from numpy.typing import NDArray

_FACTORS = (-7046029254386353131, 2685821657736338717, -4417276706812531889, 1609587929392839161)
"""Odd numbers of 64 bits, as signed ones: for a token's id, the id before it, its place and its adapter."""
_MIX = -4658895280553007687, -7723592293110705685
"""Factors of splitmix64's last steps."""
TOLERANCE = 2.0**-19
"""Largest difference of a component, as a share of the sum of all tokens' weights (of |weight · advantage| for the
content). The trainer adds up each pass in float64; what it rounds, to float32 with relative errors of 2^-24, are a
token's weight (three times at most), the sums of passes and ranks as they come, and the result. Passes differ in sign,
so that 32 such errors of the whole sum are more than any number of passes makes."""


def signs(ids: Sequence[str]) -> NDArray[np.float64]:
    """Returns [N, 64] the signs of samples with these ids: ±1 by the bits of BLAKE2b's digest of 8 bytes."""
    digests = b"".join(blake2b(one.encode(), digest_size=WITNESS_SIZE // 8).digest() for one in ids)
    bits = np.unpackbits(np.frombuffer(digests, np.uint8)).reshape(-1, WITNESS_SIZE)
    return (1.0 - 2.0 * bits).astype(np.float64)


def token_values(ids: Any, before: Any, places: Any, adapters: Any = 0) -> Any:
    """Returns [K] f64 a pseudo-random number of each token, from -1 to 1 in steps of 2^-23: by its id, the id of the
    token before it, that one's place in the sample and its adapter's index. Any other of these gives another number.
    Takes [K] i64 arrays of numpy or tensors of torch, whose 64-bit arithmetic is the same."""
    parts = (ids, before, places, adapters)
    mixed: Any = 1
    for part, factor in zip(parts, _FACTORS, strict=True):
        mixed = mixed + part * factor
    for factor, shift in zip(_MIX, (30, 27), strict=True):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return ((mixed >> 40) & 0xFFFFFF) / 2.0**23 - 1.0


def ramped(weight: float, step: int, warmup_steps: int, decay_steps: int | None) -> float:
    """Returns a loss term's weight at a step, from 1: weight · step / warmup_steps while it rises, and then
    weight · max(0, 1 - (step - 1 - warmup_steps) / decay_steps), or `weight` where it does not fall. A term of weight 0
    is not in the witness."""
    if step <= warmup_steps:
        return weight * step / warmup_steps
    if decay_steps is None:
        return weight
    return weight * max(0.0, 1 - (step - 1 - warmup_steps) / decay_steps)


def hint_id(rollout_id: str) -> str:
    """Returns the id under which the hint of a rollout's sample counts."""
    return f"hint of {rollout_id}"


def pair_id(pair: PreferencePair) -> str:
    """Returns the id under which a preference pair counts: a digest of its tokens."""
    digest = blake2b(digest_size=8)
    for ids in (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids):
        digest.update(np.int64(len(ids)).tobytes() + ids.astype(np.int32).tobytes())
    return f"pair {digest.hexdigest()}"

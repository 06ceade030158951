"""Micro-batches and policies that tests send around."""

import numpy as np

from transport.types import Canary, MicroBatch, PolicySpec

SPEC = PolicySpec(base_model="base", rank=4, alpha=8, target_modules=("q_proj",), sequence_len=64, dtype="float32")


def micro_batch(
    *,
    run_id: str = "run",
    step: int = 1,
    rank: int = 0,
    index: int = 0,
    of: int = 1,
    lengths: tuple[int, ...] = (3, 2),
    seed: int = 0,
    teacher: bool = False,
) -> MicroBatch:
    """Random streams over samples of the given lengths; every token but each sample's first carries loss."""
    rng, total = np.random.default_rng(seed), sum(lengths)
    mask = np.ones(total, np.bool_)
    mask[np.cumsum((0, *lengths[:-1]))] = False
    logprobs = -rng.random(total, np.float32)
    return MicroBatch(
        run_id=run_id,
        step=step,
        rank=rank,
        index=index,
        num_micro_batches=of,
        num_loss_tokens=int(mask.sum()),
        token_ids=rng.integers(0, 250, total, np.int32),
        sequence_lengths=np.array(lengths, np.int32),
        loss_mask=mask,
        inference_logprobs=logprobs,
        advantages=rng.standard_normal(total, np.float32),
        temperatures=np.ones(total, np.float32),
        policy_versions=np.zeros(total, np.int32),
        teacher_logprobs=logprobs - 1 if teacher else None,
        rollout_ids=tuple(f"{seed}/{i}" for i in range(len(lengths))),
    )


def equal(one: MicroBatch, other: MicroBatch) -> bool:
    """All fields the same, bit for bit."""
    names = MicroBatch.__dataclass_fields__
    return all(np.array_equal(getattr(one, n), getattr(other, n)) for n in names)


def canary(version: int = 0) -> Canary:
    """Three tokens."""
    return Canary(
        version=version,
        token_ids=(1, 2, 3),
        logprobs=(-1.5, -0.25),
        base_logprobs=(-1.0, -0.5),
        dtype="float32",
        is_zero=False,
    )

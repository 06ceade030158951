"""Micro-batches and policies that tests send around."""

from pathlib import Path

import numpy as np
import pytest
from grpo.transport.records import Canary, Hint, MicroBatch, PolicySpec, PreferencePair

SPEC = PolicySpec(base_model="base", rank=4, alpha=8, target_modules=("q_proj",), sequence_len=64, dtype="float32")


HINT = Hint(
    teacher_token_ids=np.array([5, 6, 8, 9, 7], np.int32),
    student_index=np.array([2], np.int32),
    teacher_index=np.array([4], np.int32),
    weight=0.5,
)
PAIR = PreferencePair(
    prompt_ids=np.array([5, 6], np.int32),
    chosen_ids=np.array([7], np.int32),
    rejected_ids=np.array([8, 9], np.int32),
    chosen_ref_logprob=-1.25,
    rejected_ref_logprob=-3.5,
    source="2 of 3 teachers",
)


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
    per_token: bool = False,
    extras: bool = False,
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
        token_ids=rng.integers(0, 250, total, np.int32),
        sequence_lengths=np.array(lengths, np.int32),
        loss_mask=mask,
        inference_logprobs=logprobs,
        advantages=rng.standard_normal(total if per_token else len(lengths), np.float32),
        temperatures=np.ones(total if per_token else len(lengths), np.float32),
        version_runs=np.array([[3, 1], [4, total - 1]] if total > 1 else [[3, 1]], np.int32),
        teacher_logprobs=logprobs - 1 if teacher else None,
        rollout_ids=tuple(f"{seed}/{i}" for i in range(len(lengths))),
        hints=((0, HINT),) if extras and lengths[0] >= 3 else (),
        pairs=(PAIR,) if extras else (),
    )


def equal(one: object, other: object) -> bool:
    """All fields the same, bit for bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, MicroBatch | Hint | PreferencePair):
        return all(equal(getattr(one, name), getattr(other, name)) for name in one.__struct_fields__)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return one == other


def canary(version: int = 0) -> Canary:
    """Three tokens."""
    ids, scores, base_scores = (1, 2, 3), (-1.5, -0.25), (-1.0, -0.5)
    return Canary(
        version=version, token_ids=ids, logprobs=scores, base_logprobs=base_scores, dtype="float32", is_zero=False
    )


def damage(path: Path, how: str) -> None:
    """`remove`, `truncate` to half its size, or `flip` a bit in its middle."""
    data = bytearray(path.read_bytes())
    if how == "remove":
        path.unlink()
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data[: len(data) // 2] if how == "truncate" else data)


def skip_before_nccl() -> None:
    """Skips a test of `nccl` on a vLLM that has no trainer side for it."""
    import vllm

    if tuple(map(int, vllm.__version__.split(".")[:2])) < (0, 28):
        pytest.skip(f"vLLM {vllm.__version__} has no trainer side for NCCL; 0.28 and later have")

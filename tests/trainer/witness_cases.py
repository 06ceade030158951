"""A batch from samples to its witness, on one process or several, for `test_witness`."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from grpo.configs.loss import LossSettings
from grpo.orchestrator.packing import pack
from grpo.trainer.distributed import ONE, Ranks, join_group, leave_group
from grpo.trainer.model import Policy
from grpo.trainer.objective import Objective
from grpo.trainer.witness import shares_of, whole_gradient, witness_of
from grpo.transport.receipts import Witness
from grpo.transport.records import MicroBatch, PreferencePair, TrainingSample
from msgspec.structs import replace

from tests.trainer.models import CPU, VOCAB, hint_for, pair_of, tiny_batch, tiny_policy

CAPACITY = 48
PAIRS = (pair_of([4, 5], [6, 7, 8], [9]), pair_of([12], [13, 14], [15, 16]))


def samples(num: int = 8, *, hints: bool = False, adapters: int = 1, step: int = 1) -> list[TrainingSample]:
    """Samples of `num / 2` groups, whose two share a prompt of 4 tokens. Every third teaches nothing, every fourth has
    an advantage for each token, and every fifth's third sampled token carries no loss."""
    rng = np.random.default_rng(step)
    made = []
    for number in range(num):
        length = 8 + number % 5
        ids = rng.integers(2, VOCAB, length, np.int32)
        ids[:4] = np.random.default_rng(number // 2).integers(2, VOCAB, 4)
        mask = np.arange(length) >= 4
        if number % 5 == 0:
            mask[6] = False
        advantage = 0.0 if number % 3 == 0 else float(rng.normal())
        made.append(
            TrainingSample(
                token_ids=ids,
                loss_mask=mask,
                inference_logprobs=(-4 * mask).astype(np.float32),
                advantages=rng.standard_normal(length, np.float32) if number % 4 == 1 else advantage,
                temperatures=1.0,
                teacher_logprobs=(-3 * mask).astype(np.float32),
                policy_versions=((0, length),),
                env="words",
                group_id=f"{step}{number // 2}",
                rollout_id=f"{step}{number // 2}/{number % 2}",
                reward=0.0,
                stop_reason="stop",
                adapter=number % adapters,
            )
        )
        if hints and number in (1, 6):
            batch = tiny_batch((length,), token_ids=ids)
            made[-1] = replace(made[-1], hint=hint_for(batch, 0, places=(5, 6, 7), before=5, weight=0.5 + number))
    return made


def packed(
    chosen: Sequence[TrainingSample], *, pairs: Sequence[PreferencePair] = (), num_ranks: int = 1, step: int = 1
) -> list[list[MicroBatch]]:
    return pack(chosen, capacity=CAPACITY, num_ranks=num_ranks, run_id="run", step=step, pairs=pairs)


def found(
    policy: Policy, batches: Sequence[MicroBatch], loss: LossSettings, ranks: Ranks = ONE, *, size: int = 100
) -> Witness:
    """The witness of one batch of `size` micro-batches an optimizer step, from clear gradients."""
    objective = Objective(policy, loss, ranks, pack_tokens=CAPACITY)
    parts = [batches[start : start + size] for start in range(0, len(batches), size)]
    sums = torch.zeros(2, 64, dtype=torch.float64)
    for part, shares in zip(parts, shares_of(parts, loss, ranks, epochs=1), strict=True):
        for parameter in (*policy.parameters, policy.witness.zeros):
            parameter.grad = None
        objective.accumulate(part, step=batches[0].step, shares=shares)
        sums += whole_gradient(policy.witness.zeros.grad)
    return witness_of(sums)


# --- two ranks ---

LOSS = LossSettings.model_validate({"normaliser": "sequence", "alpha_sdpo": 0.5, "beta_replay": 0.3})
OPTIONS: dict[str, dict[str, Any]] = {
    **{f"lora at level {level}": {"zero_level": level} for level in (1, 2, 3)},
    **{f"all weights at level {level}": {"zero_level": level, "lora": False} for level in (1, 2, 3)},
    "all weights in bfloat16 at level 3": {"zero_level": 3, "lora": False, "recipe": "bf16"},
    "several adapters": {"zero_level": 2, "lora_adapters": ("solver", "proposer")},
}


def _reduced(change: Callable[[torch.Tensor, torch.Tensor], None]) -> Callable[..., Any]:
    real = dist.reduce_scatter_single

    def patched(output: torch.Tensor, input: torch.Tensor, **options: Any) -> Any:
        given = input.clone()
        work = real(output=output, input=input, **options)
        change(output, given)
        return work

    return patched


def _own_rows(output: torch.Tensor, given: torch.Tensor) -> None:
    output.copy_(given.chunk(2)[dist.get_rank()])


def _twice(output: torch.Tensor, given: torch.Tensor) -> None:
    dist.all_reduce(given)
    output.copy_(2 * given.chunk(2)[dist.get_rank()])


REDUCTIONS = {"not reduced": _own_rows, "reduced twice": _twice}


def worker(folder: Path, out: Path, variables: dict[str, str]) -> None:
    """Writes the witnesses that the main rank, of two, has got with the model in `folder`, by case and fault."""
    os.environ.update(variables)
    torch.set_num_threads(1)
    ranks = join_group(CPU, timeout_s=240)
    results = {}
    for name, options in OPTIONS.items():
        policy = tiny_policy(folder, moved=options.get("lora", True), ranks=ranks, **options)
        made = samples(12, hints=True, adapters=policy.num_adapters)
        pairs = [replace(pair, adapter=number % policy.num_adapters) for number, pair in enumerate(PAIRS)]
        own = packed(made, pairs=pairs, num_ranks=2)[ranks.rank]
        results[name] = found(policy, own, LOSS, ranks)
        results[f"{name}, an optimizer step a micro-batch"] = found(policy, own, LOSS, ranks, size=1)
        if name != "lora at level 2":
            continue
        real = dist.reduce_scatter_single
        for fault, change in REDUCTIONS.items():
            dist.reduce_scatter_single = _reduced(change)
            results[fault] = found(policy, own, LOSS, ranks)
        dist.reduce_scatter_single = real
        dropped = own if ranks.is_main else own[1:]
        results["a micro-batch dropped"] = found(policy, dropped, LOSS, ranks)
    if ranks.is_main:
        (out / "witnesses.json").write_text(json.dumps({key: one.to_json().decode() for key, one in results.items()}))
    leave_group()

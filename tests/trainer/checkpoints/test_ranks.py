"""A checkpoint of one rank, restored by three, whose shards differ in size: the whole state is the same again."""

import os
from pathlib import Path

import torch
from grpo.trainer.checkpoint import restore, state_parts
from grpo.trainer.distributed import ONE, Ranks, join_group, leave_group
from grpo.trainer.model import Policy
from grpo.trainer.optim import Optimizer
from grpo.trainer.packing import packed_tokens
from safetensors.torch import load_file, save_file

from tests.trainer.forked import run_ranks
from tests.trainer.models import CPU, tiny_batch, tiny_policy, tiny_settings


def optimizer_of(policy: Policy, ranks: Ranks) -> Optimizer:
    return Optimizer(tiny_settings(Path("tiny"), weight_decay=0.0), policy.named_parameters, ranks)


def worker(model: Path, saved: Path, out: Path, variables: dict[str, str]) -> None:
    """Takes the state up and gives it back, as one of the ranks that torchrun's variables name."""
    os.environ.update(variables)
    torch.set_num_threads(1)
    ranks = join_group(CPU, timeout_s=240)
    policy = tiny_policy(model, moved=False, seed=5, ranks=ranks, zero_level=2)
    optimizer = optimizer_of(policy, ranks)
    parts = {name: load_file(saved / name) for name in ("weights", "optimizer")}
    restore(parts, policy, optimizer, None)
    again = state_parts(policy, optimizer, None, ranks)
    if ranks.is_main:
        for name in parts:
            save_file(again[name], out / name)
    leave_group()


def test_another_number_of_ranks_takes_a_checkpoint_up_whole(tiny_model: Path, tmp_path: Path) -> None:
    policy = tiny_policy(tiny_model)
    optimizer = optimizer_of(policy, ONE)
    policy.logprobs(packed_tokens(tiny_batch((6, 9)), CPU)).sum().backward()
    optimizer.step(learning_rate=0.1)
    parts = state_parts(policy, optimizer, None, ONE)
    out = tmp_path / "again"
    out.mkdir()
    for name in ("weights", "optimizer"):
        save_file(parts[name], tmp_path / name)
    run_ranks(worker, tiny_model, tmp_path, out, num_ranks=3)
    for name in ("weights", "optimizer"):
        again = load_file(out / name)
        assert again.keys() == parts[name].keys() != set()
        assert all(torch.equal(again[key], tensor) for key, tensor in parts[name].items())

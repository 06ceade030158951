"""Two steps of training, by one process with all micro-batches or by each of two with its own: the same code, for
`test_distributed`."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from grpo.configs.loss import LossSettings
from grpo.configs.train import NoiseSettings
from grpo.trainer.batch import check_step
from grpo.trainer.distributed import Ranks, full_tensor, join_group, leave_group
from grpo.trainer.ema import MovingAverage
from grpo.trainer.metrics import Max, Mean, Metric, Min, Sum, numbers_of, states_of
from grpo.trainer.model import Policy
from grpo.trainer.noise import NormNoise, hidden_norms
from grpo.trainer.objective import Objective
from grpo.trainer.optim import Optimizer
from grpo.trainer.publishing import CanaryMaker
from grpo.transport.records import MicroBatch
from msgspec.structs import replace
from safetensors.torch import save_file

from tests.trainer.bench import UNMASKED
from tests.trainer.models import CPU, hint_for, pair_of, tiny_batch, tiny_policy, tiny_settings

SEQUENCE_LEN = 128
CANARY_IDS = (3, 9, 27, 17, 51, 25, 11, 33)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is trained, and how."""

    lora: bool
    zero_level: int
    recipe: str = "float32"
    optimizer: str = "adamw"
    checkpointing: bool = False
    adapters: tuple[str, ...] = ()
    silent: bool = False
    """Samples without an advantage: in the first step all of the second rank's and one of the first's, in the second
    step all of the first rank's."""

    @property
    def name(self) -> str:
        """A file name."""
        kind = "lora" if self.lora else "full"
        more = ["checkpointing"] * self.checkpointing + [*self.adapters] + ["silent"] * self.silent
        return "_".join([kind, self.recipe, f"zero{self.zero_level}", self.optimizer, *more])


CASES = (
    *(Case(lora=lora, zero_level=level) for lora, level in ((True, 2), (True, 3), (False, 1))),
    *(Case(lora=lora, zero_level=3, recipe="bfloat16") for lora in (True, False)),
    Case(lora=False, zero_level=2, optimizer="muon"),
    Case(lora=False, zero_level=3, checkpointing=True),
    Case(lora=True, zero_level=3, adapters=("solver", "proposer")),
    *(Case(lora=lora, zero_level=level, silent=True) for lora, level in ((True, 1), (False, 2), (False, 3))),
)
NOISE = NoiseSettings(enabled=True, sigma_start=0.2, sigma_end=0.1, num_stages=3)
LOSS = LossSettings.model_validate(
    UNMASKED
    | {"alpha_sdpo": 0.5, "beta_replay": 0.3, "sdpo": {"teacher": "ema", "ema_decay": 0.5}}
    | {"silent_share": 1.0}  # or two ranks compute other samples than one
)


SILENT_TOKENS = {1: (slice(6), slice(None), slice(0)), 2: (slice(None), slice(0), slice(None))}
"""Of the three micro-batches of each step, where a case has silent samples."""


def micro_batches(step: int) -> list[MicroBatch]:
    """Three, of which the first rank gets two. Those have hints, and the second of them pairs; in the second step the
    other rank has both too, so that no rank's own counts are the step's."""
    first, second, third = (tiny_batch(lengths, seed=10 * step + n) for n, lengths in enumerate([(6, 9), (7,), (5, 8)]))
    hint, other = hint_for(first, 1, places=(4, 5, 7), before=3), hint_for(third, 0, places=(3, 4), before=2)
    pairs = (pair_of([4, 5], [6, 7, 8], [9]), pair_of([12], [13, 14], [15, 16]))
    if step == 2:
        second = replace(second, hints=((0, hint_for(second, 0, places=(2, 5), before=2)),), pairs=pairs[1:])
    batches = [replace(first, hints=((1, hint),)), second, replace(third, hints=((0, other),), pairs=pairs)]
    return [replace(batch, step=step) for batch in batches]


def of_adapters(batches: list[MicroBatch], step: int) -> list[MicroBatch]:
    """The first step trains both adapters, of which the second rank has tokens for one; the second step only one."""
    first, second, third = batches
    if step == 2:
        return batches
    pairs = tuple(replace(pair, adapter=1) for pair in third.pairs)
    return [replace(first, adapters=np.array([0, 1], np.int32)), second, replace(third, pairs=pairs)]


def run_case(case: Case, folder: Path, ranks: Ranks) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Gradients of the first step and weights after the second, whole, and the metrics of both."""
    # while B is zero, A has no gradient
    policy = tiny_policy(folder, moved=case.lora, ranks=ranks, **_options(case))
    tensors, metrics = _train(policy, case, ranks)
    noise = NormNoise(hidden_norms(policy.causal_lm), NOISE, seed=1, max_steps=3).weights(2)
    making, snapshot = CanaryMaker(policy, CANARY_IDS).begin(version=2, noise=noise), policy.weights.snapshot()
    canary = making(snapshot) if ranks.is_main else None
    tensors |= {f"snapshot/{name}": tensor.float() for name, tensor in snapshot.items()}
    if canary is not None:
        tensors["snapshot/canary"] = torch.tensor(canary.logprobs)
        tensors["snapshot/noisy_canary"] = torch.tensor(canary.noisy_logprobs)
        assert not canary.is_zero
    return tensors, metrics


def _options(case: Case) -> dict[str, Any]:
    return {
        "recipe": "fp32" if case.recipe == "float32" else "bf16",
        "lora": case.lora,
        "zero_level": case.zero_level,
        "gradient_checkpointing": case.checkpointing,
        "lora_adapters": case.adapters,
        "optimizer": case.optimizer,
        "adam_beta2": 0.99,
        "adam_epsilon": 1e-2,  # a small one turns the rounding of a gradient near zero into a whole step
        "muon_momentum": 0.9,
    }


def _train(policy: Policy, case: Case, ranks: Ranks) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    objective = Objective(policy, LOSS, ranks, pack_tokens=SEQUENCE_LEN)
    optimizer = Optimizer(tiny_settings(Path("tiny"), **_options(case)), policy.named_parameters, ranks)
    tensors: dict[str, torch.Tensor] = {}
    metrics: dict[str, float] = {}
    for step in (1, 2):
        whole = of_adapters(micro_batches(step), step) if case.adapters else micro_batches(step)
        if case.silent:
            for batch, tokens in zip(whole, SILENT_TOKENS[step], strict=True):
                batch.advantages[tokens] = 0.0
        batches = whole[ranks.rank :: ranks.size]
        check_step(
            batches,
            sequence_len=SEQUENCE_LEN,
            pack_tokens=SEQUENCE_LEN,
            vocab_size=policy.vocab_size,
            settings=LOSS,
            num_adapters=policy.num_adapters,
        )
        measured = numbers_of(objective.accumulate(batches, step=step))
        if step == 1:
            for name, parameter in policy.named_parameters.items():
                assert parameter.grad is not None
                tensors[f"gradient/{name}"] = full_tensor(parameter.grad).clone()
        measured["grad_norm"] = optimizer.step(learning_rate=1e-2)
        objective.after_step()
        metrics |= {f"{step}/{key}": value for key, value in measured.items()}
    tensors |= {f"weight/{name}": full_tensor(p).clone() for name, p in policy.named_parameters.items()}
    assert isinstance(objective.average, MovingAverage)
    averages = objective.average.averages
    return tensors | {f"average/{name}": full_tensor(t).clone() for name, t in averages.items()}, metrics


def communicated(ranks: Ranks) -> dict[str, object]:
    """What the collectives give on this rank."""
    own: dict[str, Metric] = {
        "loss/both": Sum(torch.tensor(1.5 + ranks.rank)),
        "policy/mean": Mean(torch.tensor(4.0 * ranks.rank), torch.tensor(1 + ranks.rank)),
        "policy/smallest": Min(torch.tensor(-float(ranks.rank))),
        "policy/largest": Max(torch.tensor(float("inf") if ranks.rank else 0.0)),
    }
    if not ranks.is_main:
        own["policy/other"] = Sum(torch.tensor(7.0))
    return {
        "max": ranks.all_reduce_max(3 - ranks.rank),
        "sum": ranks.all_reduce_sum([3 - ranks.rank, ranks.rank]),
        "broadcast": ranks.broadcast({"run_id": "é", "rank": ranks.rank} if ranks.is_main else None),
        "merged": numbers_of(ranks.merged(*states_of([own]))),
    }


def worker(folder: Path, out: Path, variables: dict[str, str]) -> None:
    """Writes what this rank, which torchrun's variables name, has got for every case with the model in `folder`."""
    os.environ.update(variables)
    torch.set_num_threads(1)
    ranks = join_group(CPU, timeout_s=240)
    results: dict[str, object] = {"communicated": communicated(ranks)}
    for case in CASES:
        tensors, results[case.name] = run_case(case, folder, ranks)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / f"{case.name}.{ranks.rank}")
    (out / f"results.{ranks.rank}.json").write_text(json.dumps(results))
    leave_group()

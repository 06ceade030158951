"""Divides one GPU: a dry step measures what the trainer needs, and the server gets what is left.

The step is made by a process of its own (`trainer/dry_step.py`) before a server has taken the device. docs/memory.md
explains the division. Not yet run on a GPU.
"""

import functools
import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from grpo.configs.defaults import SERVER_BYTES, gib
from grpo.configs.train import TrainSettings
from grpo.deploy.plan import Plan
from grpo.trainer.dry_step import Measurement
from grpo.transport.errors import UserError

SERVER_SHARE = 0.9
"""Share of the memory that the trainer leaves; the rest stays free."""
DRY_STEP_S = 600.0
SETTING = {"none": False, "full": True}
"""Values of `gradient_checkpointing` for what the dry step names otherwise."""
REMEDIES = (
    "set colocate: true (one copy of the base), gradient_checkpointing: true or qlora_bnb: true (trainer), a smaller "
    "micro_batch_tokens, sequence_len or max_model_len (server), sleep_mode with max_async_level: 0, or "
    "gpu_memory_utilization (server) yourself"
)


class NoRoom(UserError):
    """Trainer and server do not fit on the device together. The message names remedies."""


def with_split(plan: Plan, folder: Path, *, dry_step: Callable[..., Measurement] | None = None) -> tuple[Plan, str]:
    """Returns the plan with the server's share of the GPU and with the activation checkpointing that was measured, and
    a line that tells both. `folder` holds the base model. Where the server gets too little, the step is measured again
    with all activations computed anew.

    Raises `NoRoom`, and `UserError` where the dry step cannot be made.
    """
    make, found = dry_step or measure, (dry_step or measure)(plan.train, folder)
    share_of = functools.partial(
        utilization,
        max_model_len=plan.infer.max_model_len,
        sleep_mode=plan.train.sleep_mode,
        colocate=plan.train.colocate,
    )
    try:
        share = share_of(found)
    except NoRoom:
        if plan.train.gradient_checkpointing is not None or found.checkpointing == "full":
            raise
        found = make(plan.train.model_copy(update={"gradient_checkpointing": True}), folder)
        share = share_of(found)
    line = (
        f"memory: the trainer takes {gib(found.needed)} in a step beside {'the' if plan.train.colocate else 'its'} "
        f"base of {gib(found.base)} "
        f"(activation checkpointing: {found.checkpointing}); "
        f"the server gets gpu_memory_utilization {share:g} of {gib(found.total)}"
    )
    chosen = SETTING.get(found.checkpointing, found.checkpointing)
    train = plan.train.model_copy(update={"gradient_checkpointing": chosen})
    return replace(plan, train=train, infer=plan.infer.model_copy(update={"gpu_memory_utilization": share})), line


def utilization(found: Measurement, *, max_model_len: int | None, sleep_mode: bool, colocate: bool) -> float:
    """Returns vLLM's `gpu_memory_utilization`: nine tenths of what the trainer leaves in a step, or with `sleep_mode`
    between steps, with `colocate` the shared base included; rounded down to three decimals.

    Raises `NoRoom` where that is less than a server starts with, or where a sleeping one leaves a step too little.
    """
    cache = found.kv * (max_model_len or found.longest)
    shared = found.base if colocate else 0
    left = SERVER_SHARE * (found.total - (found.between if sleep_mode else found.in_step) + shared)
    in_step = SERVER_SHARE * (found.total - found.in_step + shared)
    least = found.base + SERVER_BYTES + cache
    if left < least or in_step < found.base + SERVER_BYTES:
        raise NoRoom(
            f"of {gib(found.total)} device memory the trainer leaves the server {gib(max(0.0, min(left, in_step)))}; "
            f"it starts with {gib(least)}: {gib(found.base)} weights, {gib(cache)} cache of one longest sequence, "
            f"{gib(SERVER_BYTES)} besides. Remedies: {REMEDIES}"
        )
    return math.floor(1000 * left / found.total) / 1000


def measure(settings: TrainSettings, folder: Path) -> Measurement:
    """Returns what a dry step of the model in `folder` needs, by one rank in a process of its own. Raises `NoRoom` if
    the trainer alone does not fit into the device's memory, and `UserError` with what its process printed last."""
    alone = json.dumps(settings.model_dump(mode="json") | {"gpus": 1, "zero_level": 1})
    command = [sys.executable, "-P", "-m", "grpo.trainer.dry_step", str(folder)]
    try:
        done = subprocess.run(command, input=alone, capture_output=True, text=True, timeout=DRY_STEP_S)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"the dry step took longer than {DRY_STEP_S:g} s; lower micro_batch_tokens") from error
    last = done.stderr.strip().rpartition("\n")[2]
    if done.returncode and "out of memory" in last:
        raise NoRoom(f"the trainer alone does not fit on the device: {last}. Remedies: {REMEDIES}")
    if done.returncode:
        raise UserError(f"the dry step ended with exit status {done.returncode}: {last}")
    return Measurement(**json.loads(done.stdout.splitlines()[-1]))

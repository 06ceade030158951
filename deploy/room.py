"""What server and trainer of a co-located run get of their device: estimated, on a GPU measured and divided."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from configs.train import TrainSettings
from deploy.memory.device import DeviceError, DeviceMemory, gpu_memory
from deploy.memory.dry_step import DryStep, DryStepError, measure
from deploy.memory.estimate import Estimate, EstimateError, Shared, estimate
from deploy.memory.shapes import ModelShape, ShapeError
from deploy.memory.split import NoRoom, split
from deploy.memory.table import lines
from deploy.plan import Plan

RoomErrors = (EstimateError, ShapeError, NoRoom, DeviceError, DryStepError)
"""What `with_room` raises; each message says what to change."""
DRY_STEP_S = 600.0
_SHARED: Shared = "all"
"""The server lends the embedding, the head and the norms too."""


def _measured(train: TrainSettings, folder: Path, environment: Mapping[str, str]) -> DryStep:
    return measure(train, folder, timeout_s=DRY_STEP_S, environment=environment)


def with_room(
    plan: Plan,
    folder: Path,
    *,
    gpu: bool,
    memory: Callable[[Mapping[str, str]], DeviceMemory] = gpu_memory,
    dry_step: Callable[[TrainSettings, Path, Mapping[str, str]], DryStep] = _measured,
) -> tuple[Plan, tuple[str, ...]]:
    """The plan with the server's share of a GPU, where the user left it open, and the trainer's need as lines of text.

    `folder` holds the base model, `gpu` says whether both compute on a GPU, and must be asked before either has taken
    of it. `memory` and `dry_step` are given an environment in which the trainer's GPU is the first that is visible. On
    a CPU nothing is divided. Raises `RoomErrors` where the server's share cannot be computed, or is too small to start
    with.
    """
    chosen = "gpu_memory_utilization" in plan.infer.model_fields_set
    try:
        shape = ModelShape.of_folder(folder)
        estimated = estimate(plan.train, shape, device="cuda" if gpu else "cpu", shared=_SHARED)
    except (EstimateError, ShapeError) as error:
        if gpu and not chosen:
            raise
        reason, _, _ = str(error).partition(";")
        return plan, (f"the trainer's memory is not estimated: {reason}",)
    if not gpu:
        return plan, tuple(lines(estimated))
    environment = os.environ | plan.gpus.variables("train")
    if chosen:
        return plan, tuple(_told(plan, shape, estimated, lambda: memory(environment)))
    measured = dry_step(plan.train, folder, environment)
    need = measured.corrected(estimated)
    divided = split(plan.train, plan.infer, shape, memory=memory(environment), shared=_SHARED, need=need)
    infer = plan.infer.model_copy(update={"gpu_memory_utilization": divided.utilization})
    return replace(plan, infer=infer), tuple(lines(estimated, measured=measured, split=divided))


def _told(plan: Plan, shape: ModelShape, estimated: Estimate, memory: Callable[[], DeviceMemory]) -> Iterator[str]:
    """Where the user set the server's share, on which nothing depends here: a driver that tells nothing is told."""
    try:
        divided = split(plan.train, plan.infer, shape, memory=memory(), shared=_SHARED)
    except DeviceError as error:
        yield from lines(estimated)
        reason, _, _ = str(error).rpartition(";")
        yield f"whether both have room is not known: {reason}"
    else:
        yield from lines(estimated, split=divided)

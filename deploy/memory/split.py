"""How a device's memory is divided between trainer and server."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from configs.infer import InferSettings
from configs.train import TrainSettings
from deploy.memory.device import DeviceMemory
from deploy.memory.estimate import ELEMENT_BYTES, GIB, Shared, estimate
from deploy.memory.shapes import ModelShape

MARGIN = 0.10
"""Of what the trainer leaves, the share that nobody gets."""
SERVER_FIXED_BYTES = 2 * GIB
"""Of a server without weights and cache: context, activations, graphs. Assumed: not yet run, needs a GPU."""
_DEFAULT_LORA_RANK = 16


class NoRoom(ValueError):
    """The trainer leaves too little for a server; the message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Who gets what of the device, in bytes."""

    memory: DeviceMemory
    trainer: int
    server: int
    utilization: float
    """For vLLM's `gpu_memory_utilization`: `server` by the device's whole memory."""
    chosen: bool
    """Whether the user set it."""

    @property
    def overcommitted(self) -> int:
        """By how much both exceed what is free: above 0 only where the user set the server's share."""
        return max(0, self.trainer + self.server - self.memory.free)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerNeed:
    """The least that vLLM starts with, in bytes."""

    weights: int
    adapters: int
    """Places for `max_loras` adapters on all linear layers."""
    cache: int
    """Keys and values of one sequence of `max_model_len`."""

    @property
    def total(self) -> int:
        """With what a server takes besides."""
        return SERVER_FIXED_BYTES + self.weights + self.adapters + self.cache


def server_need(train: TrainSettings, infer: InferSettings, shape: ModelShape) -> ServerNeed:
    """Of a server with the trainer's base."""
    element_bytes = ELEMENT_BYTES[train.recipe]
    rank, adapters = infer.max_lora_rank or max(_DEFAULT_LORA_RANK, train.lora_rank), 0
    if infer.enable_lora:
        adapters = infer.max_loras * element_bytes * sum(shape.adapter(rank, tuple(shape.linears)))
    return ServerNeed(
        weights=shape.base_bytes(train.quantization, element_bytes),
        adapters=adapters,
        cache=shape.kv_bytes(infer.max_model_len or shape.longest, element_bytes),
    )


def split(
    train: TrainSettings,
    infer: InferSettings,
    shape: ModelShape,
    *,
    memory: DeviceMemory,
    shared: Shared,
    trainer_bytes: int | None = None,
) -> Split:
    """Gives the server 90 % of what the trainer leaves, or what the user set as `gpu_memory_utilization`.

    `trainer_bytes` is the trainer's need where it was measured (None: as it is estimated). Raises `NoRoom` where the
    user set nothing and what is left is less than the server starts with.
    """
    if trainer_bytes is None:
        trainer_bytes = estimate(train, shape, device="cuda", shared=shared).total
    if "gpu_memory_utilization" in infer.model_fields_set:
        utilization = infer.gpu_memory_utilization
        server = math.floor(utilization * memory.total)
        return Split(memory=memory, trainer=trainer_bytes, server=server, utilization=utilization, chosen=True)
    left = (1 - MARGIN) * (memory.free - trainer_bytes)
    utilization = math.floor(1000 * left / memory.total) / 1000
    server = math.floor(utilization * memory.total)
    least = server_need(train, infer, shape)
    if server < least.total:
        raise NoRoom(_no_room(train, infer, shape, shared, memory=memory, trainer=trainer_bytes, left=left))
    return Split(memory=memory, trainer=trainer_bytes, server=server, utilization=utilization, chosen=False)


def _no_room(
    train: TrainSettings,
    infer: InferSettings,
    shape: ModelShape,
    shared: Shared,
    *,
    memory: DeviceMemory,
    trainer: int,
    left: float,
) -> str:
    least = server_need(train, infer, shape)
    remedies = "; ".join(f"{change} (saves {_gib(saved)})" for change, saved in _remedies(train, infer, shape, shared))
    return (
        f"of {_gib(memory.free)} free device memory the trainer needs {_gib(trainer)}, which leaves the server "
        f"{_gib(max(0, left))}; it starts with at least {_gib(least.total)}: {_gib(least.weights)} weights, "
        f"{_gib(least.adapters)} adapters, {_gib(least.cache)} cache of one longest sequence, "
        f"{_gib(SERVER_FIXED_BYTES)} besides. Change one or more of: {remedies}; or set gpu_memory_utilization "
        "(infer.yaml) yourself"
    )


def _remedies(
    train: TrainSettings, infer: InferSettings, shape: ModelShape, shared: Shared
) -> Iterator[tuple[str, int]]:
    """What can be changed, and what both programs together would need less; the most first."""

    def needed(train: TrainSettings, infer: InferSettings) -> int:
        trainer = estimate(train, shape, device="cuda", shared=shared).total
        return trainer + server_need(train, infer, shape).total

    half = max(1, train.sequence_len // 2)
    trains: dict[str, dict[str, Any]] = {
        "gradient_checkpointing: true (train.yaml)": {"gradient_checkpointing": True},
        "qlora_bnb: true (train.yaml)": {} if train.quantization else {"qlora_bnb": True},
        f"sequence_len: {half} (train.yaml; seq_len in orch.yaml)": {"sequence_len": half},
    }
    serves: dict[str, dict[str, Any]] = {
        f"max_model_len: {train.sequence_len} (infer.yaml)": {"max_model_len": train.sequence_len},
        "max_loras: 2 (infer.yaml)": {"max_loras": 2},
    }
    now = needed(train, infer)
    saved = {name: now - needed(train.model_copy(update=change), infer) for name, change in trains.items()}
    saved |= {name: now - needed(train, infer.model_copy(update=change)) for name, change in serves.items()}
    yield from sorted(((name, amount) for name, amount in saved.items() if amount > 0), key=lambda one: -one[1])


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"

"""How a device's memory is divided between trainer and server.

Where they take turns (`sleep_mode`), the server's KV cache and what only a step of the trainer needs are not there at
the same time: the server may have all but what stays of the trainer, and what stays of a server at rest must leave room
for a step.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from configs.infer import InferSettings
from configs.train import TrainSettings
from deploy.memory.device import DeviceMemory
from deploy.memory.estimate import ELEMENT_BYTES, GIB, Need, Shared, estimate
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
    trainer: Need
    server: int
    utilization: float
    """For vLLM's `gpu_memory_utilization`: `server` by the device's whole memory."""
    chosen: bool
    """Whether the user set it."""
    at_rest: int | None
    """What of `server` stays while the trainer steps; None where the server does not rest."""

    @property
    def overcommitted(self) -> int:
        """By how much both exceed what is free: above 0 only where the user set the server's share."""
        together = self.trainer.total + self.server
        if self.at_rest is not None:
            together = max(self.trainer.stays + self.server, self.trainer.total + self.at_rest)
        return max(0, together - self.memory.free)

    @property
    def gained(self) -> int:
        """By how much the server's share is larger for taking turns."""
        return 0 if self.chosen or self.at_rest is None else math.floor((1 - MARGIN) * self.trainer.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerNeed:
    """The least that vLLM starts with, in bytes."""

    weights: int
    adapters: int
    """Places for `max_loras` adapters on all linear layers."""
    cache: int
    """Keys and values of one sequence of `max_model_len`."""

    @property
    def at_rest(self) -> int:
        """Without the cache, and with what a server takes besides."""
        return SERVER_FIXED_BYTES + self.weights + self.adapters

    @property
    def total(self) -> int:
        """With the cache."""
        return self.at_rest + self.cache


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
    need: Need | None = None,
) -> Split:
    """Gives the server 90 % of what the trainer leaves, or what the user set as `gpu_memory_utilization`.

    `need` is the trainer's where it was measured (None: as it is estimated). Where the two take turns the trainer
    leaves all but what stays of it. Raises `NoRoom` where the user set nothing and what is left is less than the server
    starts with, or, where they take turns, what is left in a step is less than the server keeps at rest.
    """
    need = need or estimate(train, shape, device="cuda", shared=shared).need
    least, turns = server_need(train, infer, shape), _take_turns(train, infer)
    at_rest = least.at_rest if turns else None
    if "gpu_memory_utilization" in infer.model_fields_set:
        utilization = infer.gpu_memory_utilization
        server = math.floor(utilization * memory.total)
        return Split(memory=memory, trainer=need, server=server, utilization=utilization, chosen=True, at_rest=at_rest)
    left, in_a_step = ((1 - MARGIN) * (memory.free - one) for one in (need.stays if turns else need.total, need.total))
    utilization = math.floor(1000 * left / memory.total) / 1000
    server = math.floor(utilization * memory.total)
    if server < least.total or in_a_step < least.at_rest:
        raise NoRoom(_no_room(train, infer, shape, shared, memory=memory, need=need, left=left))
    return Split(memory=memory, trainer=need, server=server, utilization=utilization, chosen=False, at_rest=at_rest)


def _take_turns(train: TrainSettings, infer: InferSettings) -> bool:
    return train.sleep_mode and infer.sleep_mode


def _no_room(
    train: TrainSettings,
    infer: InferSettings,
    shape: ModelShape,
    shared: Shared,
    *,
    memory: DeviceMemory,
    need: Need,
    left: float,
) -> str:
    least, turns = server_need(train, infer, shape), _take_turns(train, infer)
    remedies = "; ".join(f"{change} (saves {_gib(saved)})" for change, saved in _remedies(train, infer, shape, shared))
    at_rest = f"; at rest it keeps {_gib(least.at_rest)}, beside a step of {_gib(need.step)}" if turns else ""
    return (
        f"of {_gib(memory.free)} free device memory the trainer {'keeps' if turns else 'needs'} "
        f"{_gib(need.stays if turns else need.total)}, which leaves the server {_gib(max(0, left))}; it starts with at "
        f"least {_gib(least.total)}: {_gib(least.weights)} weights, {_gib(least.adapters)} adapters, "
        f"{_gib(least.cache)} cache of one longest sequence, {_gib(SERVER_FIXED_BYTES)} besides{at_rest}. Change one "
        f"or more of: {remedies}; or set gpu_memory_utilization (infer.yaml) yourself"
    )


def _remedies(
    train: TrainSettings, infer: InferSettings, shape: ModelShape, shared: Shared
) -> Iterator[tuple[str, int]]:
    """What can be changed, and what both programs together would need less; the most first."""

    def needed(of_train: dict[str, Any], of_infer: dict[str, Any]) -> int:
        trainer, server = train.model_copy(update=of_train), infer.model_copy(update=of_infer)
        need = estimate(trainer, shape, device="cuda", shared=shared).need
        least = server_need(trainer, server, shape)
        if _take_turns(trainer, server):
            return need.stays + max(least.total, least.at_rest + need.step)
        return need.total + least.total

    half = max(1, train.sequence_len // 2)
    changes: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "gradient_checkpointing: true (train.yaml)": ({"gradient_checkpointing": True}, {}),
        "qlora_bnb: true (train.yaml)": ({} if train.quantization else {"qlora_bnb": True}, {}),
        f"sequence_len: {half} (train.yaml; seq_len in orch.yaml)": ({"sequence_len": half}, {}),
        f"max_model_len: {train.sequence_len} (infer.yaml)": ({}, {"max_model_len": train.sequence_len}),
        "max_loras: 2 (infer.yaml)": ({}, {"max_loras": 2}),
        "--sleep_mode, with max_async_level: 0 (orch.yaml)": ({"sleep_mode": True}, {"sleep_mode": True}),
    }
    now = needed({}, {})
    saved = {name: now - needed(*change) for name, change in changes.items()}
    yield from sorted(((name, amount) for name, amount in saved.items() if amount > 0), key=lambda one: -one[1])


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"

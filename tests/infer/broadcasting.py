"""Both sides of vLLM's weight transfer on a CPU: its rendezvous and messages are real, and its TCP store takes the
place of NCCL."""

import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.synchronize import Event
from typing import Any

import torch
from grpo.transport.run import RunFolder
from grpo.transport.weights.nccl import Rendezvous, WeightSender
from grpo.transport.weights.shards import Weight
from grpo.transport.weights.store import CANARY_FILE, PolicyPublisher

from tests.infer.versions_fakes import FULL, SHAPES, canary_of


class StoreCommunicator:
    """Broadcasts by the group's TCP store. Returns when all have it, as vLLM's does once streams are synchronised."""

    def __init__(self, group: Any, device: object) -> None:
        self.group = group

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        tensor.copy_(self.group.broadcast_obj(tensor, src))
        for rank in range(self.group.world_size):
            if rank != src and self.group.rank == src:
                self.group.recv_obj(rank)
            elif rank == self.group.rank != src:
                self.group.send_obj(None, src)


def produce(
    iterator: Iterator[Any], group: StoreCommunicator, src: int, post_iter_func: Callable[[Any], Any], **_: Any
) -> None:
    for one in iterator:
        group.broadcast(post_iter_func(one), src)


def consume(
    iterator: Iterator[Any], group: StoreCommunicator, src: int, post_unpack_func: Callable[[Any], Any], **_: Any
) -> None:
    for name, (shape, dtype) in iterator:
        tensor = torch.empty(shape, dtype=dtype)
        group.broadcast(tensor, src)
        post_unpack_func([(name, tensor)])


def without_nccl(put: Callable[[object, str, object], None]) -> None:
    """Puts the store in the place of NCCL and its streams."""
    from vllm.distributed.device_communicators import pynccl
    from vllm.distributed.weight_transfer import nccl_engine

    put(pynccl, "PyNcclCommunicator", StoreCommunicator)
    put(nccl_engine, "packed_nccl_broadcast_producer", produce)
    put(nccl_engine, "packed_nccl_broadcast_consumer", consume)
    put(torch.accelerator, "current_device_index", lambda: 0)


def weights(version: int) -> list[Weight]:
    """All values are the version's number."""
    return [
        Weight(name=name, dtype="float32", shape=shape, tensor=lambda shape=shape: torch.full(shape, float(version)))  # type: ignore[misc]
        for name, shape in SHAPES.items()
    ]


def broadcast(run: RunFolder, port: int, versions: Sequence[int], may_begin: Event) -> None:
    """A trainer, in a process of its own: publishes these versions, to one worker, and stays."""
    may_begin.wait()
    sender = WeightSender(Rendezvous(host="127.0.0.1", port=port, world_size=2), timeout_s=120)
    publisher = PolicyPublisher(run.broadcasts, run_id=run.run_id, sender=sender)
    for version in versions:
        files = {CANARY_FILE: canary_of(version).to_json()}
        publisher.publish(version=version, spec=FULL, files=files, weights=weights(version))
    time.sleep(600)

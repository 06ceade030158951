"""Weights from the trainer's GPU to the servers', by NCCL through both sides of vLLM's weight transfer.

NOT YET RUN ON A GPU: both of vLLM's sides are tested between two processes, with a TCP store in the place of NCCL.

A version's folder announces it: canary, metrics, and `weights.json` with the names, types and shapes of what is going
to be sent, and where trainer and servers meet. Its appearance makes the orchestrator tell the servers to receive. The
trainer is rank 0; every worker of every server takes part, so that a server that has gone, or joins late, cannot be
served: the trainer's timeout then ends the run. The folder becomes STABLE once the weights have arrived.
"""

import functools
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

from grpo.transport.background import Background
from grpo.transport.errors import TransportError
from grpo.transport.records import Natural, Record, require
from grpo.transport.weights.shards import Weight

ANNOUNCEMENT_FILE = "weights.json"


class Rendezvous(Record, frozen=True, kw_only=True):
    """Where the members of the group find each other."""

    host: str
    port: int
    world_size: int
    """The trainer, which is rank 0, and all workers of all servers."""


class Announcement(Record, frozen=True, kw_only=True):
    """The weights that are going to be sent, in this order. Lists of equal length."""

    rendezvous: Rendezvous
    session: str
    """Names one start of the trainer: with another session the servers join its group again, and receive everything."""
    names: tuple[str, ...]
    dtypes: tuple[Literal["float32", "float16", "bfloat16"], ...]
    """Types as torch names them."""
    shapes: tuple[tuple[Natural, ...], ...]

    def __post_init__(self) -> None:
        equal = len(self.names) == len(self.dtypes) == len(self.shapes) == len(set(self.names))
        counts = f"{len(self.names)} names, {len(self.dtypes)} types, {len(self.shapes)} shapes"
        require(equal, f"an announcement has {counts}, expected as many of each, no name twice")


class Engine(Protocol):
    """vLLM's trainer side. `source` is what it sends."""

    source: Any

    def send_weights(self) -> None:
        """Returns when everything has arrived."""


class WeightSender:
    """Rank 0 of the group: announces weights, and sends them."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        *,
        timeout_s: float,
        join: "Callable[[Rendezvous, Any], Engine] | None" = None,
    ) -> None:
        """`join` meets the servers, to send what a source gives; None for NCCL's."""
        self._rendezvous, self._join = rendezvous, join or join_by_nccl
        self._engine: Engine | None = None
        self._session = uuid.uuid4().hex
        waits_for = (
            f"{rendezvous.world_size - 1} workers of the servers to receive a version (weight_broadcast.timeout; "
            f"rendezvous at {rendezvous.host}:{rendezvous.port}); see their logs"
        )
        self._thread = Background("nccl", timeout_s=timeout_s, waits_for=waits_for)
        """Stays behind where NCCL waits for a member that never comes."""

    def announcement(self, weights: Sequence[Weight]) -> Announcement:
        """Returns what servers must know before they receive `weights`."""
        return Announcement(
            rendezvous=self._rendezvous,
            session=self._session,
            names=tuple(weight.name for weight in weights),
            dtypes=tuple(weight.dtype for weight in weights),  # type: ignore[misc]
            shapes=tuple(weight.shape for weight in weights),
        )

    def send(self, weights: Sequence[Weight]) -> None:
        """Returns when every server has the weights. Raises `DeadlineError` where one does not take part in time."""
        self._thread.submit(lambda: self._send(Source(weights)))
        self._thread.flush()

    def _send(self, source: "Source") -> None:
        if self._engine is None:
            self._engine = self._join(self._rendezvous, source)
        self._engine.source = source
        self._engine.send_weights()


class _Metadata(list[Any]):
    """Is read by vLLM from 0.33 on, and called by those before."""

    def __call__(self) -> "_Metadata":
        return self


class Source:
    """The weights as vLLM's trainer side reads them, once for each version: by `iter_full` from 0.33 on, by iteration
    before. `make contracts` compares it with what both read."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        self._weights = weights

    @functools.cached_property
    def metadata(self) -> _Metadata:
        """Name, type and shape of each weight."""
        import torch
        from vllm.distributed.weight_transfer.base import ParamMeta

        return _Metadata(ParamMeta(name=w.name, dtype=getattr(torch, w.dtype), shape=w.shape) for w in self._weights)

    def implements_iter_full(self) -> bool:
        """Whether it gives whole weights."""
        return True

    def iter_full(self) -> Iterator[tuple[str, Any]]:
        """Yields the name and the tensor of each weight, one at a time on the GPU of the main rank."""
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        return ((weight.name, weight.tensor().to(device)) for weight in self._weights)

    __iter__ = iter_full


class _ServersByThemselves:
    """Stands for the servers before vLLM's trainer side, whose messages they know already from the announcement."""

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Says nothing."""

    init_weight_transfer_engine = start_weight_update = update_weights = finish_weight_update = _nothing


def join_by_nccl(rendezvous: Rendezvous, source: Any) -> Engine:
    """Returns rank 0 of vLLM's group. Raises `TransportError` where the installed vLLM has no trainer side."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
    except ImportError as error:
        raise TransportError(
            "weight_broadcast.type: nccl needs a vLLM with WeightTransferTrainerFactory beside the trainer; install a "
            f"newer one, or use filesystem ({error})"
        ) from error
    init_info = NCCLTrainerInitInfo(
        master_address=rendezvous.host,
        master_port=rendezvous.port,
        world_size=rendezvous.world_size,
        rank=0,
    )
    engine: Engine = WeightTransferTrainerFactory.trainer_init(init_info, client=_ServersByThemselves(), source=source)
    return engine

"""Weights from the trainer's GPU to the servers', by NCCL through both sides of vLLM's weight transfer.

NOT YET RUN ON A GPU: the order of the calls is tested with stand-ins for vLLM's two sides, the collectives are not.

A version's folder announces it: canary, metrics, and `weights.json` with the names, types and shapes of what is going
to be sent, and where trainer and servers meet. Its appearance makes the orchestrator tell the servers to receive. The
trainer is rank 0; every worker of every server takes part, so that a server that has gone, or joins late, cannot be
served: the trainer's timeout then ends the run. The folder becomes STABLE once the weights have arrived.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

from transport.errors import DeadlineError, TransportError
from transport.folders import ANNOUNCED, Content, mark_stable, step_folder
from transport.records import Natural, PolicySpec, Record, require
from transport.weights.base import PolicyPublisher, Weight
from transport.weights.filesystem import FilesystemPolicyPublisher

ANNOUNCEMENT_FILE = "weights.json"


class Rendezvous(Record, frozen=True, kw_only=True):
    """Where the members of the group find each other."""

    host: str
    port: int
    world_size: int
    """The trainer, which is rank 0, and all workers of all servers."""


class Announcement(Record, frozen=True, kw_only=True):
    """What is going to be sent, in this order. Lists of equal length."""

    rendezvous: Rendezvous
    names: tuple[str, ...]
    dtypes: tuple[Literal["float32", "float16", "bfloat16"], ...]
    """As torch names them."""
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


class NcclPolicyPublisher(PolicyPublisher):
    """Announces a version by a folder, sends its weights, and makes the folder STABLE."""

    def __init__(
        self,
        folders: FilesystemPolicyPublisher,
        rendezvous: Rendezvous,
        *,
        timeout_s: float,
        join: "Callable[[Rendezvous, Any], Engine] | None" = None,
    ) -> None:
        """`join` meets the servers, to send what a source gives; None for NCCL's."""
        self._folders, self._rendezvous, self._timeout_s = folders, rendezvous, timeout_s
        self._join = join or join_by_nccl
        self._engine: Engine | None = None

    def publish(
        self, *, version: int, spec: PolicySpec, files: Mapping[str, Content], weights: Sequence[Weight] = ()
    ) -> None:
        """Returns when every server has the weights. Raises `DeadlineError` where one does not take part in time."""
        announcement = Announcement(
            rendezvous=self._rendezvous,
            names=tuple(weight.name for weight in weights),
            dtypes=tuple(weight.dtype for weight in weights),  # type: ignore[misc]
            shapes=tuple(weight.shape for weight in weights),
        )
        announced = {**files, ANNOUNCEMENT_FILE: announcement.to_json()}
        self._folders.write(version, spec, announced, marker=ANNOUNCED)
        self._within_timeout(lambda: self._send(Source(weights)), version)
        mark_stable(step_folder(self._folders.folder, version))

    def _send(self, source: "Source") -> None:
        if self._engine is None:
            self._engine = self._join(self._rendezvous, source)
        self._engine.source = source
        self._engine.send_weights()

    def _within_timeout(self, send: Callable[[], None], version: int) -> None:
        """Runs it in a thread, which stays behind where NCCL waits for a member that never comes."""
        errors: list[Exception] = []

        def run() -> None:
            try:
                send()
            except Exception as error:  # raised again where it is waited for
                errors.append(error)

        thread = threading.Thread(target=run, name="nccl", daemon=True)
        thread.start()
        thread.join(self._timeout_s)
        if thread.is_alive():
            where = self._rendezvous
            raise DeadlineError(
                f"waited weight_broadcast.timeout = {self._timeout_s:g} s for {where.world_size - 1} workers of the "
                f"servers to receive version {version} (rendezvous at {where.host}:{where.port}); see their logs"
            )
        if errors:
            raise errors[0]


class Source:
    """The weights as vLLM's trainer side reads them, once for each version."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        self._weights = weights

    def metadata(self) -> list[Any]:
        """Returns name, type and shape of each weight."""
        import torch
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name=w.name, dtype=getattr(torch, w.dtype), shape=w.shape) for w in self._weights]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return ((weight.name, weight.tensor()) for weight in self._weights)


class _ServersByThemselves:
    """What vLLM's trainer side would tell the servers they know already, from the announcement."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Told by `Announcement.rendezvous`."""

    def start_weight_update(self) -> None:
        """Told by the folder's appearance."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Told by the announcement's names, types and shapes."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Each server finishes when it has received all."""


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

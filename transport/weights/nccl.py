"""Weights from the trainer's GPU to the servers', by NCCL through vLLM's weight-transfer engine.

NOT YET RUN ON A GPU: the order of the calls is tested with stand-ins for the group and for vLLM's engine, the
collectives themselves are not.

A version's folder announces it: canary, metrics, and `weights.json` with the names, types and shapes of what is going
to be sent, and where trainer and servers meet. Its appearance is what makes the orchestrator tell the servers to
receive. The trainer is rank 0 and broadcasts each tensor in the announced order; every worker of every server takes
part, so that a server that has gone, or joins late, cannot be served: the trainer's timeout then ends the run.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from transport.errors import DeadlineError
from transport.folders import Content
from transport.records import Natural, PolicyManifest, PolicySpec, Record, require
from transport.weights.base import PolicyPublisher, Weight

ANNOUNCEMENT_FILE = "weights.json"
TORCH_NAMES: dict[str, Literal["float32", "float16", "bfloat16"]] = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
}


class Meeting(Record, frozen=True, kw_only=True):
    """Where the members of the group find each other."""

    host: str
    port: int
    world_size: int
    """The trainer, which is rank 0, and all workers of all servers."""


class Announcement(Record, frozen=True, kw_only=True):
    """What is going to be sent, in this order. Lists of equal length."""

    meeting: Meeting
    names: tuple[str, ...]
    dtypes: tuple[Literal["float32", "float16", "bfloat16"], ...]
    """As torch names them."""
    shapes: tuple[tuple[Natural, ...], ...]

    def __post_init__(self) -> None:
        equal = len(self.names) == len(self.dtypes) == len(self.shapes) == len(set(self.names))
        counts = f"{len(self.names)} names, {len(self.dtypes)} types, {len(self.shapes)} shapes"
        require(equal, f"an announcement has {counts}, expected as many of each, no name twice")


class Group(Protocol):
    """The trainer's membership in the group."""

    def send(self, tensor: Any) -> None:
        """Broadcasts a tensor; it may return before the tensor has arrived."""

    def wait(self) -> None:
        """Returns when everything that was sent has arrived everywhere."""


class NcclPolicyPublisher(PolicyPublisher):
    """Announces a version by `folders`, then broadcasts its weights."""

    def __init__(
        self,
        folders: PolicyPublisher,
        meeting: Meeting,
        *,
        timeout_s: float,
        join: "Callable[[Meeting], Group] | None" = None,
    ) -> None:
        """`join` gives the membership; None for NCCL's."""
        self._folders, self._meeting, self._timeout_s = folders, meeting, timeout_s
        self._join = join or VllmGroup
        self._group: Group | None = None

    def publish(
        self, *, version: int, spec: PolicySpec, files: Mapping[str, Content], weights: Sequence[Weight] = ()
    ) -> PolicyManifest:
        """Returns when every server has the weights. Raises `DeadlineError` where one does not take part in time."""
        announcement = Announcement(
            meeting=self._meeting,
            names=tuple(weight.name for weight in weights),
            dtypes=tuple(TORCH_NAMES[weight.dtype] for weight in weights),
            shapes=tuple(weight.shape for weight in weights),
        )
        announced = {**files, ANNOUNCEMENT_FILE: announcement.to_json()}
        manifest = self._folders.publish(version=version, spec=spec, files=announced)
        self._within_timeout(lambda: self._send(weights), version)
        return manifest

    def _send(self, weights: Sequence[Weight]) -> None:
        if self._group is None:
            self._group = self._join(self._meeting)
        for weight in weights:
            tensor = weight.tensor()
            if tuple(tensor.shape) != weight.shape:
                raise ValueError(f"{weight.name} has shape {tuple(tensor.shape)}, announced was {weight.shape}")
            self._group.send(tensor)
        self._group.wait()

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
            meeting = self._meeting
            raise DeadlineError(
                f"waited weight_broadcast.timeout = {self._timeout_s:g} s for {meeting.world_size - 1} workers of the "
                f"servers to receive version {version} (meeting at {meeting.host}:{meeting.port}); see their logs"
            )
        if errors:
            raise errors[0]


class VllmGroup:
    """Rank 0 of vLLM's NCCL group."""

    def __init__(self, meeting: Meeting) -> None:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        self._communicator: Any = trainer_init(
            {"master_address": meeting.host, "master_port": meeting.port, "world_size": meeting.world_size}
        )
        self._sent: list[Any] = []
        """Kept until they have arrived, because NCCL reads their memory meanwhile."""

    def send(self, tensor: Any) -> None:
        """On the current stream of this thread."""
        import torch

        whole = tensor.contiguous()
        self._communicator.broadcast(whole, src=0, stream=torch.cuda.current_stream())
        self._sent.append(whole)

    def wait(self) -> None:
        """Waits for the stream."""
        import torch

        torch.cuda.current_stream().synchronize()
        self._sent.clear()

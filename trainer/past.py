"""The adapters of earlier versions, each of which may take the place of the current ones for a while."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from grpo.trainer.distributed import Ranks, local_tensor
from grpo.trainer.errors import ModelError
from grpo.trainer.model import Policy
from grpo.trainer.weights import AdapterWeights
from grpo.transport.folders import step_folder

Shards = Mapping[str, torch.Tensor]
"""This rank's part of the adapters by the parameters' names, float32 in main memory."""


class PastVersions:
    """The adapters of the newest versions in main memory: of each rank its own shards.

    They take 4 bytes for each trained parameter and version. Where all weights are trained, none but the current ones
    are kept.
    """

    def __init__(self, policy: Policy, ranks: Ranks, broadcasts: Path) -> None:
        """`broadcasts` holds the folders of published versions, from which a trainer that goes on reads those that it
        has not made itself."""
        self._policy, self._ranks, self._broadcasts = policy, ranks, broadcasts
        self._parameters = policy.named_parameters if policy.trains_adapters else {}
        self._held: dict[int, Shards] = {}
        self._newest = -1

    def keep(self, version: int, *, num: int) -> None:
        """Keeps the current adapters as those of `version`, and of all versions the `num` newest."""
        self._newest = version
        if not self._parameters:
            return
        room: Shards = {}
        for old in [one for one in self._held if not version - num < one <= version]:
            room = self._held.pop(old)
        current = {name: local_tensor(parameter) for name, parameter in self._parameters.items()}
        room = room or {name: _room(tensor) for name, tensor in current.items()}
        torch._foreach_copy_([room[name] for name in current], list(current.values()), non_blocking=True)
        self._held[version] = room

    def has(self, version: int) -> bool:
        """Returns whether a version can take the place of the current one: it is that, or is kept, or its folder is
        still there. Collective."""
        if version == self._newest:
            return True
        if not self._parameters or version > self._newest:
            return False
        if version not in self._held and (found := self._read(version)) is not None:
            self._held[version] = found
        return not self._ranks.all_reduce_max(int(version not in self._held))

    def _read(self, version: int) -> Shards | None:
        weights = self._policy.weights
        assert isinstance(weights, AdapterWeights)
        try:
            read = weights.read(step_folder(self._broadcasts, version))
        except (OSError, ModelError):  # removed, or published as merged weights
            return None
        return {name: local_tensor(read[p]).to("cpu", copy=True) for name, p in self._parameters.items()}

    @contextmanager
    def in_place(self, version: int) -> Iterator[None]:
        """Makes the parameters hold a version for which `has` is true within the block; afterwards they are what they
        were, bit for bit. The block must not begin or end between a forward pass and its backward pass. Collective."""
        if version == self._newest:
            yield
            return
        self._put(self._held[version])
        try:
            yield
        finally:
            self._put(self._held[self._newest])

    def _put(self, held: Shards) -> None:
        current = [local_tensor(parameter) for parameter in self._parameters.values()]
        torch._foreach_copy_(current, [held[name] for name in self._parameters], non_blocking=True)
        self._policy.reshard()


def _room(tensor: torch.Tensor) -> torch.Tensor:
    """Returns room for a copy in main memory, pinned where the tensor is on a GPU, which then is not waited for."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)

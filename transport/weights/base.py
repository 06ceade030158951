"""What every weight channel promises.

A version appears whole or not at all. What a reader returns has been checked against the manifest: run, sizes, digests.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from transport.folders import Content
from transport.records import PolicyManifest, PolicySpec

WEIGHTS_SUFFIX = ".safetensors"
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
CANARY_FILE = "canary.json"
METRICS_FILE = "metrics.json"
NOISE_FILE = "noise.safetensors"
"""The norm weights with a version's noise, float32, by the names of the base's checkpoint."""
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def policy_name(version: int, *, noisy: bool = False, adapter: str = "") -> str:
    """Returns the name under which a version is served, `policy-v12`; with its noise it is another one, and so is that
    of an adapter that is not the version's first, `policy-v12-NAME`."""
    name = f"policy-v{version}-{adapter}" if adapter else f"policy-v{version}"
    return f"{name}+noise" if noisy else name


def is_weights(name: str) -> bool:
    """Returns whether a version's file holds weights, which only servers read."""
    return name.endswith(WEIGHTS_SUFFIX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One tensor of a version that is no adapter:
    ``Weight(name="model.norm.weight", dtype="float32", shape=(128,), tensor=lambda: norm)``"""

    name: str
    """As in the base model's checkpoint."""
    dtype: str
    """As torch names it: `float32`, `float16`, `bfloat16`."""
    shape: tuple[int, ...]
    tensor: Callable[[], Any]
    """Gives it as a tensor where the trainer computes; called when it is written or sent."""

    @property
    def num_bytes(self) -> int:
        """Size of its values."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPolicy:
    """A version as it was read, with the bytes of its small files."""

    manifest: PolicyManifest
    small_files: Mapping[str, bytes]
    """Every file but the weights, checked."""


class PolicyPublisher(ABC):
    """The trainer's end."""

    @abstractmethod
    def publish(
        self, *, version: int, spec: PolicySpec, files: Mapping[str, Content], weights: Sequence[Weight] = ()
    ) -> None:
        """Makes `version` visible to every reader, whole. One that is there already stays untouched where it is the
        same, whatever its metrics; another one makes room first, so that for a moment there is none.
        An adapter is among the `files`; of other kinds the `weights` travel as the channel sees fit.

        Raises `StorageError`; nothing of the version is visible then.
        """

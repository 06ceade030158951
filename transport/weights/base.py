"""What every weight channel promises.

A version appears whole or not at all. What a reader returns has been checked against the manifest: run, sizes, digests.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from transport.errors import DeadlineError
from transport.folders import Buffer, Content
from transport.records import PolicyManifest, PolicySpec

POLL_S = 0.01
WEIGHTS_SUFFIX = ".safetensors"
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
CANARY_FILE = "canary.json"
METRICS_FILE = "metrics.json"
NOISE_FILE = "noise.safetensors"
"""The norm weights with a version's noise, float32, by the names of the base's checkpoint."""


def policy_name(version: int, *, noisy: bool = False, adapter: str = "") -> str:
    """The name under which a version is served, `policy-v12`; with its noise it is another one, and so is that of an
    adapter that is not the version's first, `policy-v12-NAME`."""
    name = f"policy-v{version}-{adapter}" if adapter else f"policy-v{version}"
    return f"{name}+noise" if noisy else name


def is_weights(name: str) -> bool:
    """Whether a version's file holds weights, which only servers read."""
    return name.endswith(WEIGHTS_SUFFIX)


ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1, "I64": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One tensor of a version that is no adapter:
    ``Weight(name="model.norm.weight", dtype="F32", shape=(128,), read=lambda: bytes(512), tensor=lambda: norm)``"""

    name: str
    """As in the base model's checkpoint."""
    dtype: str
    """As safetensors names it: `F32`, `F16`, `BF16`."""
    shape: tuple[int, ...]
    read: Callable[[], Buffer]
    """Gives its values, row after row, little-endian; called when they are written."""
    tensor: Callable[[], Any]
    """Gives the same as a tensor where the trainer computes; called when it is sent."""

    @property
    def num_bytes(self) -> int:
        """Size of its values."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


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
    ) -> PolicyManifest:
        """Makes `version` visible to every reader, whole. One that is there already is replaced by another attempt.
        An adapter is among the `files`; of other kinds the `weights` travel as the channel sees fit.

        Raises `StorageError`; nothing of the version is visible then.
        """

    def holds(
        self, *, version: int, spec: PolicySpec, files: Mapping[str, Content], weights: Sequence[Weight] = ()
    ) -> bool:
        """Whether `version` is visible already, whole and with just this content; metrics may differ. A channel that
        cannot tell says no."""
        return False


class PolicyReader(ABC):
    """The orchestrator's end: notices versions; the weights themselves are for the servers."""

    @abstractmethod
    def poll(self, version: int) -> PublishedPolicy | None:
        """`version`, or None where it is not there yet. Raises `CorruptError`, `StaleRunError`."""

    @abstractmethod
    def latest(self) -> int | None:
        """The highest version there is."""

    def wait_for(self, version: int, *, timeout_s: float) -> PublishedPolicy:
        """`version`, waiting at most `timeout_s` seconds for it; then raises `DeadlineError`."""
        deadline = time.monotonic() + timeout_s
        while (published := self.poll(version)) is None:
            if time.monotonic() > deadline:
                raise DeadlineError(f"waited {timeout_s:g} s for the trainer to publish version {version}")
            time.sleep(POLL_S)
        return published

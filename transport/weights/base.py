"""What every weight channel promises.

A version appears whole or not at all. What a reader returns has been checked against the manifest: run, sizes, digests.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from transport.errors import DeadlineError
from transport.types import PolicyManifest, PolicySpec

POLL_S = 0.01
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
CANARY_FILE = "canary.json"
METRICS_FILE = "metrics.json"


def policy_name(version: int) -> str:
    """The name under which a version is served."""
    return f"policy-v{version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPolicy:
    """A version as it was read, with the bytes of its small files."""

    manifest: PolicyManifest
    small_files: Mapping[str, bytes]
    """Every file but the weights, checked."""


class PolicyPublisher(ABC):
    """The trainer's end."""

    @abstractmethod
    def publish(self, *, version: int, spec: PolicySpec, files: Mapping[str, bytes]) -> PolicyManifest:
        """Makes `version` visible to every reader, whole."""


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

"""Batches and policy versions between threads of one process, without files."""

import time
from collections.abc import Callable, Mapping, Sequence

from grpo.transport.batches.filesystem import nothing
from grpo.transport.codec import decode, encode
from grpo.transport.errors import DeadlineError
from grpo.transport.folders import Buffer, Content, chunks_of, file_entry
from grpo.transport.records import MicroBatch, PolicyManifest, PolicySpec
from grpo.transport.weights.shards import Weight, shard_files


class MemoryBatches:
    """One channel; its messages are encoded as those of other backends, so that what arrives is no alias."""

    def __init__(self) -> None:
        self.steps: dict[int, list[Buffer]] = {}
        self.last_step: int | None = None

    def send(self, step: int, ranks: Sequence[Sequence[MicroBatch]]) -> None:
        self.steps[step] = [encode(batches) for batches in ranks]

    def finish(self, last_step: int) -> None:
        self.last_step = last_step


class MemoryBatchReceiver:
    """Receives for one rank."""

    def __init__(self, channel: MemoryBatches, *, rank: int = 0) -> None:
        self._channel, self._rank = channel, rank

    def receive(
        self, step: int, *, timeout_s: float, check: Callable[[], None] = nothing
    ) -> tuple[MicroBatch, ...] | None:
        deadline = time.monotonic() + timeout_s
        while step not in self._channel.steps:
            if self._channel.last_step is not None and step > self._channel.last_step:
                return None
            if time.monotonic() > deadline:
                raise DeadlineError(f"waited {timeout_s:g} s for the orchestrator to deliver batch {step}")
            check()
            time.sleep(0.01)
        return decode(self._channel.steps[step][self._rank])

    def close(self) -> None:
        """Nothing to end."""


class MemoryPolicies:
    """The trainer's end; what it has published, by version."""

    def __init__(self, *, run_id: str) -> None:
        self._run_id = run_id
        self.versions: dict[int, tuple[PolicyManifest, dict[str, bytes]]] = {}

    def publish(
        self, *, version: int, spec: PolicySpec, files: Mapping[str, Content], weights: Sequence[Weight] = ()
    ) -> None:
        contents = {**shard_files(weights), **files}
        held = {name: b"".join(chunks_of(content)) for name, content in contents.items()}
        entries = {name: file_entry(data) for name, data in held.items()}
        manifest = PolicyManifest(run_id=self._run_id, version=version, spec=spec, files=entries)
        self.versions[version] = (manifest, held)

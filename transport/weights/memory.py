"""Policy versions between threads of one process: the same promises without files."""

import threading
from collections.abc import Mapping, Sequence

from transport.folders import Content, chunks_of, file_entry
from transport.records import PolicyManifest, PolicySpec
from transport.weights.base import PolicyPublisher, PolicyReader, PublishedPolicy, Weight, is_weights
from transport.weights.retention import InUse, Retention
from transport.weights.shards import shard_files


class MemoryPolicies(PolicyPublisher, PolicyReader):
    """Both ends of one channel. `in_use` is what a reader needs; None says nothing."""

    def __init__(self, *, run_id: str, retention: Retention | None = None) -> None:
        self._run_id, self._retention = run_id, retention
        self._lock = threading.Lock()
        self.versions: dict[int, tuple[PolicyManifest, dict[str, bytes]]] = {}
        self.in_use: InUse | None = None

    def publish(
        self, *, version: int, spec: PolicySpec, files: Mapping[str, Content], weights: Sequence[Weight] = ()
    ) -> PolicyManifest:
        contents = {**shard_files(weights), **files}
        held = {name: b"".join(chunks_of(content)) for name, content in contents.items()}
        entries = {name: file_entry(data) for name, data in held.items()}
        with self._lock:
            manifest = PolicyManifest(run_id=self._run_id, version=version, spec=spec, files=entries)
            self.versions[version] = (manifest, held)
            if self._retention is not None and self.in_use is not None:
                for old in self._retention.removable(self.versions, self.in_use):
                    del self.versions[old]
        return manifest

    def poll(self, version: int) -> PublishedPolicy | None:
        with self._lock:
            if version not in self.versions:
                return None
            manifest, files = self.versions[version]
        return PublishedPolicy(manifest=manifest, small_files={n: d for n, d in files.items() if not is_weights(n)})

    def latest(self) -> int | None:
        with self._lock:
            return max(self.versions, default=None)

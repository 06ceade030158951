"""Policy versions between threads of one process: the same promises without files."""

import threading
from collections.abc import Mapping

from transport.files import file_entry
from transport.types import PolicyManifest, PolicySpec
from transport.weights.base import ADAPTER_FILE, PolicyPublisher, PolicyReader, PublishedPolicy


class MemoryPolicies(PolicyPublisher, PolicyReader):
    """Both ends of one channel."""

    def __init__(self, *, run_id: str) -> None:
        self._run_id = run_id
        self._lock = threading.Lock()
        self.versions: dict[int, tuple[PolicyManifest, dict[str, bytes]]] = {}

    def publish(self, *, version: int, spec: PolicySpec, files: Mapping[str, bytes]) -> PolicyManifest:
        entries = {name: file_entry(data) for name, data in files.items()}
        manifest = PolicyManifest(run_id=self._run_id, version=version, attempt=0, spec=spec, files=entries)
        with self._lock:
            self.versions[version] = (manifest, dict(files))
        return manifest

    def poll(self, version: int) -> PublishedPolicy | None:
        with self._lock:
            if version not in self.versions:
                return None
            manifest, files = self.versions[version]
        return PublishedPolicy(manifest=manifest, small_files={n: d for n, d in files.items() if n != ADAPTER_FILE})

    def latest(self) -> int | None:
        with self._lock:
            return max(self.versions, default=None)

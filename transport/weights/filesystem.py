"""Policy versions as one folder each: `broadcasts/step_000012/`, `STABLE` last."""

import logging
import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from transport import faults
from transport.errors import CorruptError, StaleRunError, TransportError
from transport.folders import (
    Chunks,
    Content,
    check_large,
    hashed,
    read_checked,
    read_manifest,
    remove_leftovers,
    step_folder,
    write_folder,
)
from transport.records import FileEntry, PolicyManifest, PolicySpec
from transport.weights.base import (
    METRICS_FILE,
    PolicyPublisher,
    PolicyReader,
    PublishedPolicy,
    Weight,
    is_weights,
)
from transport.weights.retention import Retention, read_in_use
from transport.weights.shards import MAX_SHARD_BYTES, shard_files

log = logging.getLogger(__name__)

_READ_ATTEMPTS = 3


class FilesystemPolicyPublisher(PolicyPublisher):
    """Writes below `folder`, the run's `broadcasts` folder, of which it is the only writer.

    With `retention`, old versions are removed after each publication, as far as the orchestrator has said that
    nobody needs them.
    """

    def __init__(
        self,
        folder: Path,
        *,
        run_id: str,
        retention: Retention | None = None,
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ) -> None:
        self._folder, self._run_id, self._retention = folder, run_id, retention
        self._max_shard_bytes = max_shard_bytes
        _restore_replaced(folder)
        remove_leftovers(folder)

    def publish(
        self, *, version: int, spec: PolicySpec, files: Mapping[str, Content], weights: Sequence[Weight] = ()
    ) -> PolicyManifest:
        folder, entries = step_folder(self._folder, version), dict[str, FileEntry]()

        def manifest() -> PolicyManifest:
            return PolicyManifest(run_id=self._run_id, version=version, spec=spec, files=entries)

        write_folder(folder, self._contents(files, weights, entries), lambda: manifest().to_json())
        faults.point("policy.published")
        if self._retention is not None:
            self._remove_old(self._retention)
        return manifest()

    def holds(
        self, *, version: int, spec: PolicySpec, files: Mapping[str, Content], weights: Sequence[Weight] = ()
    ) -> bool:
        try:
            manifest, _ = verify_policy(step_folder(self._folder, version), run_id=self._run_id, version=version)
        except TransportError:
            return False
        entries = dict[str, FileEntry]()
        for content in self._contents(files, weights, entries).values():
            for _ in content():
                pass
        there = {name: entry for name, entry in manifest.files.items() if name != METRICS_FILE}
        return manifest.spec == spec and there == {n: entry for n, entry in entries.items() if n != METRICS_FILE}

    def _contents(
        self, files: Mapping[str, Content], weights: Sequence[Weight], entries: dict[str, FileEntry]
    ) -> dict[str, Chunks]:
        """All files of a version; `entries` has those that have been gone through."""
        contents = {**shard_files(weights, max_shard_bytes=self._max_shard_bytes), **files}
        return {name: hashed(name, content, entries) for name, content in contents.items()}

    def _remove_old(self, retention: Retention) -> None:
        """Removes what nobody needs. What cannot be removed stays, with a warning."""
        try:
            in_use = read_in_use(self._folder, run_id=self._run_id)
            for version in [] if in_use is None else retention.removable(_versions(self._folder), in_use):
                _remove(step_folder(self._folder, version))
        except (OSError, TransportError) as error:
            log.warning("old policy versions stay: %s", error)


class FilesystemPolicyReader(PolicyReader):
    """Reads below `folder`, the run's `broadcasts` folder."""

    def __init__(self, folder: Path, *, run_id: str) -> None:
        self._folder, self._run_id = folder, run_id

    def poll(self, version: int) -> PublishedPolicy | None:
        folder = step_folder(self._folder, version)
        for _ in range(_READ_ATTEMPTS - 1):
            try:
                return self._read(folder, version)
            except CorruptError:  # perhaps replaced or removed while it was read
                continue
        return self._read(folder, version)

    def _read(self, folder: Path, version: int) -> PublishedPolicy | None:
        if not folder.exists():
            return None
        manifest = read_policy_manifest(folder, run_id=self._run_id, version=version)
        small = {n: read_checked(folder, n, e) for n, e in manifest.files.items() if not is_weights(n)}
        return PublishedPolicy(manifest=manifest, small_files=small)

    def latest(self) -> int | None:
        return max(_versions(self._folder), default=None)


def read_policy_manifest(folder: Path, *, run_id: str, version: int) -> PolicyManifest:
    """The manifest of a version's folder. Raises `CorruptError`, `SchemaVersionError` or `StaleRunError`."""
    manifest = PolicyManifest.from_json(read_manifest(folder))
    if manifest.run_id != run_id:
        raise StaleRunError(f"{folder.name} belongs to run {manifest.run_id}, this is run {run_id}")
    if manifest.version != version:
        raise CorruptError(f"{folder.name} holds version {manifest.version}, expected {version}")
    return manifest


def verify_policy(folder: Path, *, run_id: str, version: int) -> tuple[PolicyManifest, dict[str, bytes]]:
    """The manifest of a version's folder and the bytes of its files, all checked against sizes and digests.

    Of a version that is no adapter, whose weights are large, they are checked piece by piece and not returned.
    """
    manifest = read_policy_manifest(folder, run_id=run_id, version=version)
    held = {}
    for name, entry in manifest.files.items():
        if manifest.spec.kind != "adapter" and is_weights(name):
            check_large(folder, name, entry)
        else:
            held[name] = read_checked(folder, name, entry)
    return manifest, held


def _versions(folder: Path) -> list[int]:
    return [int(p.name.removeprefix("step_")) for p in folder.glob("step_*") if p.name[5:].isdigit()]


def _restore_replaced(parent: Path) -> None:
    """Puts back a version whose publisher was killed after it had moved it away and before the new one was there."""
    for replaced in parent.glob(".step_*.old"):
        folder = parent / replaced.name.split(".")[1]
        if not folder.exists():
            replaced.rename(folder)


def _remove(folder: Path) -> None:
    """Renamed first, so that nobody sees a part of it."""
    retired = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.tmp")
    folder.rename(retired)
    faults.point("policy.retired")
    shutil.rmtree(retired)
    faults.point("policy.removed")

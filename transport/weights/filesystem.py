"""Policy versions as one folder each: `broadcasts/step_000012/`, `STABLE` last."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from transport.errors import CorruptError, StaleRunError, TransportError
from transport.folders import (
    STABLE,
    Content,
    check_large,
    file_entry,
    read_checked,
    read_manifest,
    remove_folder,
    remove_leftovers,
    step_folder,
    steps_in,
    write_folder,
)
from transport.records import FileEntry, PolicyManifest, PolicySpec
from transport.weights.base import (
    METRICS_FILE,
    PolicyPublisher,
    PublishedPolicy,
    Weight,
    is_weights,
)
from transport.weights.retention import Retention, read_in_use
from transport.weights.shards import MAX_SHARD_BYTES, shard_files

log = logging.getLogger(__name__)

_READ_ATTEMPTS = 3
R = TypeVar("R")


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
        self.folder, self._run_id, self._retention = folder, run_id, retention
        self._max_shard_bytes = max_shard_bytes
        remove_leftovers(folder)

    def publish(
        self, *, version: int, spec: PolicySpec, files: Mapping[str, Content], weights: Sequence[Weight] = ()
    ) -> None:
        self.write(version, spec, {**shard_files(weights, max_shard_bytes=self._max_shard_bytes), **files})

    def write(self, version: int, spec: PolicySpec, contents: Mapping[str, Content], *, marker: str = STABLE) -> None:
        """Publishes a version of these files, and removes what nobody needs. `marker` is the file that comes last."""
        folder = step_folder(self.folder, version)
        if self._holds(folder, version, spec, contents):
            log.info("version %d is published already, and the same", version)
            return

        def manifest(entries: dict[str, FileEntry]) -> bytes:
            return PolicyManifest(run_id=self._run_id, version=version, spec=spec, files=entries).to_json()

        write_folder(folder, contents, manifest, marker=marker, replace=True)
        if self._retention is not None:
            self._remove_old(self._retention)

    def _holds(self, folder: Path, version: int, spec: PolicySpec, contents: Mapping[str, Content]) -> bool:
        """Whether the version is there, whole and with just this content; metrics may differ."""
        try:
            there, _ = verify_policy(folder, run_id=self._run_id, version=version)
        except (TransportError, OSError):
            return False
        if there.spec != spec or there.files.keys() != contents.keys() or not (folder / STABLE).exists():
            return False
        return all(name == METRICS_FILE or file_entry(contents[name]) == entry for name, entry in there.files.items())

    def _remove_old(self, retention: Retention) -> None:
        """Removes what nobody needs. What cannot be removed stays, with a warning."""
        try:
            in_use = read_in_use(self.folder, run_id=self._run_id)
            for version in [] if in_use is None else retention.removable(steps_in(self.folder), in_use):
                remove_folder(step_folder(self.folder, version))
        except (OSError, TransportError) as error:
            log.warning("old policy versions stay: %s", error)


class FilesystemPolicyReader:
    """The orchestrator's end: notices versions below `folder`, the run's `broadcasts` folder; the weights themselves
    are for the servers."""

    def __init__(self, folder: Path, *, run_id: str) -> None:
        self._folder, self._run_id = folder, run_id

    def poll(self, version: int) -> PublishedPolicy | None:
        """Returns `version`, or None where it is not there yet. Raises `CorruptError`, `StaleRunError`."""
        folder = step_folder(self._folder, version)

        def read() -> PublishedPolicy | None:
            if not folder.exists():
                return None
            manifest = read_policy_manifest(folder, run_id=self._run_id, version=version)
            small = {n: read_checked(folder, n, e) for n, e in manifest.files.items() if not is_weights(n)}
            return PublishedPolicy(manifest=manifest, small_files=small)

        return _steady(read)

    def digest(self, version: int) -> bytes | None:
        """Returns the digest of `version`'s manifest, another one where it is published again with other bytes; None
        where it is not there."""
        try:
            return (step_folder(self._folder, version) / STABLE).read_bytes()
        except FileNotFoundError:
            return None

    def latest(self) -> int | None:
        """Returns the highest version there is."""
        return max(steps_in(self._folder, part=STABLE), default=None)


def read_policy_manifest(folder: Path, *, run_id: str, version: int) -> PolicyManifest:
    """Returns the manifest of a version's folder. Raises `CorruptError`, `SchemaVersionError` or `StaleRunError`."""
    manifest = PolicyManifest.from_json(read_manifest(folder))
    if manifest.run_id != run_id:
        raise StaleRunError(f"{folder} belongs to run {manifest.run_id}, this is run {run_id}")
    if manifest.version != version:
        raise CorruptError(f"{folder} holds version {manifest.version}, expected {version}")
    return manifest


def verify_policy(folder: Path, *, run_id: str, version: int) -> tuple[PolicyManifest, dict[str, bytes]]:
    """Returns the manifest of a version's folder and the bytes of its files, all checked against sizes and digests.

    Of a version that is no adapter, whose weights are large, they are checked piece by piece and not returned.
    """

    def read() -> tuple[PolicyManifest, dict[str, bytes]]:
        manifest = read_policy_manifest(folder, run_id=run_id, version=version)
        held = {}
        for name, entry in manifest.files.items():
            if manifest.spec.kind != "adapter" and is_weights(name):
                check_large(folder, name, entry)
            else:
                held[name] = read_checked(folder, name, entry)
        return manifest, held

    return _steady(read)


def _steady(read: Callable[[], R]) -> R:
    """What is read, once more where it is corrupt: perhaps a restarted trainer was just publishing it anew."""
    for _ in range(_READ_ATTEMPTS - 1):
        try:
            return read()
        except CorruptError:
            continue
    return read()

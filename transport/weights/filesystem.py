"""Policy versions as one folder each: `broadcasts/step_000012/`, `STABLE` last."""

from collections.abc import Mapping
from pathlib import Path

from transport.errors import CorruptError, StaleRunError
from transport.files import file_entry, read_checked, read_manifest, step_folder, write_folder
from transport.types import PolicyManifest, PolicySpec
from transport.weights.base import ADAPTER_FILE, PolicyPublisher, PolicyReader, PublishedPolicy


class FilesystemPolicyPublisher(PolicyPublisher):
    """Writes below `folder`, the run's `broadcasts` folder."""

    def __init__(self, folder: Path, *, run_id: str) -> None:
        self._folder, self._run_id = folder, run_id

    def publish(self, *, version: int, spec: PolicySpec, files: Mapping[str, bytes]) -> PolicyManifest:
        entries = {name: file_entry(data) for name, data in files.items()}
        manifest = PolicyManifest(run_id=self._run_id, version=version, attempt=0, spec=spec, files=entries)
        write_folder(step_folder(self._folder, version), files, manifest.to_json())
        return manifest


class FilesystemPolicyReader(PolicyReader):
    """Reads below `folder`, the run's `broadcasts` folder."""

    def __init__(self, folder: Path, *, run_id: str) -> None:
        self._folder, self._run_id = folder, run_id

    def poll(self, version: int) -> PublishedPolicy | None:
        folder = step_folder(self._folder, version)
        if not folder.exists():
            return None
        manifest = read_policy_manifest(folder, run_id=self._run_id, version=version)
        small = {n: read_checked(folder, n, e) for n, e in manifest.files.items() if n != ADAPTER_FILE}
        return PublishedPolicy(manifest=manifest, small_files=small)

    def latest(self) -> int | None:
        versions = [int(p.name.removeprefix("step_")) for p in self._folder.glob("step_*") if p.name[5:].isdigit()]
        return max(versions, default=None)


def read_policy_manifest(folder: Path, *, run_id: str, version: int) -> PolicyManifest:
    """The manifest of a version's folder. Raises `CorruptError`, `SchemaVersionError` or `StaleRunError`."""
    manifest = PolicyManifest.from_json(read_manifest(folder))
    if manifest.run_id != run_id:
        raise StaleRunError(f"{folder.name} belongs to run {manifest.run_id}, this is run {run_id}")
    if manifest.version != version:
        raise CorruptError(f"{folder.name} holds version {manifest.version}, expected {version}")
    return manifest


def verify_policy(folder: Path, *, run_id: str, version: int) -> tuple[PolicyManifest, dict[str, bytes]]:
    """The manifest of a version's folder and the bytes of its files, all checked against sizes and digests."""
    manifest = read_policy_manifest(folder, run_id=run_id, version=version)
    return manifest, {name: read_checked(folder, name, entry) for name, entry in manifest.files.items()}

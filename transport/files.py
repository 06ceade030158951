"""Folders that appear whole or not at all, and readers that check before they use."""

import hashlib
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path

from transport.errors import CorruptError
from transport.types import FileEntry

MANIFEST = "manifest.json"
STABLE = "STABLE"


def file_entry(data: bytes) -> FileEntry:
    """Size and digest of a file's bytes."""
    return FileEntry(size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def fsync_folder(folder: Path) -> None:
    """Makes renames in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, data: bytes) -> None:
    """Writes and fsyncs one file."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_atomic(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replaces one file; readers see the old bytes or the new ones. `durable` also survives a power cut."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    if durable:
        write_synced(temporary, data)
    else:
        temporary.write_bytes(data)
    temporary.replace(path)
    if durable:
        fsync_folder(path.parent)


def write_folder(folder: Path, files: Mapping[str, bytes], manifest: bytes) -> None:
    """Writes files, manifest and the `STABLE` marker (which holds the manifest's digest, and comes last) into a
    temporary folder, syncs it and renames it to `folder`. An older folder of that name is replaced."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.tmp")
    temporary.mkdir()
    for name, data in files.items():
        write_synced(temporary / name, data)
    write_synced(temporary / MANIFEST, manifest)
    write_synced(temporary / STABLE, hashlib.sha256(manifest).hexdigest().encode())
    fsync_folder(temporary)
    if folder.exists():
        retired = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.old")
        folder.rename(retired)
        temporary.rename(folder)
        shutil.rmtree(retired)
    else:
        temporary.rename(folder)
    fsync_folder(folder.parent)


def read_manifest(folder: Path) -> bytes:
    """The manifest's bytes, checked against the `STABLE` marker."""
    try:
        manifest, marker = (folder / MANIFEST).read_bytes(), (folder / STABLE).read_bytes()
    except FileNotFoundError as error:
        name = Path(error.filename).name
        raise CorruptError(f"{folder.name} has no {name}: it is incomplete; have it published again") from error
    digest = hashlib.sha256(manifest).hexdigest()
    if marker.strip() != digest.encode():
        raise CorruptError(f"{folder.name}/{MANIFEST} has digest {digest[:12]}…, {STABLE} says {marker[:12]!r}…")
    return manifest


def read_checked(folder: Path, name: str, entry: FileEntry) -> bytes:
    """One file's bytes, checked against the manifest's entry."""
    path = folder / name
    try:
        size = path.stat().st_size
        if size != entry.size_bytes:
            raise CorruptError(f"{folder.name}/{name} has {size} bytes, the manifest says {entry.size_bytes}")
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise CorruptError(f"{folder.name}/{name} is missing, the manifest lists it") from error
    digest = hashlib.sha256(data).hexdigest()
    if digest != entry.sha256:
        raise CorruptError(f"{folder.name}/{name} has digest {digest[:12]}…, the manifest says {entry.sha256[:12]}…")
    return data


def step_folder(parent: Path, step: int) -> Path:
    """`parent/step_000012`."""
    return parent / f"step_{step:06d}"

"""Folders that appear whole or not at all, and readers that check before they use.

A folder is written under a temporary name, with a manifest of its files and, unless it is a batch's, the marker
`STABLE`, which comes last and holds the manifest's digest; then it is renamed. A folder that is there is never replaced
in place.
"""

import hashlib
import io
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from transport.errors import CorruptError, StorageError
from transport.records import FileEntry

_MAX_FSYNCS = 8
Buffer = bytes | memoryview
Chunks = Callable[[], Iterable[Buffer]]
"""A file's content piece by piece, made while it is written: for what should not be in memory as a whole."""
Content = Buffer | Chunks
MANIFEST = "manifest.json"
STABLE = "STABLE"
ANNOUNCED = "ANNOUNCED"
"""Takes the place of `STABLE` while what a folder speaks of is still on its way."""
SHA256 = "sha256"
"""Proof against forgery, for what is served."""
XXH3 = "xxh3_128"
"""Proof against accidents, for what is large and read once."""
_HASHES: dict[str, Callable[[], Any]] = {SHA256: hashlib.sha256, XXH3: xxhash.xxh3_128}


def file_entry(content: Content, *, kind: str = SHA256) -> FileEntry:
    """Returns size and digest of a file's content, without holding it. Raises `CorruptError` for a `kind` of digest
    that is not known."""
    if kind not in _HASHES:
        raise CorruptError(f"the manifest has a digest of the unknown kind {kind!r}, expected {' or '.join(_HASHES)}")
    digest, size = _HASHES[kind](), 0
    for chunk in chunks_of(content):
        digest.update(chunk)
        size += len(chunk)
    return FileEntry(size_bytes=size, digest=f"{kind}:{digest.hexdigest()}")


def fsync_folder(folder: Path) -> None:
    """Makes renames in `folder` durable."""
    _fsync(folder)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def chunks_of(content: Content) -> Iterable[Buffer]:
    """Returns the pieces of a file's content."""
    return content() if callable(content) else (content,)


def _write_file(path: Path, content: Content, *, kind: str = SHA256) -> FileEntry:
    """Writes a new file, and returns its entry."""
    digest, size = _HASHES[kind](), 0
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "wb", buffering=0) as file:
        for chunk in chunks_of(content):
            digest.update(chunk)
            size += len(chunk)
            left = memoryview(chunk)
            while left:
                left = left[file.write(left) :]
    return FileEntry(size_bytes=size, digest=f"{kind}:{digest.hexdigest()}")


def write_atomic(path: Path, data: Buffer, *, durable: bool = True) -> None:
    """Replaces one file; readers see the old bytes or the new ones. `durable` also survives a power cut. Raises
    `StorageError` where the folder is not there."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        _write_file(temporary, data)
        if durable:
            _fsync(temporary)
        temporary.replace(path)
        if durable:
            fsync_folder(path.parent)
    except FileNotFoundError as error:
        message = f"{path} cannot be written: {path.parent} was removed; make it again, and start the same command"
        raise StorageError(message) from error


def write_folder(
    folder: Path,
    files: Mapping[str, Content],
    manifest: Callable[[dict[str, FileEntry]], bytes],
    *,
    durable: bool = True,
    kind: str = SHA256,
    marker: str | None = STABLE,
    replace: bool = False,
) -> None:
    """Makes `folder` appear, with the files (named as in it, or as `a/b/file` below it), the `manifest` that is made
    of their entries, and the `marker`, if any. `durable` also survives a power cut. With
    `replace`, one that is there makes room at the end: readers see the old one, none, the new one.

    Raises `StorageError` where the folder is there already, or the disk is full or forbids it; nothing is left behind
    then.
    """
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.tmp")
    try:
        if folder.exists() and not replace:
            raise FileExistsError(None, "it is there already")
        temporary.mkdir(parents=True)
        below = {temporary / parent for name in files for parent in PurePosixPath(name).parents if parent.name}
        for inner in sorted(below, key=lambda path: len(path.parts)):
            inner.mkdir()
        entries = {name: _write_file(temporary / name, content, kind=kind) for name, content in files.items()}
        about = manifest(entries)
        _write_file(temporary / MANIFEST, about)
        own = [MANIFEST]
        if marker is not None:
            _write_file(temporary / marker, hashlib.sha256(about).hexdigest().encode())
            own.append(marker)
        if durable:  # all at once, so that the disk's journal is written once for all of them
            with ThreadPoolExecutor(_MAX_FSYNCS) as pool:
                list(pool.map(_fsync, [*(temporary / name for name in (*files, *own)), *below, temporary]))
        retired = _retire(folder) if folder.exists() else None
        temporary.rename(folder)
        if retired is not None:
            shutil.rmtree(retired)
        if durable:
            fsync_folder(folder.parent)
    except BaseException as error:  # also of whoever makes the content
        shutil.rmtree(temporary, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        why = error.strerror or error
        raise StorageError(f"{folder} cannot be written: {why}; make room or mend the permissions") from error


def mark_stable(folder: Path) -> None:
    """Makes an announced folder a stable one."""
    (folder / ANNOUNCED).rename(folder / STABLE)
    fsync_folder(folder)


def remove_folder(folder: Path) -> None:
    """Removes a folder. It is renamed first, so that nobody sees a part of it."""
    shutil.rmtree(_retire(folder))


def _retire(folder: Path) -> Path:
    return folder.rename(folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.tmp"))


def remove_leftovers(parent: Path) -> None:
    """Removes temporary folders that a killed writer left. Only the one writer of `parent` may call this."""
    for leftover in parent.glob(".*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)


def read_manifest(folder: Path, *, marked: bool = True) -> bytes:
    """Returns the manifest's bytes, checked against the marker where the folder is `marked`. Raises `CorruptError`."""
    announced = folder / ANNOUNCED
    try:
        manifest = (folder / MANIFEST).read_bytes()
        if not marked:
            return manifest
        marker = (announced if announced.exists() else folder / STABLE).read_bytes()
    except FileNotFoundError as error:
        raise CorruptError(f"{folder} has no {Path(error.filename).name}: it is incomplete") from error
    digest = hashlib.sha256(manifest).hexdigest()
    if marker.strip() != digest.encode():
        raise CorruptError(f"{folder}/{MANIFEST} has digest {digest[:12]}…, its marker says {marker[:12]!r}…")
    return manifest


def read_checked(folder: Path, name: str, entry: FileEntry) -> bytes:
    """Returns one file's bytes, checked against the manifest's entry. Raises `CorruptError`."""
    with _opened(folder, name, entry) as file:
        data = file.read()
    check_entry(f"{folder}/{name}", data, entry)
    return data


def check_large(folder: Path, name: str, entry: FileEntry) -> None:
    """Checks a file that a SHA-256 entry describes, without holding it. Raises `CorruptError`."""
    with _opened(folder, name, entry) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    _compare(f"{folder}/{name}", FileEntry(size_bytes=entry.size_bytes, digest=f"{SHA256}:{digest}"), entry)


def check_entry(what: str, data: Buffer, entry: FileEntry) -> None:
    """Checks bytes that `entry` describes; `what` they are is said where they differ. Raises `CorruptError`."""
    _compare(what, file_entry(data, kind=entry.digest.partition(":")[0]), entry)


@contextmanager
def _opened(folder: Path, name: str, entry: FileEntry) -> Iterator[io.BufferedReader]:
    """The file, which has the size that the manifest says."""
    try:
        with (folder / name).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != entry.size_bytes:
                raise CorruptError(f"{folder}/{name} has {size} bytes, the manifest says {entry.size_bytes}")
            yield file
    except FileNotFoundError as error:
        raise CorruptError(f"{folder}/{name} is missing, the manifest lists it") from error


def _compare(what: str, received: FileEntry, entry: FileEntry) -> None:
    if received != entry:
        digests = f"{received.digest[:20]}…, the manifest says {entry.digest[:20]}…"
        raise CorruptError(f"{what} has {received.size_bytes} bytes and digest {digests}")


def step_folder(parent: Path, step: int) -> Path:
    """Returns `parent/step_000012`."""
    return parent / f"step_{step:06d}"


def steps_in(parent: Path, *, part: str = "") -> list[int]:
    """Returns the steps that have a folder in `parent`, or those in whose folder there is `part`, ascending."""
    try:
        names = os.listdir(parent)  # noqa: PTH208 (called at every step; a Path for each name is slow)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"{parent} cannot be read: {error.strerror}; mend the permissions") from error
    steps = sorted(int(name[5:]) for name in names if name.startswith("step_") and name[5:].isdigit())
    return [step for step in steps if (step_folder(parent, step) / part).exists()] if part else steps

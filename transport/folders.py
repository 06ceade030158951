"""Folders that appear whole or not at all, and readers that check before they use."""

import hashlib
import io
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import xxhash

from transport import faults
from transport.errors import CorruptError, StorageError
from transport.records import FileEntry

Buffer = bytes | memoryview
Chunks = Callable[[], Iterable[Buffer]]
"""A file's content piece by piece, made while it is written: for what should not be in memory as a whole."""
Content = Buffer | Chunks
MANIFEST = "manifest.json"
STABLE = "STABLE"


def file_entry(data: Buffer) -> FileEntry:
    """Size and SHA-256 of a file's bytes: proof against forgery, for what is served."""
    return FileEntry(size_bytes=len(data), digest=f"sha256:{hashlib.sha256(data).hexdigest()}")


def checksum_entry(data: Buffer) -> FileEntry:
    """Size and XXH3 checksum of a file's bytes: proof against accidents, for what is large and read once."""
    return FileEntry(size_bytes=len(data), digest=f"xxh3_128:{xxhash.xxh3_128_hexdigest(data)}")


def entry_like(data: Buffer, like: FileEntry) -> FileEntry:
    """The entry of `data`, with the kind of digest that `like` has. Raises `CorruptError` for an unknown kind."""
    kind = like.digest.partition(":")[0]
    if kind == "sha256":
        return file_entry(data)
    if kind == "xxh3_128":
        return checksum_entry(data)
    raise CorruptError(f"the manifest has a digest of the unknown kind {kind!r}, expected sha256 or xxh3_128")


def fsync_folder(folder: Path) -> None:
    """Makes renames in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def chunks_of(content: Content) -> Iterable[Buffer]:
    """The pieces of a file's content."""
    return content() if callable(content) else (content,)


def hashed(name: str, content: Content, entries: dict[str, FileEntry]) -> Chunks:
    """The same content; when it has been written, its entry, with a SHA-256 digest, is in `entries`."""

    def chunks() -> Iterator[Buffer]:
        digest, size = hashlib.sha256(), 0
        for chunk in chunks_of(content):
            digest.update(chunk)
            size += len(chunk)
            yield chunk
        entries[name] = FileEntry(size_bytes=size, digest=f"sha256:{digest.hexdigest()}")

    return chunks


def write_file(path: Path, content: Content, *, durable: bool = True) -> None:
    """Writes one file, and fsyncs it where it shall be `durable`, that is, survive a power cut. A file that is there
    is overwritten in place, which spares the kernel finding new pages for it."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644), "wb", buffering=0) as file:
        for chunk in chunks_of(content):
            left = memoryview(chunk)
            while left:
                left = left[file.write(left) :]
        file.truncate()
        if durable:
            os.fsync(file.fileno())


def write_atomic(path: Path, data: Buffer, *, durable: bool = True) -> None:
    """Replaces one file; readers see the old bytes or the new ones. `durable` also survives a power cut."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    write_file(temporary, data, durable=durable)
    temporary.replace(path)
    if durable:
        fsync_folder(path.parent)


def write_folder(
    folder: Path,
    files: Mapping[str, Content],
    manifest: bytes | Callable[[], bytes],
    *,
    durable: bool = True,
    over: Path | None = None,
) -> None:
    """Writes files (named as in `folder`, or as `a/b/file` below it), manifest and the `STABLE` marker (which holds the
    manifest's digest, and comes last) into a temporary folder and renames it to `folder`. An older folder of that name
    is replaced. `durable` fsyncs all of it. A manifest that depends on what the files came to is made when they are
    written. `over` is a folder of the same parent that nobody needs any more, whose files are overwritten.

    Raises `StorageError` where the disk is full or forbids it; nothing is left behind then.
    """
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.tmp")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _begin(temporary, over, keep=files.keys())
        faults.point("folder.begun")
        folders = _make_folders(temporary, files)
        for name, content in files.items():
            write_file(temporary / name, content, durable=durable)
            faults.point("folder.file_written")
        about = manifest() if callable(manifest) else manifest
        write_file(temporary / MANIFEST, about, durable=durable)
        faults.point("folder.manifest_written")
        write_file(temporary / STABLE, hashlib.sha256(about).hexdigest().encode(), durable=durable)
        faults.point("folder.marked_stable")
        if durable:
            for made in (*folders, temporary):
                fsync_folder(made)
        faults.point("folder.synced")
        _put_in_place(temporary, folder)
        faults.point("folder.renamed")
        if durable:
            fsync_folder(folder.parent)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise StorageError(
            f"{folder} cannot be written: {error.strerror or error}; make room or mend the permissions, and send again"
        ) from error
    except Exception:  # of whoever makes the content
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _make_folders(root: Path, files: Iterable[str]) -> list[Path]:
    """The folders below `root` that files are to lie in, the innermost first."""
    below = {root / folder for name in files for folder in PurePosixPath(name).parents if folder.name}
    made = sorted(below, key=lambda folder: len(folder.parts))
    for folder in made:
        folder.mkdir()
    return made[::-1]


def _begin(temporary: Path, over: Path | None, keep: Set[str]) -> None:
    if over is None:
        temporary.mkdir()
        return
    over.rename(temporary)
    for path in temporary.iterdir():
        if path.name not in keep:
            path.unlink()


def _put_in_place(temporary: Path, folder: Path) -> None:
    if not folder.exists():
        temporary.rename(folder)
        return
    retired = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.old")
    folder.rename(retired)
    temporary.rename(folder)
    shutil.rmtree(retired)


def remove_leftovers(parent: Path) -> None:
    """Removes temporary folders that a killed writer left. Only the one writer of `parent` may call this."""
    for leftover in (*parent.glob(".*.tmp"), *parent.glob(".*.old")):
        shutil.rmtree(leftover, ignore_errors=True)


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
    with _opened(folder, name, entry) as file:
        data = file.read()
    _check_digest(folder, name, entry_like(data, entry), entry)
    return data


def check_large(folder: Path, name: str, entry: FileEntry) -> None:
    """Checks a file that `file_entry` describes, without holding it."""
    with _opened(folder, name, entry) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    _check_digest(folder, name, FileEntry(size_bytes=entry.size_bytes, digest=f"sha256:{digest}"), entry)


@contextmanager
def _opened(folder: Path, name: str, entry: FileEntry) -> Iterator[io.BufferedReader]:
    """The file, which has the size that the manifest says."""
    try:
        with (folder / name).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != entry.size_bytes:
                raise CorruptError(f"{folder.name}/{name} has {size} bytes, the manifest says {entry.size_bytes}")
            yield file
    except FileNotFoundError as error:
        raise CorruptError(f"{folder.name}/{name} is missing, the manifest lists it") from error


def _check_digest(folder: Path, name: str, received: FileEntry, entry: FileEntry) -> None:
    if received != entry:
        digests = f"{received.digest[:20]}…, the manifest says {entry.digest[:20]}…"
        raise CorruptError(f"{folder.name}/{name} has digest {digests}")


def step_folder(parent: Path, step: int) -> Path:
    """`parent/step_000012`."""
    return parent / f"step_{step:06d}"

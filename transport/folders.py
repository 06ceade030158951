"""Folders that appear whole or not at all, and readers that check before they use them.

A folder is written under a temporary name, with a manifest of its files and the marker `STABLE`, which comes last and
holds the manifest's digest; then it is renamed. Digests find accidents; they are no proof against forgery.
"""

import io
import mmap
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path, PurePosixPath

import xxhash
from grpo.transport.errors import CorruptError, StorageError, TransportError
from grpo.transport.records import FileEntry

Buffer = bytes | memoryview
Content = Buffer | Callable[[], Iterable[Buffer]]
"""A file's content, or what makes it piece by piece while it is written: it need not be in memory as a whole."""
MANIFEST = "manifest.json"
STABLE = "STABLE"
ANNOUNCED = "ANNOUNCED"
"""Takes the place of `STABLE` while the weights that a folder announces are still on their way."""
_PIECE_BYTES = 1 << 24
_MAX_FSYNCS = 8


def digest_of(data: Buffer) -> str:
    """Returns the digest of some bytes."""
    return file_entry(data).digest


def file_entry(content: Content) -> FileEntry:
    """Returns size and digest of a file's content, without holding it."""
    digest, size = xxhash.xxh3_128(), 0
    for chunk in chunks_of(content):
        digest.update(chunk)
        size += len(chunk)
    return FileEntry(size_bytes=size, digest=f"xxh3_128:{digest.hexdigest()}")


def chunks_of(content: Content) -> Iterable[Buffer]:
    """Returns the pieces of a file's content."""
    return content() if callable(content) else (content,)


def fsync(path: Path) -> None:
    """Makes a file, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_file(path: Path, content: Content, *, mode: int = 0o644) -> FileEntry:
    """Writes a file, over what it may hold, and returns its entry."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, mode), "wb", buffering=0) as file:

        def written() -> Iterator[Buffer]:
            for chunk in chunks_of(content):
                left = memoryview(chunk)
                while left:
                    left = left[file.write(left) :]
                yield chunk

        entry = file_entry(written)
        file.truncate()
        return entry


def write_atomic(path: Path, data: Buffer, *, durable: bool = True, private: bool = False) -> None:
    """Replaces one file; readers see the old bytes or the new ones. `durable` also survives a power cut; `private`: for
    this user alone. Raises `StorageError` where the disk is full or forbids it, or the folder is not there; nothing is
    left behind then."""
    temporary = _temporary(path)
    try:
        with writing(path):
            _write_file(temporary, data, mode=0o600 if private else 0o644)
            if durable:
                fsync(temporary)
            temporary.replace(path)
            if durable:
                fsync(path.parent)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns errors of the system while `path` is written into `StorageError`s that name it, its folder and the
    remedy."""
    try:
        yield
    except OSError as error:
        if isinstance(error, TransportError):
            raise
        if path.parent.exists():
            why = f"{error.strerror or error}; make room in {path.parent} or mend its permissions"
        else:
            why = f"{path.parent} was removed; make it again"
        raise StorageError(f"{path} cannot be written: {why}, and start the same command") from error


def write_folder(
    folder: Path,
    files: Mapping[str, Content],
    manifest: Callable[[dict[str, FileEntry]], bytes],
    *,
    durable: bool = True,
    marker: str = STABLE,
    replace: bool = False,
    reuse: Path | None = None,
) -> dict[str, FileEntry]:
    """Makes `folder` appear, with the files (named as in it, or as `a/b/file` below it), the `manifest` that is made
    of their entries, which are returned, and the `marker`. `durable` also survives a power cut. With `replace`, one
    that is there makes room at the end: readers see the old one, none, the new one. `reuse` is an obsolete folder of
    such files, which are overwritten in place: several times as fast as new files.

    Raises `StorageError` where the folder is there already, or the disk is full or forbids it; nothing is left behind
    then.
    """
    temporary = _temporary(folder)
    try:
        if folder.exists() and not replace:
            raise FileExistsError(None, "it is there already")
        if reuse is None:
            temporary.mkdir(parents=True)
        else:
            reuse.rename(temporary)
        below = {temporary / parent for name in files for parent in PurePosixPath(name).parents if parent.name}
        for inner in sorted(below):
            inner.mkdir()
        entries = {name: _write_file(temporary / name, one) for name, one in files.items()}
        about = manifest(entries)
        own = {MANIFEST: about, marker: digest_of(about).encode()}
        for name, content in own.items():
            _write_file(temporary / name, content)
        for surplus in os.listdir(temporary) if reuse is not None else ():  # noqa: PTH208 (at every step)
            if surplus not in files and surplus not in own:
                (temporary / surplus).unlink()
        if durable:  # all at once, so that the disk's journal is written once for all of them
            with ThreadPoolExecutor(_MAX_FSYNCS) as pool:
                list(pool.map(fsync, [*(temporary / name for name in (*files, *own)), *below, temporary]))
        if folder.exists():
            remove_folder(folder)
        temporary.rename(folder)
        if durable:
            fsync(folder.parent)
        return entries
    except BaseException as error:  # also of whoever makes the content
        shutil.rmtree(temporary, ignore_errors=True)
        with writing(folder):
            raise error


def mark_stable(folder: Path) -> None:
    """Makes an announced folder a stable one."""
    (folder / ANNOUNCED).rename(folder / STABLE)
    fsync(folder)


def remove_folder(folder: Path) -> None:
    """Removes a folder. It is renamed first, so that nobody sees a part of it."""
    shutil.rmtree(folder.rename(_temporary(folder)))


def remove_leftovers(parent: Path, name: str = "*") -> None:
    """Removes temporary files and folders that a killed writer of `parent`, or of what is called `name` there, has
    left. Only its one writer may call this."""
    for leftover in parent.glob(f".{name}.*.tmp"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            with suppress(OSError):
                leftover.unlink()


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")


def read_manifest(folder: Path) -> bytes:
    """Returns the manifest's bytes, checked against the marker. Raises `CorruptError`."""
    with _opened(folder, MANIFEST) as file, _opened(folder, marker_of(folder)) as marker_file:
        manifest, marker = file.read(), marker_file.read(200)
    if marker != digest_of(manifest).encode():
        raise CorruptError(f"{folder}/{MANIFEST} has digest {digest_of(manifest)}, its marker says {marker!r}")
    return manifest


def marker_of(folder: Path) -> str:
    """Returns the name of the marker that the folder has, or should have."""
    return ANNOUNCED if (folder / ANNOUNCED).exists() else STABLE


def read_checked(folder: Path, name: str, entry: FileEntry) -> bytes:
    """Returns one file's bytes, checked against the manifest's entry. Raises `CorruptError`."""
    with _opened(folder, name, entry) as file:
        data = file.read()
    check_entry(f"{folder}/{name}", data, entry)
    return data


def map_file(folder: Path, name: str, entry: FileEntry) -> memoryview:
    """Returns one file's bytes, mapped, of the size that the entry says. Their digest is not checked: the receiver does
    that. Raises `CorruptError`."""
    with _opened(folder, name, entry) as file:
        return memoryview(mmap.mmap(file.fileno(), entry.size_bytes, access=mmap.ACCESS_READ))


def check_file(folder: Path, name: str, entry: FileEntry) -> None:
    """Checks a file, which may be large, without holding it. Raises `CorruptError`."""
    with _opened(folder, name, entry) as file:
        check_entry(f"{folder}/{name}", lambda: iter(partial(file.read, _PIECE_BYTES), b""), entry)


def check_entry(what: str, content: Content, entry: FileEntry) -> None:
    """Raises `CorruptError` that begins with `what` where the content differs from its `entry`."""
    if (received := file_entry(content)) != entry:
        raise CorruptError(
            f"{what} has {received.size_bytes} bytes and digest {received.digest}, the manifest says "
            f"{entry.size_bytes} and {entry.digest}"
        )


@contextmanager
def _opened(folder: Path, name: str, entry: FileEntry | None = None) -> Iterator[io.BufferedReader]:
    """Yields the file. Raises `CorruptError` unless it has the size that the manifest says."""
    try:
        with (folder / name).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if entry is not None and size != entry.size_bytes:
                raise CorruptError(f"{folder}/{name} has {size} bytes, the manifest says {entry.size_bytes}")
            yield file
    except FileNotFoundError as error:
        raise CorruptError(f"{folder} has no {name}: it is incomplete") from error


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


def removable(steps: Sequence[int], *, keep_last: int | None, keep_interval: int | None) -> list[int]:
    """Returns those of the ascending `steps` that are neither among the last `keep_last` (None: all) nor multiples of
    `keep_interval` (None: none are)."""
    if keep_last is None:
        return []
    return [step for step in steps[:-keep_last] if keep_interval is None or step % keep_interval]


def write_number(path: Path, number: int) -> None:
    """Replaces a small file that holds a number."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, str(number).encode(), durable=False)


def read_number(path: Path) -> int | None:
    """Returns the number that a file holds; None where none can be read."""
    try:
        return int(path.read_bytes())
    except (OSError, ValueError):
        return None

"""What a run's files were when it came to its end: `digests.json`, with the SHA-256 of each file that stays.

The orchestrator writes it last, or a training service when it is told to end, and whoever joins the run removes it: a
run that goes on has no final files. Logs, status files, settings of programs and checkpoints of the trainer are not in
it.
"""

import hashlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from grpo.transport.errors import CorruptError, StorageError
from grpo.transport.folders import write_atomic
from grpo.transport.records import SCHEMA_VERSION, FileEntry, Record

DIGESTS_FILE = "digests.json"
_FILES = (
    *("run.json", "ledger.sqlite", "ledger.sqlite-wal", "metrics.jsonl", "timeline.jsonl", "summary.json"),
    "commands.sqlite",
)
"""Who reads the ledger just then keeps its `-wal` from being merged."""
_LOG = ".sqlite-wal"
_MAX_THREADS = 8
_BELOW = (
    *("batches/step_*/**/*", "broadcasts/step_*/**/*", "traces/*.parquet", "refused/*.json"),
    *("checkpoints/*:train:*/**/*", "models/*/*.json*", "models/*/traces/*.parquet"),
)
MAY_GO = ("batches/", "broadcasts/", "traces/")
"""Beginnings of what may be removed later, or left out of a copy: the rest says what it was."""


class Digests(Record, frozen=True, kw_only=True):
    """The content of `digests.json`. Example: ``Digests(run_id="5f0c", files={"run.json": FileEntry(...)})``"""

    schema_version: int = SCHEMA_VERSION
    run_id: str
    files: dict[str, FileEntry]
    """Size and digest, `sha256:…`, by path below the run's folder."""


def write_digests(run: Path, *, run_id: str) -> None:
    """Writes the digests of the files as they are now. Raises `StorageError`."""
    entries = {}
    for name, found in _entries(run, final_files(run)).items():
        if isinstance(found, FileEntry):
            entries[name] = found
        elif not isinstance(found, FileNotFoundError):  # the trainer may just then remove an old version
            raise StorageError(f"{run / name} cannot be read: {found.strerror}; mend its permissions") from found
    content = Digests(run_id=run_id, files=entries).to_json()
    write_atomic(run / DIGESTS_FILE, _sealed(content))


def read_digests(run: Path) -> tuple[Digests, str] | None:
    """Returns the digests and the digest of them all, which stands for the whole run; None where there are none. Raises
    `CorruptError` where a byte of them has changed."""
    try:
        data = (run / DIGESTS_FILE).read_bytes()
    except FileNotFoundError:
        return None
    content, _, seal = data.rstrip(b"\n").rpartition(b"\n")
    if data != _sealed(content):
        raise CorruptError(f"{DIGESTS_FILE} has changed since it was written: its last line is {seal[:80]!r}")
    return Digests.from_json(content), seal.decode()


def _sealed(content: bytes) -> bytes:
    """Returns the content of the file: the record, and its digest as the last line."""
    return content + b"\nsha256:" + hashlib.sha256(content).hexdigest().encode() + b"\n"


def final_files(run: Path) -> list[str]:
    """Returns the files that are final at a run's end, by path below its folder."""
    files = (path for path in _final(run) if path.is_file())
    # Who opens a ledger while its writer closes it leaves an empty log.
    return sorted(path.relative_to(run).as_posix() for path in files if path.stat().st_size or path.suffix != _LOG)


def _final(run: Path) -> Iterator[Path]:
    yield from (run / name for name in _FILES)
    for pattern in _BELOW:
        yield from run.glob(pattern)


def differing(run: Path, digests: Digests) -> tuple[dict[str, str], list[str]]:
    """Returns what is wrong with files, by name, and those that may go and are not here."""
    wrong, gone = {}, []
    for name, found in _entries(run, digests.files).items():
        entry = digests.files[name]
        if isinstance(found, FileNotFoundError):
            if name.startswith(MAY_GO) and (name.startswith("traces/") or not (run / name).parent.exists()):
                gone.append(name)
            else:
                wrong[name] = "is missing"
        elif isinstance(found, OSError):
            wrong[name] = f"cannot be read: {found.strerror}"
        elif found != entry:
            was, now = (f"{one.size_bytes} bytes, {one.digest[:19]}…" for one in (entry, found))
            wrong[name] = f"is not what it was at the end of the run: {now}, expected {was}"
    return wrong, gone


def _entries(run: Path, names: Iterable[str]) -> dict[str, FileEntry | OSError]:
    """Returns size and digest of files, several at once, or why one cannot be read."""

    def entry(name: str) -> FileEntry | OSError:
        try:
            return _entry(run / name)
        except OSError as error:
            return error

    with ThreadPoolExecutor(_MAX_THREADS) as pool:
        listed = list(names)
        return dict(zip(listed, pool.map(entry, listed), strict=True))


def _entry(path: Path) -> FileEntry:
    """Returns size and digest of a file. One that has not changed is read once."""
    stat = path.stat()
    digest = _digest(path, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size)
    return FileEntry(size_bytes=stat.st_size, digest=digest)


@lru_cache(maxsize=2**16)
def _digest(path: Path, *_stat: int) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"

"""Results of programs that were run before, found by what the program says and by its tests."""

import hashlib
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Hashable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from orchestrator.sandbox.normalise import normalised

BUSY_S = 10.0
"""How long to wait where another process writes: well below what an environment has to be constructed."""
_PAUSE_S = 0.01

Value = TypeVar("Value")
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Recent(OrderedDict[K, V]):
    """The entries used last, at most so many."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def find(self, key: K) -> V | None:
        value = self.get(key)
        if value is not None:
            self.move_to_end(key)
        return value

    def keep(self, key: K, value: V) -> None:
        self[key] = value
        self.move_to_end(key)
        if len(self) > self.most:
            self.popitem(last=False)


class ResultCache(Generic[Value]):
    """Values by program and tests, in memory, and in an SQLite file as well where a path is given.

    Two programs that differ in comments, documentation or formatting share an entry. A program seen before in the very
    same words is found without being parsed. The file may be shared by several processes; what memory has forgotten is
    found in it again.

    Example::

        cache = ResultCache(Verdict, entries=10_000, path=run_folder / "sandbox_cache.sqlite")
        cache.put(program, tests, verdict)
    """

    def __init__(self, type: type[Value], *, entries: int = 100_000, path: Path | None = None) -> None:
        """`type` is what the values are: a type that msgspec can write as JSON. `entries` are kept in memory."""
        if entries < 1:
            raise ValueError(f"entries={entries}: expected at least 1")
        self._decoder = msgspec.json.Decoder(type)
        self._values: _Recent[bytes, Value] = _Recent(entries)
        self._keys: _Recent[bytes, bytes] = _Recent(entries)
        """By the digest of the very words: the key, which takes parsing to find."""
        self._file = None if path is None else _open(path)
        self.num_hits = 0
        self.num_misses = 0

    def get(self, program: str, tests: str) -> Value | None:
        """The value kept for this program with these tests. `tests` names everything else that the value depends on:
        the tests, the limits, how they are counted."""
        key = self._key(program, tests)
        value = self._values.find(key)
        if value is None and self._file is not None:
            row = self._file.execute("SELECT value FROM results WHERE key = ?", (key,)).fetchone()
            if row is not None:
                value = self._decoder.decode(row[0])
                self._values.keep(key, value)
        if value is None:
            self.num_misses += 1
        else:
            self.num_hits += 1
        return value

    def put(self, program: str, tests: str, value: Value) -> None:
        key = self._key(program, tests)
        self._values.keep(key, value)
        if self._file is not None:
            with self._file:
                self._file.execute("INSERT OR REPLACE INTO results VALUES (?, ?)", (key, msgspec.json.encode(value)))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _key(self, program: str, tests: str) -> bytes:
        words = _digest(program, tests)
        key = self._keys.find(words)
        if key is None:
            key = key_of(program, tests)
            self._keys.keep(words, key)
        return key


def key_of(program: str, tests: str) -> bytes:
    """32 bytes for the normalised program and its tests."""
    return _digest(normalised(program), tests)


def _digest(program: str, tests: str) -> bytes:
    first, second = (text.encode("utf-8", "surrogatepass") for text in (program, tests))
    return hashlib.blake2b(len(first).to_bytes(8, "big") + first + second, digest_size=32).digest()


def _open(path: Path) -> sqlite3.Connection:
    """Makes the file and its folder where there are none. Raises ValueError for what is no cache or cannot be opened,
    and TimeoutError where others hold it all the time."""
    deadline = time.monotonic() + BUSY_S
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return _prepared(path, max(deadline - time.monotonic(), 0.0))
        except OSError as error:
            raise ValueError(f"the cache {path} cannot be opened: {error.strerror or error}") from None
        except sqlite3.DatabaseError as error:
            code = error.sqlite_errorcode & 0xFF
            if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
                raise ValueError(
                    f"{path} is not a cache of sandbox results ({error}): remove it, it is made anew"
                ) from None
            if code not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise ValueError(
                    f"the cache {path} cannot be opened: {error}; may this user write there, and is there room?"
                ) from None
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {BUSY_S:.0f} s for other processes to let go of the cache {path}") from None
        time.sleep(_PAUSE_S)  # SQLite does not wait for the others itself where they change the journal of a new file


def _prepared(path: Path, wait_s: float) -> sqlite3.Connection:
    """Nothing is lost that cannot be computed again, so writes do not wait for the disk. Waits `wait_s` for others, and
    `BUSY_S` whenever it is used later."""
    file = sqlite3.connect(path, timeout=wait_s)
    try:
        file.execute("PRAGMA journal_mode = WAL")
        file.execute("PRAGMA synchronous = OFF")
        with file:
            file.execute("CREATE TABLE IF NOT EXISTS results (key BLOB PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID")
        file.execute(f"PRAGMA busy_timeout = {int(BUSY_S * 1000)}")
    except BaseException:
        file.close()
        raise
    return file

"""Results of programs that were run before, found by what the program says and by its tests."""

import ast
import functools
import hashlib
import sqlite3
import warnings
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

BUSY_S = 10.0
"""How long to wait where another process writes: well below what an environment has to be constructed."""
_MOST_CHARACTERS = 10_000
"""Longer programs are compared as they are: whoever asks waits while one is parsed and written anew."""

Value = TypeVar("Value")


class ResultCache(Generic[Value]):
    """Values by program and tests, in an SQLite file: that of `path`, which other processes may share and which
    outlives them, or a temporary one.

    Two programs that differ in comments, documentation or formatting share an entry. Example::

        cache = ResultCache(Verdict, path=run_folder / "sandbox_cache.sqlite")
        cache.put(program, tests, verdict)
    """

    def __init__(self, type: type[Value], *, path: Path | None = None) -> None:
        """`type` is what the values are: a type that msgspec can write as JSON. Raises ValueError for a path that is no
        cache, cannot be opened, or is held by others all the time."""
        self._decoder = msgspec.json.Decoder(type)
        self.num_hits = 0
        self.num_misses = 0
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(path or "", timeout=BUSY_S, isolation_level=None)
            # Nothing is lost that cannot be computed again, so writes do not wait for the disk.
            self._file.execute("PRAGMA synchronous = OFF")
            self._file.execute(
                "CREATE TABLE IF NOT EXISTS results (key BLOB PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID"
            )
        except (OSError, sqlite3.Error) as error:
            raise ValueError(
                f"the cache of sandbox results {path} cannot be opened ({error}): name another file, or remove it"
            ) from None

    def get(self, program: str, tests: str) -> Value | None:
        """Returns the value kept for this program with these tests. `tests` names everything else that the value
        depends on: the tests, the limits, how they are counted."""
        row = self._file.execute("SELECT value FROM results WHERE key = ?", (key_of(program, tests),)).fetchone()
        if row is None:
            self.num_misses += 1
            return None
        self.num_hits += 1
        return self._decoder.decode(row[0])

    def put(self, program: str, tests: str, value: Value) -> None:
        """Keeps the value in place of an earlier one."""
        row = (key_of(program, tests), msgspec.json.encode(value))
        self._file.execute("INSERT OR REPLACE INTO results VALUES (?, ?)", row)

    def close(self) -> None:
        self._file.close()


def key_of(program: str, tests: str) -> bytes:
    """Returns 32 bytes for the normalised program and its tests."""
    first, second = (text.encode("utf-8", "surrogatepass") for text in (normalised(program), tests))
    return hashlib.blake2b(len(first).to_bytes(8, "big") + first + second, digest_size=32).digest()


def normalised(program: str) -> str:
    """Returns the program without comments, documentation and formatting; the text itself where it does not parse."""
    return program if len(program) > _MOST_CHARACTERS else _written_anew(program)


@functools.lru_cache(maxsize=1024)
def _written_anew(program: str) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(program)
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                _remove_documentation(node)
        return ast.unparse(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return program


def _remove_documentation(node: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
    if ast.get_docstring(node, clean=False) is not None:
        rest = node.body[1:]
        node.body = rest or ([] if isinstance(node, ast.Module) else [ast.Pass()])

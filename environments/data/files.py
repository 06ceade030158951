"""Rows of data files: JSONL, JSON, CSV, Parquet and Arrow, and where they are. A row that cannot be read does not stop
the others."""

import csv
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from grpo import UserError

T = TypeVar("T")
Row = Mapping[str, Any]
"""Values by the names of their columns."""
MAX_SHOWN = 120
"""Characters of a value that a message shows."""
MAX_ROWS = 2_000_000
"""The most rows of a data set: each process that plays its environment keeps them all."""
MAX_BYTES = 4 << 30
"""The longest file, and the most that a compressed one may hold."""
MAX_LINE_BYTES = 256 << 20
"""The longest line in a file of lines."""
MAX_CELL_CHARS = 64 << 20
"""The longest cell in a CSV file; tests of a program may be as long."""
MAX_FACTOR, MIN_UNPACKED_BYTES = 1000, 256 << 20
"""Bytes that a compressed file may hold for each of its own, and how many any file may hold."""
_BATCH_ROWS = 1024
_BATCH_BYTES = 64 << 20
_SUSPICIOUS_FACTOR = 100
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
_WRONG = (ValueError, TypeError, AttributeError, KeyError, IndexError, SyntaxError, RecursionError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A row that cannot be used. Example: ``Refused(place="sums.csv:17", why="there is no answer")``"""

    place: str
    """The file, and the line or the row's number in it, from 1."""
    why: str


def parse_rows(files: Sequence[Path], parse: Callable[[Row, str], T]) -> tuple[list[T], list[Refused]]:
    """Returns what `parse` makes of each row, given the row and its place, and the rows for which it raises. Raises
    UserError for a file that cannot be read at all, and where there is no row."""
    made: list[T] = []
    refused: list[Refused] = []
    for place, row in (found for file in files for found in rows_of(file)):
        try:
            if isinstance(row, ValueError):
                raise row
            if not isinstance(row, Mapping):
                raise TypeError(f"{shown(row)} is no object with columns")
            made.append(parse(row, place))
        except _WRONG as error:
            why = str(error) if type(error) in (ValueError, UserError) else f"{type(error).__name__}: {error}"
            refused.append(Refused(place=place, why=why))
        if len(made) + len(refused) > MAX_ROWS:
            raise _too_many(files[0])
    if not made and not refused:
        raise UserError(f"{', '.join(map(str, files))}: no rows; expected at least one")
    return made, refused


def check_refused(refused: Sequence[Refused], num_made: int) -> None:
    """Raises UserError that tells of the first of the rows that cannot be used."""
    if refused:
        raise UserError(
            f"{refused[0].place}: {refused[0].why} ({len(refused)} of {num_made + len(refused)} rows cannot be used)"
        )


def rows_of(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields the place and the content of each row of a file; for a row that cannot be read, a ValueError."""
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise UserError(f"{path}: expected a file whose name ends with one of {', '.join(READERS)}")
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise UserError(f"{path} has {size:,} bytes, expected at most {MAX_BYTES:,}; give a part of it")
        for number, row in reader(path):
            yield f"{path}:{number}", row
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def shown(value: Any) -> str:
    """Returns a value for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def plain_value(value: Any) -> Any:
    """Returns a value as plain data: whatever is no text, number or container becomes a text; infinities and NaN
    become None."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()  # halves of surrogate pairs become question marks
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain_value(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(one) for one in value]
    return str(value)


# --- readers: the number of each row, and the row or a ValueError ---


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(_lines_of(path), start=1):
        if line.strip():
            yield number, _parsed(line)


def _json(path: Path) -> Iterator[tuple[int, Any]]:
    """Reads one list of rows, or one row a line."""
    with path.open("rb") as file:
        begin = next((line.lstrip(b"\xef\xbb\xbf") for line in file if line.strip(b"\xef\xbb\xbf \t\r\n")), b"")
    if not begin.lstrip().startswith(b"["):
        yield from _json_lines(path)
        return
    data = b"".join(_lines_of(path))
    rows = _parsed(data)
    if isinstance(rows, ValueError):
        raise rows
    yield from enumerate(rows, start=1)


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except UnicodeDecodeError as error:
        return ValueError(f"byte {error.start} ({data[error.start]:#04x}) is not UTF-8")
    except (ValueError, RecursionError) as error:
        return ValueError(f"no JSON: {error}; it begins {shown(data[:80])}")


def _csv(path: Path) -> Iterator[tuple[int, Any]]:
    """Reads a table whose first line has the columns' names. Cells are texts. The delimiter is a comma, or what the
    first line has more of: `;`, `|` or tabs."""
    csv.field_size_limit(MAX_CELL_CHARS)
    lines = _texts_of(path)
    first = next(lines, "")
    delimiter = max(",;\t|", key=first.count)
    reader = csv.reader(itertools.chain([first], lines), delimiter=delimiter, strict=True)
    names = [name.strip() for name in next(reader, [])]
    if "" in names or len(set(names)) != len(names):
        raise UserError(f"{path}:1: the columns are {shown(names)}, expected a name for each, and different ones")
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield reader.line_num, ValueError(f"no CSV: {error}")
            continue
        if not cells:
            continue
        fits = len(cells) == len(names)
        why = f"{len(cells)} cells, expected {len(names)}; is there a quote or a comma too many?"
        yield reader.line_num, dict(zip(names, cells, strict=True)) if fits else ValueError(why)


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        names, about = _readable(file.schema_arrow), file.metadata
        if about.num_rows > MAX_ROWS:
            raise _too_many(path)
        chunks = [
            chunk
            for group in map(about.row_group, range(about.num_row_groups))
            for chunk in map(group.column, range(group.num_columns))
            if chunk.path_in_schema.partition(".")[0] in names
        ]
        unpacked = _Unpacked(path)
        unpacked.add(sum(chunk.total_uncompressed_size for chunk in chunks))
        # A value that is stored once may stand in every row.
        suspicious = [
            chunk.total_uncompressed_size
            for chunk in chunks
            if chunk.total_uncompressed_size > _SUSPICIOUS_FACTOR * chunk.total_compressed_size
        ]
        num = max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(1, *suspicious, 0)))
        yield from _of_batches(path, file.iter_batches(batch_size=num, columns=names))


def _arrow(path: Path) -> Iterator[tuple[int, Any]]:
    """Reads files as `datasets` saves them."""
    import pyarrow.ipc

    with pyarrow.memory_map(str(path)) as source:
        try:
            stream = pyarrow.ipc.open_stream(source)
            batches: Iterable[Any] = stream
        except pyarrow.ArrowInvalid:
            source.seek(0)
            stream = pyarrow.ipc.open_file(source)
            batches = map(stream.get_batch, range(stream.num_record_batches))
        yield from _of_batches(path, (batch.select(_readable(stream.schema)) for batch in batches))


def _readable(schema: Any) -> list[str]:
    """Returns the columns without pictures, sounds and other bytes."""
    return [column.name for column in schema if "binary" not in str(column.type)]


def _of_batches(path: Path, batches: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    unpacked, number = _Unpacked(path), 0
    for batch in batches:
        unpacked.add(batch.nbytes)
        for start in range(0, batch.num_rows, _BATCH_ROWS):
            for row in batch.slice(start, _BATCH_ROWS).to_pylist():
                number += 1
                yield number, row


class _Unpacked:
    """Counts what a compressed file holds. Raises UserError where that is more than any data set."""

    def __init__(self, path: Path) -> None:
        self._path, self._size, self._sum = path, path.stat().st_size, 0
        self._limit = min(MAX_BYTES, max(MIN_UNPACKED_BYTES, MAX_FACTOR * self._size))

    def add(self, num_bytes: int) -> None:
        self._sum += num_bytes
        if self._sum > self._limit:
            raise UserError(
                f"{self._path} has {self._size:,} bytes and holds {self._sum:,} or more, expected at most "
                f"{self._limit:,}; give a part of it, without columns that are not needed"
            )


def _too_many(path: Path) -> UserError:
    return UserError(f"{path}: more than {MAX_ROWS:,} rows, which every process would keep; give a part of them")


def _lines_of(path: Path) -> Iterator[bytes]:
    """Yields the lines of a file with their ends, without a byte order mark."""
    with path.open("rb") as file:
        number = 1
        while line := file.readline(MAX_LINE_BYTES + 1):
            if number == 1 and line.startswith((b"\xff\xfe", b"\xfe\xff")):
                raise UserError(f"{path} is UTF-16, expected UTF-8; save it as UTF-8")
            if len(line) > MAX_LINE_BYTES:
                raise UserError(f"{path}:{number}: a line of more than {MAX_LINE_BYTES:,} bytes")
            yield line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            number += 1


def _texts_of(path: Path) -> Iterator[str]:
    for number, line in enumerate(_lines_of(path), start=1):
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            byte = f"byte {line[error.start]:#04x} is not UTF-8; save the file as UTF-8"
            raise UserError(f"{path}:{number}: {byte}") from None


READERS: dict[str, Callable[[Path], Iterator[tuple[int, Any]]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
    ".arrow": _arrow,
}


# --- where they are ---


def find_files(path: str, *, subset: str | None, split: str) -> list[Path]:
    """Returns the files of one split. `path`: a file, which is one split whatever it is called; a folder of files as
    the Hub has them; or `owner/name` of the Hub. Raises UserError with what there is, and how to get what is
    missing."""
    place = Path(path).expanduser()
    if place.is_file():
        if subset is not None:
            raise UserError(f"subset = {subset!r} has no effect on {path}, which is one file; remove it")
        return [place]
    folder = place if place.is_dir() else _downloaded(path)
    named = _named_files(folder)
    if subset is not None and subset not in named:
        raise UserError(f"{path} has no subset {subset!r}; there are {', '.join(named) or 'none'}")
    if subset is None and len(named) > 1:
        if "default" not in named:
            raise UserError(f"{path} has several subsets; set subset to one of {', '.join(named)}")
        subset = "default"
    splits = named[subset] if subset is not None else next(iter(named.values()), {})
    if split not in splits:
        known = f"there are {', '.join(splits)}" if splits else f"there are no files with {', '.join(READERS)}"
        raise UserError(f"{path} has no split {split!r}: {known}")
    return splits[split]


def _downloaded(name: str) -> Path:
    """Returns the folder of a data set in the cache of the Hub. Nothing is fetched."""
    if _HUB_NAME.fullmatch(name) is None or Path(name).suffix in READERS:
        raise UserError(f"{name}: no such file or folder, seen from {Path.cwd()}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, repo_type="dataset", local_files_only=True))
    except LocalEntryNotFoundError:
        raise UserError(
            f"{name}: no such folder, and no data set that was downloaded from the Hugging Face Hub; to download it: "
            f"hf download {name} --repo-type dataset"
        ) from None


def _named_files(folder: Path) -> dict[str, dict[str, list[Path]]]:
    """Returns files by subset and split. A split's name is a word of the file's name or of its folder's; where none has
    one, all is `train`. A folder in between is a subset."""
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in READERS and path.is_file())
    named: dict[str, dict[str, list[Path]]] = {}
    for path in files:
        if path.name in ("dataset_dict.json", "dataset_info.json", "state.json"):
            continue
        parts = path.relative_to(folder).parts
        split = next((word for part in reversed(parts) for word in _words(part) if word in _SPLITS), "train")
        above = [part for part in parts[:-1] if part != "data" and not set(_words(part)) & {*_SPLITS}]
        named.setdefault("/".join(above) or "default", {}).setdefault(split, []).append(path)
    return named


def _words(name: str) -> list[str]:
    return re.split(r"[^a-z]+", name.lower())

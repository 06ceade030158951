"""Artifacts: what episodes make and use again, such as topics, proposed questions, programs.

A store keeps JSON values with weights. In the run folder it is a log of operations, one line of JSON each, to which is
only ever appended, but for compaction, which replaces it whole. A number counts the operations, so that a run that goes
back to a checkpoint finds the store as it was then.

Example of a log::

    {"store": "topics", "format": 1, "after": 0, "base": 0}
    {"op": "put", "id": "1d0c...", "weight": 1.0, "data": {"topic": "tea"}}
    {"op": "weigh", "id": "1d0c...", "weight": 0.25}
    {"op": "remove", "id": "1d0c..."}
"""

import hashlib
import heapq
import itertools
import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from transport.errors import CorruptError
from transport.folders import write_atomic

log = logging.getLogger(__name__)

_FORMAT = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_MAX_DEPTH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """One value of a store. Example: ``Artifact(id="1d0c...", content='{"topic":"tea"}', weight=1.0)``"""

    id: str
    """Digest of the content: equal values are one artifact."""
    content: str
    """The value as JSON with sorted keys."""
    weight: float
    """How likely it is drawn, against the others; at least 0."""

    @property
    def data(self) -> Any:
        """The value, the caller's own."""
        return json.loads(self.content)


class ArtifactStore:
    """Artifacts by content, at most `max_size` of them; the lightest go first, among equals the oldest.

    Everything is in memory; with a `path`, every change is in the file as well before the call returns.
    """

    def __init__(
        self,
        name: str,
        *,
        max_size: int = 10_000,
        seed: int = 0,
        path: Path | None = None,
        compact_above: int = 1000,
    ) -> None:
        """Takes up what `path` holds. Draws are those of `seed`, the store's name, and how many there were. A file of
        up to `compact_above` operations is not compacted.

        Raises CorruptError where the file is damaged other than by an end that was not written whole.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(f"a store is called {name!r}, expected up to 128 letters, digits, - and _")
        if max_size < 1:
            raise ValueError(f"the store {name} has max_size {max_size}, expected at least 1")
        self.name, self.max_size, self._seed = name, max_size, seed
        self._contents = _Contents()
        self._queue: list[tuple[float, int, str]] = []
        """(weight, age, id) as a heap; entries whose artifact has gone or has another weight are skipped."""
        self._ages: dict[str, int] = {}
        self._next_age = itertools.count()
        self._places = _Places()
        self._num_draws = 0
        self.num_evicted = 0
        """Artifacts that left because the store was full, in this process."""
        self._log = None if path is None else _Log(path, name, compact_above)
        if self._log is not None:
            self._take(self._log.read())
            self._evict()

    def __len__(self) -> int:
        return len(self._contents.weights)

    def __contains__(self, artifact_id: object) -> bool:
        return artifact_id in self._contents.weights

    def close(self) -> None:
        """Closes the file."""
        if self._log is not None:
            self._log.close()

    # --- artifacts ---

    def add(self, data: Any, *, weight: float = 1.0) -> Artifact:
        """Stores a JSON value. One that is there already gets the new weight. In a full store the lightest goes, which
        may be the one that is added: it is in the store only if `artifact.id in store`.

        Raises ValueError where `data` is no JSON, or `weight` is not finite or negative.
        """
        content = _canonical(data)
        artifact = Artifact(id=_digest(content), content=content, weight=_checked_weight(weight))
        if artifact.id in self:
            self.set_weight(artifact.id, weight)
            return artifact
        self._write(_put_line(artifact))
        self._contents.put(artifact)
        self._weighed(artifact.id)
        self._evict()
        self._compact_when_due()
        return artifact

    def set_weight(self, artifact_id: str, weight: float) -> None:
        """Raises KeyError where it is not there, and ValueError as `add` does."""
        if self.get(artifact_id).weight != _checked_weight(weight):
            self._write(_line({"op": "weigh", "id": artifact_id, "weight": float(weight)}))
            self._contents.weigh(artifact_id, float(weight))
            self._weighed(artifact_id)
            self._compact_when_due()

    def remove(self, artifact_id: str) -> None:
        """Raises KeyError where it is not there."""
        self.get(artifact_id)
        self._forget(artifact_id)
        self._compact_when_due()

    def get(self, artifact_id: str) -> Artifact:
        """Raises KeyError where it is not there."""
        if artifact_id not in self:
            raise KeyError(f"the store {self.name} has no artifact {artifact_id}")
        return self._contents.get(artifact_id)

    def all(self) -> list[Artifact]:
        """Oldest first."""
        return [self.get(artifact_id) for artifact_id in self._contents.weights]

    def sample(self, num: int = 1, *, weighted: bool = False, replace: bool = True) -> list[Artifact]:
        """`num` draws, each of every artifact alike, or `weighted`. Without `replace` all are different.

        Raises ValueError where the store has nothing to draw, or without `replace` not enough.
        """
        places, weights = self._places.drawable(weighted=weighted)
        if num < 0 or len(places) < (min(num, 1) if replace else num):
            kind = "artifacts with a weight above 0" if weighted else "artifacts"
            raise ValueError(
                f"{num} artifacts were to be drawn from the store {self.name}, which has {len(places)} {kind}"
            )
        draws = np.random.default_rng(int(_digest(f"{self._seed}/{self.name}/{self._num_draws}"), 16))
        self._num_draws += 1
        drawn = (_drawn_again if replace else _drawn_once)(draws, weights, num)
        return [self.get(self._places.ids[place]) for place in places[drawn]]

    # --- what changes ---

    def _write(self, line: bytes) -> None:
        """Before it happens: what cannot be written does not."""
        if self._log is not None:
            self._log.append(line)

    def _forget(self, artifact_id: str) -> None:
        self._write(_line({"op": "remove", "id": artifact_id}))
        self._contents.remove(artifact_id)
        self._places.remove(artifact_id)
        del self._ages[artifact_id]

    def _weighed(self, artifact_id: str) -> None:
        age = self._ages.setdefault(artifact_id, next(self._next_age))
        self._places.put(artifact_id, self._contents.weights[artifact_id])
        heapq.heappush(self._queue, (self._contents.weights[artifact_id], age, artifact_id))
        if len(self._queue) > 4 * len(self) + 64:
            self._queue = [(weight, self._ages[one], one) for one, weight in self._contents.weights.items()]
            heapq.heapify(self._queue)

    def _evict(self) -> None:
        while len(self) > self.max_size:
            weight, age, artifact_id = heapq.heappop(self._queue)
            if self._ages.get(artifact_id) == age and self._contents.weights[artifact_id] == weight:
                self._forget(artifact_id)
                self.num_evicted += 1

    def _take(self, contents: "_Contents") -> None:
        self._contents, self._places = contents, _Places()
        self._queue, self._ages = [], {}
        for artifact_id in contents.weights:
            self._weighed(artifact_id)

    # --- going on after a restart ---

    def state(self) -> dict[str, int]:
        """To be kept with a checkpoint, as JSON; what it speaks of is on disk, durably."""
        if self._log is not None:
            self._log.sync()
        return {"num_operations": self._contents.num_operations, "num_draws": self._num_draws}

    def restore(self, state: Mapping[str, int]) -> None:
        """Makes the store what it was when `state` was taken; what came after is gone, from the file as well.

        Raises CorruptError where the file does not reach that far, or was settled after it.
        """
        if self._log is None:
            raise ValueError(f"the store {self.name} has no file, from which alone it can be restored; give it a path")
        self._take(self._log.cut(state["num_operations"]))
        self._num_draws = state["num_draws"]
        self._evict()

    def settle(self, state: Mapping[str, int] | None = None) -> None:
        """No state older than this one (None: than now) will be restored. Lets the file be compacted up to it."""
        if self._log is not None:
            self._log.settled = self._contents.num_operations if state is None else state["num_operations"]
            self._compact_when_due()

    def _compact_when_due(self) -> None:
        if self._log is not None:
            self._log.compact_when_due(len(self))


class ArtifactStores:
    """The stores of a run by name. Example: ``stores.add("topics").add({"topic": "tea"})``"""

    def __init__(
        self, folder: Path | None, *, seed: int = 0, state: Mapping[str, Mapping[str, int]] | None = None
    ) -> None:
        """`folder` in the run folder, which is made when it is needed; None keeps nothing. `state` is that of the
        checkpoint from which a run goes on; a store that it does not know began after it, and is empty again."""
        self._folder, self._seed, self._state = folder, seed, state
        self._stores: dict[str, ArtifactStore] = {}

    def add(self, name: str, *, max_size: int = 10_000) -> ArtifactStore:
        """Opens a store, with what its file holds. Raises ValueError where one of that name is open."""
        if name in self._stores:
            raise ValueError(f"there is a store {name} already; use stores[{name!r}]")
        path = None if self._folder is None else self._folder / f"{name}.jsonl"
        store = ArtifactStore(name, max_size=max_size, seed=self._seed, path=path)
        if self._state is not None:
            store.restore(self._state.get(name, {"num_operations": 0, "num_draws": 0}))
        self._stores[name] = store
        return store

    def __getitem__(self, name: str) -> ArtifactStore:
        if name not in self._stores:
            raise KeyError(f"there is no store {name}; there are {sorted(self._stores)}")
        return self._stores[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stores)

    def state(self) -> dict[str, dict[str, int]]:
        """Of all stores, to be kept with a checkpoint."""
        return {name: store.state() for name, store in self._stores.items()}

    def settle(self, state: Mapping[str, Mapping[str, int]]) -> None:
        """No state older than this one will be restored."""
        for name, store in self._stores.items():
            if name in state:
                store.settle(state[name])

    def close(self) -> None:
        """Closes all files."""
        for store in self._stores.values():
            store.close()


# --- draws ---


class _Places:
    """Artifacts in the order in which they came, with the gaps of those that went, as arrays to draw from. Gaps change
    no draw, so that a store that is read from its file draws as the one that wrote it."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self._place_of: dict[str, int] = {}
        self._weights = np.empty(64)
        """Of each place; NaN where nobody is."""

    def put(self, artifact_id: str, weight: float) -> None:
        """A new one comes last."""
        place = self._place_of.setdefault(artifact_id, len(self.ids))
        if place == len(self.ids):
            self.ids.append(artifact_id)
            if place == len(self._weights):
                self._weights = np.concatenate([self._weights, np.empty(place)])
        self._weights[place] = weight

    def remove(self, artifact_id: str) -> None:
        self._weights[self._place_of.pop(artifact_id)] = np.nan
        if len(self.ids) > 2 * len(self._place_of) + 64:
            places, weights = self.drawable(weighted=False, true_weights=True)
            self.ids = [self.ids[place] for place in places]
            self._place_of = {artifact: place for place, artifact in enumerate(self.ids)}
            self._weights = np.concatenate([weights, np.empty(len(weights) + 64)])

    def drawable(self, *, weighted: bool, true_weights: bool = False) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Places that can be drawn, and their weights, all alike where they are not to be `weighted`."""
        weights = self._weights[: len(self.ids)]
        places = np.flatnonzero(weights > 0 if weighted else ~np.isnan(weights))
        return places, weights[places] if weighted or true_weights else np.ones(len(places))


def _drawn_again(draws: np.random.Generator, weights: NDArray[np.float64], num: int) -> NDArray[np.int64]:
    """[num] indices of `weights`, each drawn from all."""
    if not num:
        return np.empty(0, np.int64)
    ends = np.cumsum(weights / weights.max())
    drawn: NDArray[np.int64] = np.searchsorted(ends, draws.random(num) * ends[-1], side="right")
    return np.minimum(drawn, len(weights) - 1)


def _drawn_once(draws: np.random.Generator, weights: NDArray[np.float64], num: int) -> NDArray[np.int64]:
    """[num] different indices, one after the other, each drawn by the weights of what is left: whoever arrives first,
    with arrival times -log(u) / weight (Efraimidis and Spirakis 2006, "Weighted random sampling with a reservoir")."""
    arrivals = np.log(draws.exponential(size=len(weights))) - np.log(weights)
    order: NDArray[np.int64] = np.argsort(arrivals, kind="stable")
    return order[:num]


# --- what operations make, and where they are kept ---


class _Contents:
    """What a sequence of operations leaves, oldest artifact first."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.weights: dict[str, float] = {}
        self.num_operations = 0

    def get(self, artifact_id: str) -> Artifact:
        return Artifact(id=artifact_id, content=self.values[artifact_id], weight=self.weights[artifact_id])

    def put(self, artifact: Artifact) -> None:
        self.values[artifact.id], self.weights[artifact.id] = artifact.content, artifact.weight
        self.num_operations += 1

    def weigh(self, artifact_id: str, weight: float) -> None:
        self.weights[artifact_id] = weight
        self.num_operations += 1

    def remove(self, artifact_id: str) -> None:
        del self.values[artifact_id], self.weights[artifact_id]
        self.num_operations += 1

    def apply(self, line: bytes) -> None:
        """An operation as it is in a file. Raises KeyError, TypeError, ValueError or RecursionError where it is none,
        or does not fit."""
        operation = json.loads(line)
        kind, artifact_id = operation["op"], operation["id"]
        if kind not in ("put", "weigh", "remove"):
            raise ValueError(f"there is no operation {kind!r}")
        if (kind == "put") == (artifact_id in self.weights):
            raise ValueError(f"{artifact_id} is there already" if kind == "put" else f"{artifact_id} is not there")
        if kind == "remove":
            self.remove(artifact_id)
            return
        weight = _checked_weight(operation["weight"])
        if kind == "weigh":
            self.weigh(artifact_id, weight)
            return
        content = _canonical(operation["data"])
        if artifact_id != _digest(content):
            raise ValueError(f"{artifact_id} is not the digest of its data")
        self.put(Artifact(id=artifact_id, content=content, weight=weight))


class _Log:
    """The file of a store: a header, then operations. In a compacted file the first `base` of them, by the header,
    stand for what the first `after` operations had left."""

    def __init__(self, path: Path, store: str, compact_above: int) -> None:
        self._path, self._store, self._compact_above = path, store, compact_above
        self._file: FileIO | None = None
        self._unsynced = False
        self._num_lines = 0
        self._first = 0
        """Operations that the compacted part stands for; no state before can be restored."""
        self.settled = 0
        self._compact_at = compact_above

    def read(self) -> _Contents:
        """All of it; cuts off an end that was not written whole, and makes the file where there is none."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        raw = self._path.read_bytes() if self._path.exists() else b""
        if not raw:
            self._rewrite(_Contents(), [])
            return _Contents()
        whole = raw[: raw.rfind(b"\n") + 1]
        contents, _ = self._replayed((whole or raw).splitlines(), None)
        if len(whole) < len(raw):
            log.warning("%s ends with a line that was not written whole; it is cut off", self._path)
            os.truncate(self._path, len(whole))
        self._file = self._path.open("ab", buffering=0)
        return contents

    def append(self, line: bytes) -> None:
        """What a write leaves behind that fails is taken back."""
        assert self._file is not None
        self._unsynced = True
        size, left = os.fstat(self._file.fileno()).st_size, memoryview(line)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            self._file.truncate(size)
            raise
        self._num_lines += 1

    def sync(self) -> None:
        """What was appended survives a power cut."""
        if self._unsynced:
            assert self._file is not None
            os.fsync(self._file.fileno())
            self._unsynced = False

    def cut(self, num_operations: int) -> _Contents:
        """Leaves the first `num_operations`."""
        lines = self._lines()
        contents, left = self._replayed(lines, num_operations)
        if left < len(lines):
            self._replace(b"".join(line + b"\n" for line in lines[:left]), left - 1)
        return contents

    def compact_when_due(self, num_artifacts: int) -> None:
        """Writes the settled operations as what they leave, once the file is twice as long as it must be."""
        if self._num_lines <= max(self._compact_at, 2 * num_artifacts) or self.settled <= self._first:
            return
        lines = self._lines()
        base, kept = self._replayed(lines, self.settled)
        self._rewrite(base, lines[kept:])
        self._compact_at = max(self._compact_above, 2 * self._num_lines)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _lines(self) -> list[bytes]:
        return self._path.read_bytes().splitlines()

    def _replayed(self, lines: Sequence[bytes], num_operations: int | None) -> tuple[_Contents, int]:
        """What the lines leave after `num_operations` (None: all), and how many lines that takes."""
        header, contents = self._header(lines[0]), _Contents()
        self._first, start = header["after"], 1 + header["base"]
        if len(lines) < start:
            raise CorruptError(f"{self._path} has {len(lines)} lines, expected at least {start}; its end was lost")
        end = len(lines) if num_operations is None else start + num_operations - self._first
        if end < start:
            raise CorruptError(
                f"{self._path} is to be taken back to operation {num_operations}, and was settled at {self._first}; "
                "go on from a later checkpoint"
            )
        if end > len(lines):
            raise CorruptError(
                f"{self._path} ends with operation {self._first + len(lines) - start}, expected {num_operations}; its "
                "end was lost; go on from an earlier checkpoint"
            )
        for number, line in enumerate(lines[1:end], start=2):
            self._apply(contents, line, number)
        contents.num_operations = self._first + end - start
        self._num_lines = len(lines) - 1
        return contents, end

    def _apply(self, contents: _Contents, line: bytes, number: int) -> None:
        try:
            contents.apply(line)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise CorruptError(
                f"{self._path}: line {number} is damaged: {error!r}; mend it, or take the file away to begin with an "
                "empty store"
            ) from error

    def _header(self, line: bytes) -> Mapping[str, Any]:
        try:
            header = json.loads(line)
            store, version, numbers = header["store"], header["format"], (header["after"], header["base"])
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptError(f"{self._path} does not begin like the file of a store: {error!r}") from error
        if (store, version) != (self._store, _FORMAT) or not all(isinstance(number, int) for number in numbers):
            raise CorruptError(
                f"{self._path} is of the store {store!r}, format {version!r}; expected {self._store!r}, {_FORMAT}"
            )
        return cast(Mapping[str, Any], header)

    def _rewrite(self, base: _Contents, tail: Sequence[bytes]) -> None:
        puts = [_put_line(base.get(artifact_id)) for artifact_id in base.weights]
        header = {"store": self._store, "format": _FORMAT, "after": base.num_operations, "base": len(puts)}
        self._replace(b"".join([_line(header), *puts, *(line + b"\n" for line in tail)]), len(puts) + len(tail))
        self._first = base.num_operations

    def _replace(self, data: bytes, num_lines: int) -> None:
        write_atomic(self._path, data)
        self.close()
        self._num_lines, self._unsynced = num_lines, False
        self._file = self._path.open("ab", buffering=0)


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _put_line(artifact: Artifact) -> bytes:
    begin = json.dumps({"op": "put", "id": artifact.id, "weight": artifact.weight}, separators=(",", ":"))
    return f'{begin[:-1]},"data":{artifact.content}}}\n'.encode()


def _canonical(data: Any) -> str:
    """Raises ValueError where it is no JSON."""
    _check_json(data)
    try:
        return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"an artifact must be JSON, received {type(data).__name__}: {error}") from error


def _check_json(data: Any, depth: int = 0) -> None:
    """What would change on its way through JSON, or could not be read again."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"an artifact must be JSON of at most {_MAX_DEPTH} levels, received more")
    if isinstance(data, Mapping):
        if others := [key for key in data if not isinstance(key, str)]:
            raise ValueError(f"an artifact must be JSON, received the key {others[0]!r}; use strings as keys")
        for value in data.values():
            _check_json(value, depth + 1)
    elif isinstance(data, list | tuple):
        for value in data:
            _check_json(value, depth + 1)


def _digest(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def _checked_weight(weight: Any) -> float:
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        raise ValueError(f"an artifact has weight {weight!r}, expected a finite number of at least 0")
    return float(weight)

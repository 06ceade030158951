"""Artifacts: what episodes make and use again, such as topics, proposed questions, programs.

A store keeps JSON values with weights, in memory. What has changed goes to a table of the ledger in the transaction of
each step, so that a run that goes on after a batch finds its stores as they were with it.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.ledger import Ledger

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
    place: int = field(default=0, compare=False)
    """In the order in which the store's artifacts came."""

    @property
    def data(self) -> Any:
        """The value, the caller's own."""
        return json.loads(self.content)


class ArtifactStore:
    """Artifacts by content, at most `max_size` of them; the lightest go first, among equals the oldest."""

    def __init__(
        self,
        name: str,
        *,
        max_size: int = 10_000,
        seed: int = 0,
        artifacts: Iterable[Artifact] = (),
        num_draws: int = 0,
    ) -> None:
        """Begins with `artifacts`, oldest first. Draws are those of `seed`, the store's name, and how many there
        were."""
        if not _NAME.fullmatch(name):
            raise ValueError(f"a store is called {name!r}, expected up to 128 letters, digits, - and _")
        if max_size < 1:
            raise ValueError(f"the store {name} has max_size {max_size}, expected at least 1")
        self.name, self.max_size, self._seed, self.num_draws = name, max_size, seed, num_draws
        self._artifacts = {artifact.id: artifact for artifact in artifacts}
        self._next_place = 1 + max((artifact.place for artifact in self._artifacts.values()), default=-1)
        self._changed: dict[str, None] = {}
        self.num_evicted = 0
        """Artifacts that left because the store was full, in this process."""
        self._evict()

    def __len__(self) -> int:
        return len(self._artifacts)

    def __contains__(self, artifact_id: object) -> bool:
        return artifact_id in self._artifacts

    def add(self, data: Any, *, weight: float = 1.0) -> Artifact:
        """Stores a JSON value. One that is there already gets the new weight. In a full store the lightest goes, which
        may be the one that is added: it is in the store only if `artifact.id in store`.

        Raises ValueError where `data` is no JSON, or `weight` is not finite or negative.
        """
        content = _canonical(data)
        new = Artifact(id=_digest(content), content=content, weight=_checked_weight(weight), place=self._next_place)
        if new.id in self:
            self.set_weight(new.id, weight)
            return self.get(new.id)
        self._next_place += 1
        self._artifacts[new.id] = new
        self._changed[new.id] = None
        self._evict()
        return new

    def set_weight(self, artifact_id: str, weight: float) -> None:
        """Raises KeyError where it is not there, and ValueError as `add` does."""
        artifact = self.get(artifact_id)
        if artifact.weight != _checked_weight(weight):
            self._artifacts[artifact_id] = replace(artifact, weight=float(weight))
            self._changed[artifact_id] = None

    def remove(self, artifact_id: str) -> None:
        """Raises KeyError where it is not there."""
        self.get(artifact_id)
        del self._artifacts[artifact_id]
        self._changed[artifact_id] = None

    def _evict(self) -> None:
        while len(self) > self.max_size:
            self.remove(min(self._artifacts.values(), key=lambda one: one.weight).id)
            self.num_evicted += 1

    def get(self, artifact_id: str) -> Artifact:
        """Raises KeyError where it is not there."""
        if artifact_id not in self:
            raise KeyError(f"the store {self.name} has no artifact {artifact_id}")
        return self._artifacts[artifact_id]

    def all(self) -> list[Artifact]:
        """Oldest first."""
        return list(self._artifacts.values())

    def sample(self, num: int = 1, *, weighted: bool = False, replace: bool = True) -> list[Artifact]:
        """`num` draws, each of every artifact alike, or `weighted`. Without `replace` all are different.

        Raises ValueError where the store has nothing to draw, or without `replace` not enough.
        """
        drawable = [one for one in self._artifacts.values() if one.weight > 0 or not weighted]
        if num < 0 or len(drawable) < (min(num, 1) if replace else num):
            kind = "artifacts with a weight above 0" if weighted else "artifacts"
            raise ValueError(
                f"{num} artifacts were to be drawn from the store {self.name}, which has {len(drawable)} {kind}"
            )
        draws = np.random.default_rng(int(_digest(f"{self._seed}/{self.name}/{self.num_draws}"), 16))
        self.num_draws += 1
        weights = np.array([one.weight if weighted else 1.0 for one in drawable])
        return [drawable[place] for place in (_drawn_again if replace else _drawn_once)(draws, weights, num)]

    def changes(self) -> list[tuple[str, Artifact | None]]:
        """What has changed since the last call, by id, with what it is now; None for one that has gone."""
        changed, self._changed = self._changed, {}
        return [(artifact_id, self._artifacts.get(artifact_id)) for artifact_id in changed]


class ArtifactStores:
    """The stores of a run by name. Example: ``stores.add("topics").add({"topic": "tea"})``"""

    def __init__(self, ledger: Ledger, *, seed: int = 0, state: Mapping[str, int] | None = None) -> None:
        """`ledger`: has what they hold. `state`: what `save` has returned with the batch after which a run goes on."""
        self._ledger, self._seed, self._state = ledger, seed, state or {}
        self._stores: dict[str, ArtifactStore] = {}

    def add(self, name: str, *, max_size: int = 10_000) -> ArtifactStore:
        """Opens a store. Raises ValueError where one of that name is open."""
        if name in self._stores:
            raise ValueError(f"there is a store {name} already; use stores[{name!r}]")
        rows = self._ledger.artifacts(name)
        artifacts = [Artifact(id=i, content=data, weight=weight, place=place) for i, place, weight, data in rows]
        self._stores[name] = store = ArtifactStore(
            name, max_size=max_size, seed=self._seed, artifacts=artifacts, num_draws=self._state.get(name, 0)
        )
        return store

    def __getitem__(self, name: str) -> ArtifactStore:
        if name not in self._stores:
            raise KeyError(f"there is no store {name}; there are {sorted(self._stores)}")
        return self._stores[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stores)

    def save(self, step: int) -> dict[str, int]:
        """Hands what has changed to the ledger, to be written with batch `step`. Returns how many draws each store has
        made, to be kept in its state."""
        for name, store in self._stores.items():
            changes = store.changes()
            there = [(one.id, one.place, one.weight, one.content) for _, one in changes if one is not None]
            self._ledger.artifacts_changed(name, [artifact_id for artifact_id, _ in changes], there, step)
        return {name: store.num_draws for name, store in self._stores.items()}


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

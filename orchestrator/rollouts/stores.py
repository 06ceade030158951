"""Artifact stores: what episodes make and use again, such as topics, proposed questions, programs.

A store keeps JSON values with weights, in memory, and in a table of the ledger as soon as they change. It is a cache: a
run that goes on finds its stores as they were last, whatever batch it goes on after.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from grpo.orchestrator.ledger import Ledger
from grpo.orchestrator.rollouts.messages import plain, shown

SPLITS = ("train", "eval")
MAX_CONTENT_CHARACTERS = 1 << 20
"""The longest artifact as JSON."""
MAX_DRAWS, MAX_DRAWN_CHARACTERS = 10_000, 1 << 24
"""How many artifacts one call may draw, and how long they may be together."""


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
    """Artifacts by content, at most `max_size` of them; the lightest go first, among equals the oldest."""

    def __init__(
        self,
        name: str,
        *,
        max_size: int = 10_000,
        seed: int | str = 0,
        artifacts: Iterable[Artifact] = (),
        changed: Callable[[str, Artifact | None], None] = lambda artifact_id, artifact: None,
    ) -> None:
        """Begins with `artifacts`, oldest first. Draws follow from `seed`, the store's name, and how many there were.
        `changed` is called with the id of an artifact that has changed, and what it is now; None if it is gone."""
        self.name, self.max_size, self._seed, self._num_draws, self._changed = name, max_size, seed, 0, changed
        self._artifacts = {artifact.id: artifact for artifact in artifacts}
        self._evict()

    def operate(self, operation: str, arguments: Mapping[str, Any]) -> Any:
        """Returns the result of `add` (the id), `sample` (a list of [id, data]), `get` (the data, in a list, or an
        empty one), `set_weight` (whether the artifact is still there: another rollout's may have taken its place) or
        `count`. Raises KeyError, ValueError and TypeError."""
        match operation:
            case "add":
                return self.add(arguments["data"], weight=arguments.get("weight", 1.0))
            case "sample":
                return [[one.id, one.data] for one in self.sample(**arguments)]
            case "get":
                found = self.get(arguments["id"])
                return [] if found is None else [found.data]
            case "set_weight":
                return self.set_weight(arguments["id"], arguments["weight"])
            case "count":
                return len(self._artifacts)
        raise ValueError(f"there is no operation {operation!r}")

    def add(self, data: Any, *, weight: float = 1.0) -> str:
        """Stores a JSON value, and returns its id. One that is there already gets the new weight. In a full store the
        lightest goes, which may be the one that is added. Raises ValueError where `data` is no JSON, or `weight` is not
        finite or negative."""
        content = json.dumps(plain(data, f"what is added to the store {self.name}"), sort_keys=True)
        if len(content) > MAX_CONTENT_CHARACTERS:
            raise ValueError(
                f"a value of {len(content)} characters was to be added to the store {self.name}, expected at most "
                f"{MAX_CONTENT_CHARACTERS} as JSON; keep what is longer in a file, and its name here"
            )
        new = Artifact(id=_digest(content), content=content, weight=_checked_weight(weight))
        if not self.set_weight(new.id, weight):
            self._put(new)
            self._evict()
        return new.id

    def set_weight(self, artifact_id: str, weight: float) -> bool:
        """Whether the artifact is there. Raises ValueError as `add` does."""
        weight, artifact = _checked_weight(weight), self._artifacts.get(artifact_id)
        if artifact is not None and artifact.weight != weight:
            self._put(replace(artifact, weight=weight))
        return artifact is not None

    def _put(self, artifact: Artifact) -> None:
        self._artifacts[artifact.id] = artifact
        self._changed(artifact.id, artifact)

    def _evict(self) -> None:
        while len(self._artifacts) > self.max_size:
            lightest = min(self._artifacts.values(), key=lambda one: one.weight).id
            del self._artifacts[lightest]
            self._changed(lightest, None)

    def get(self, artifact_id: str) -> Artifact | None:
        """The artifact with this id; None where it is not there any more."""
        return self._artifacts.get(artifact_id)

    def all(self) -> list[Artifact]:
        """Oldest first."""
        return list(self._artifacts.values())

    def sample(self, num: int = 1, *, weighted: bool = False, replace: bool = True) -> list[Artifact]:
        """`num` draws, each of every artifact alike, or `weighted`. Without `replace` all are different.

        Raises ValueError where the store has nothing to draw, or without `replace` not enough, and for more draws at a
        time than one call may have.
        """
        if type(num) is not int or abs(num) > MAX_DRAWS:
            raise ValueError(f"{shown(num)} artifacts were to be drawn, expected an integer of at most {MAX_DRAWS}")
        drawable = [one for one in self._artifacts.values() if one.weight > 0 or not weighted]
        if num < 0 or len(drawable) < (min(num, 1) if replace else num):
            kind = "artifacts with a weight above 0" if weighted else "artifacts"
            raise ValueError(
                f"{num} artifacts were to be drawn from the store {self.name}, which has {len(drawable)} {kind}"
            )
        draws = np.random.default_rng(int(_digest(f"{self._seed}/{self.name}/{self._num_draws}"), 16))
        self._num_draws += 1
        if not num:
            return []
        probs = None
        if weighted:
            weights = np.array([one.weight for one in drawable])
            probs = (weights := weights / weights.max()) / weights.sum()  # the largest may be close to infinity
        drawn = [drawable[index] for index in draws.choice(len(drawable), num, replace=replace, p=probs)]
        if (size := sum(len(one.content) for one in drawn)) > MAX_DRAWN_CHARACTERS:
            raise ValueError(f"{num} draws of {size} characters, at most {MAX_DRAWN_CHARACTERS} at a time; draw fewer")
        return drawn

    def sample_one(self, *, weighted: bool = False) -> Artifact | None:
        """Returns one draw; None where the store is empty."""
        return self.sample(weighted=weighted)[0] if self._artifacts else None

    def count(self) -> int:
        """Returns how many artifacts there are."""
        return len(self._artifacts)


class ArtifactStores:
    """The stores of a run's environments. What evaluation keeps is apart: it leaves what is trained as it was."""

    def __init__(self, ledger: Ledger, *, seed: int | str = 0) -> None:
        """`ledger` keeps what they hold. Draws follow from `seed`: another one for each process of a run, so that none
        repeats what one before it has drawn."""
        self._ledger, self._seed, self._stores = ledger, seed, dict[str, ArtifactStore]()

    def open(self, env: str, sizes: Mapping[str, int]) -> None:
        """Opens the stores of an environment. `sizes`: by name, how many artifacts each may hold. Raises ValueError for
        a size that cannot be."""
        for name, split in itertools.product(sizes, SPLITS):
            if sizes[name] < 1:
                raise ValueError(
                    f"environment {env} has a store {name!r} for {sizes[name]} artifacts, expected at least 1"
                )
            full = f"{env}/{split}/{name}"
            kept = [Artifact(id=i, weight=weight, content=data) for i, weight, data in self._ledger.artifacts(full)]
            self._stores[full] = ArtifactStore(
                full, max_size=sizes[name], seed=self._seed, artifacts=kept, changed=partial(self._keep, full)
            )

    def _keep(self, store: str, artifact_id: str, artifact: Artifact | None) -> None:
        kept = None if artifact is None else (artifact.weight, artifact.content)
        self._ledger.artifact_changed(store, artifact_id, kept)

    def of(self, env: str, split: str, name: str) -> ArtifactStore:
        """Raises KeyError where there is none."""
        if (store := self._stores.get(f"{env}/{split}/{name}")) is None:
            raise KeyError(f"there is no store {name}")
        return store


def _digest(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def _checked_weight(weight: Any) -> float:
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        raise ValueError(f"an artifact has weight {weight!r}, expected a finite number of at least 0")
    return float(weight)

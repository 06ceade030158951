"""The artifact stores of a run's environments."""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from orchestrator.ledger import Ledger
from orchestrator.rollouts.artifacts import ArtifactStore, ArtifactStores

SPLIT_PREFIXES = {"train": "", "eval": "eval-"}
_STORE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


def store_name(env: str, split: str, name: str) -> str:
    """What an environment's artifact store is called among all of a run. What evaluation keeps is apart: it leaves what
    is trained as it was."""
    clean, digest = re.sub("[^A-Za-z0-9_-]", "-", env)[:20], hashlib.blake2b(env.encode(), digest_size=3).hexdigest()
    return f"{SPLIT_PREFIXES[split]}{clean}-{digest}_{name}"


def open_stores(
    sizes: Mapping[str, Mapping[str, int]],
    ledger: Ledger,
    *,
    seed: int,
    state: Mapping[str, int] | None,
) -> ArtifactStores | None:
    """The artifact stores of all environments, as they were in `state`; None where no environment has any. `sizes`: by
    environment and name, how many artifacts each may hold. Raises ValueError for a name that cannot be one."""
    if not any(sizes.values()):
        return None
    stores = ArtifactStores(ledger, seed=seed, state=state)
    for env, named in sizes.items():
        for name, max_size in named.items():
            if not _STORE_NAME.fullmatch(name):
                raise ValueError(
                    f"environment {env} calls a store {name!r}, expected up to 64 letters, digits, - and _ that begin "
                    "with a letter or a digit; give it another name in its stores"
                )
            for split in SPLIT_PREFIXES:
                stores.add(store_name(env, split, name), max_size=max_size)
    return stores


def operate(store: ArtifactStore, operation: str, given: Mapping[str, Any]) -> Any:
    """What comes of `add` (the id), `sample` (a list of [id, data]), `set_weight` (whether the artifact is still there:
    another rollout's may have taken its place) or `size`. Raises KeyError, ValueError and TypeError."""
    if operation == "add":
        return store.add(given["data"], weight=given.get("weight", 1.0)).id
    if operation == "sample":
        drawn = store.sample(
            given.get("num", 1), weighted=given.get("weighted", False), replace=given.get("replace", True)
        )
        return [[one.id, one.data] for one in drawn]
    if operation == "set_weight":
        if is_there := given["id"] in store:
            store.set_weight(given["id"], given["weight"])
        return is_there
    if operation != "size":
        raise ValueError(f"there is no operation {operation!r}")
    return len(store)

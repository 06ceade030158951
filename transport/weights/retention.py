"""Which old policy versions may go.

The publisher removes, and only the orchestrator knows who needs what: a rollout in flight, an evaluation, a server
that still drains a version and would read it from disk again, or one that joins late. So the orchestrator writes
`broadcasts/in_use.json`: the versions that must stay, and the newest one that is live. Whatever it starts later, it
starts under that one or a newer one, so that the file never says too little:

- nothing is removed without the file, or with the file of another run;
- a version named in it stays, and so does every version from the newest live one on;
- beyond that, the last `keep_last` published versions and every `keep_interval`-th stay.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from transport import faults
from transport.errors import CorruptError
from transport.folders import write_atomic
from transport.records import parse_json

IN_USE_FILE = "in_use.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class InUse:
    """What must stay. Example: ``InUse(versions=frozenset({3, 7, 8}), newest=8)``"""

    versions: frozenset[int]
    """Versions that somebody uses."""
    newest: int
    """The newest version that is live; it and all later ones are in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What stays although nobody uses it."""

    keep_last: int
    """So many of the newest published versions."""
    keep_interval: int | None
    """Every version that is a multiple of this; None: no further ones."""

    def removable(self, published: Iterable[int], in_use: InUse) -> list[int]:
        """Those of the published versions that may go, ascending."""
        ascending = sorted(published)
        old = [version for version in ascending[: -self.keep_last] if version < in_use.newest]
        interval = self.keep_interval
        return [v for v in old if v not in in_use.versions and (interval is None or v % interval != 0)]


def write_in_use(folder: Path, in_use: InUse, *, run_id: str) -> None:
    """Replaces the file in `folder`, the run's `broadcasts` folder. For the orchestrator."""
    fields = {"run_id": run_id, "versions": sorted(in_use.versions), "newest": in_use.newest}
    write_atomic(folder / IN_USE_FILE, json.dumps(fields).encode(), durable=False)
    faults.point("policy.in_use_written")


def read_in_use(folder: Path, *, run_id: str) -> InUse | None:
    """What the orchestrator of this run has written last; None where it has not. Raises `CorruptError`."""
    try:
        data = (folder / IN_USE_FILE).read_bytes()
    except FileNotFoundError:
        return None
    fields = parse_json(data, IN_USE_FILE)
    if fields.get("run_id") != run_id:
        return None
    versions, newest = fields.get("versions"), fields.get("newest")
    if not isinstance(versions, list) or not all(isinstance(number, int) for number in (newest, *versions)):
        raise CorruptError(f"{IN_USE_FILE} has versions = {versions!r}, newest = {newest!r}, expected numbers")
    return InUse(versions=frozenset(versions), newest=int(str(newest)))

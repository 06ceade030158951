"""Which old policy versions may go.

The publisher removes, and only the orchestrator knows who needs what: a rollout in flight, an evaluation, a server
that still drains a version and would read it from disk again, or one that joins late. So the orchestrator writes
`broadcasts/in_use.json`: the versions that must stay, and the newest one that is live. Whatever it starts later, it
starts under that one or a newer one, so that the file never says too little:

- nothing is removed without the file, or with the file of another run;
- a version named in it stays, and so does every version from the newest live one on;
- beyond that, the last `keep_last` published versions and every `keep_interval`-th stay.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from transport.folders import write_atomic
from transport.records import Natural, Record

IN_USE_FILE = "in_use.json"


class InUse(Record, frozen=True, kw_only=True):
    """What must stay. Example: ``InUse(run_id="5f0c", versions=frozenset({3, 7, 8}), newest=8)``"""

    run_id: str
    versions: frozenset[Natural]
    """Versions that somebody uses."""
    newest: Natural
    """The newest version that is live; it and all later ones are in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What stays although nobody uses it."""

    keep_last: int
    """So many of the newest published versions."""
    keep_interval: int | None
    """Every version that is a multiple of this; None: no further ones."""

    def removable(self, published: Iterable[int], in_use: InUse) -> list[int]:
        """Returns those of the published versions that may go, ascending."""
        ascending = sorted(published)
        old = [version for version in ascending[: -self.keep_last] if version < in_use.newest]
        interval = self.keep_interval
        return [v for v in old if v not in in_use.versions and (interval is None or v % interval != 0)]


def write_in_use(folder: Path, in_use: InUse) -> None:
    """Replaces the file in `folder`, the run's `broadcasts` folder. For the orchestrator."""
    write_atomic(folder / IN_USE_FILE, in_use.to_json(), durable=False)


def read_in_use(folder: Path, *, run_id: str) -> InUse | None:
    """Returns what the orchestrator of this run has written last; None where it has not. Raises `CorruptError`."""
    try:
        in_use = InUse.from_json((folder / IN_USE_FILE).read_bytes())
    except FileNotFoundError:
        return None
    return in_use if in_use.run_id == run_id else None

"""The fate of every rollout: issued, scored, shipped, trained in a step, or dropped with its reason.

Counted in memory, kept in SQLite (WAL). What changed is written in batches by `flush`.
"""

import sqlite3
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_TABLE = """
CREATE TABLE IF NOT EXISTS rollouts (
    id TEXT PRIMARY KEY, group_id INTEGER NOT NULL, env TEXT NOT NULL, example INTEGER NOT NULL,
    version INTEGER NOT NULL, state TEXT NOT NULL, reason TEXT, step INTEGER, reward REAL, num_tokens INTEGER,
    issued_at REAL NOT NULL, changed_at REAL NOT NULL
) WITHOUT ROWID
"""
_UPSERT = f"INSERT OR REPLACE INTO rollouts VALUES ({', '.join('?' * 12)})"


@dataclass(slots=True, kw_only=True)
class _Row:
    id: str
    group_id: int
    env: str
    example: int
    version: int
    issued_at: float
    changed_at: float
    state: str = "issued"
    reason: str | None = None
    step: int | None = None
    reward: float | None = None
    num_tokens: int | None = None

    def values(self) -> tuple[object, ...]:
        """In the table's order."""
        told = (self.state, self.reason, self.step, self.reward, self.num_tokens)
        return (self.id, self.group_id, self.env, self.example, self.version, *told, self.issued_at, self.changed_at)


class Ledger:
    """Rollouts are named `group/number`. States only ever advance."""

    def __init__(self, path: Path) -> None:
        """`path` of the database, which is created."""
        self._database = sqlite3.connect(path)
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = NORMAL")
        self._database.execute(_TABLE)
        self._database.commit()
        self._open: dict[str, _Row] = {}
        self._changed: dict[str, _Row] = {}
        self._by_step: dict[int, list[_Row]] = {}
        self.num_issued = 0
        self.num_trained = 0
        self.num_dropped: Counter[str] = Counter()

    def issued(self, group: int, *, num: int, env: str, example: int, version: int) -> None:
        """A group of `num` rollouts is about to be sampled."""
        now = time.time()
        for number in range(num):
            row = _Row(
                id=f"{group}/{number}",
                group_id=group,
                env=env,
                example=example,
                version=version,
                issued_at=now,
                changed_at=now,
            )
            self._open[row.id] = self._changed[row.id] = row
        self.num_issued += num

    def scored(self, rollout_id: str, *, reward: float, num_tokens: int) -> None:
        """A rollout has its reward."""
        row = self._advance(rollout_id, "scored")
        row.reward, row.num_tokens = reward, num_tokens

    def dropped(self, rollout_ids: Iterable[str], reason: str) -> None:
        """Rollouts that are not trained."""
        for rollout_id in rollout_ids:
            self._advance(rollout_id, "dropped").reason = reason
            self.num_dropped[reason] += 1
            del self._open[rollout_id]

    def shipped(self, rollout_ids: Iterable[str], step: int) -> None:
        """Rollouts that have left for the trainer in batch `step`."""
        rows = [self._advance(rollout_id, "shipped") for rollout_id in rollout_ids]
        for row in rows:
            row.step = step
            del self._open[row.id]
        self._by_step[step] = rows

    def trained(self, step: int) -> None:
        """The trainer has published the version that batch `step` gave."""
        now = time.time()
        for row in self._by_step.pop(step):
            row.state, row.changed_at = "trained", now
            self._changed[row.id] = row
            self.num_trained += 1

    def _advance(self, rollout_id: str, state: str) -> _Row:
        row = self._changed[rollout_id] = self._open[rollout_id]
        row.state, row.changed_at = state, time.time()
        return row

    def flush(self) -> None:
        """Writes what changed since the last time."""
        if self._changed:
            self._database.executemany(_UPSERT, [row.values() for row in self._changed.values()])
            self._database.commit()
            self._changed.clear()

    def drop_unfinished(self, reason: str) -> None:
        """Whatever has not left for the trainer when a run ends."""
        self.dropped(list(self._open), reason)

    def close(self) -> None:
        """Writes the rest and closes the database."""
        self.flush()
        self._database.close()

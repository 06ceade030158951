"""The fate of every rollout: issued, scored, shipping, shipped, trained in a step, or dropped with its reason. And
every preference pair, with the step that took it. And which examples are easy and hard, and what artifact
stores hold, from which step on.

Counted in memory, kept in SQLite (WAL). What changed is written in batches, beside the event loop. A rollout is written
before any server is asked for it, so that one that a killed process had issued is known to the next, and its number is
not used again. With each batch goes the state from which a later process goes on after it: it is on disk, durably,
before the batch can be received. (Durably means through a power cut. A process that is killed loses nothing that it has
written; a power cut can take what was issued since the newest batch.)
"""

import json
import sqlite3
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transport.errors import StorageError

_TABLES = (
    """
CREATE TABLE IF NOT EXISTS rollouts (
    id TEXT PRIMARY KEY, group_id INTEGER NOT NULL, env TEXT NOT NULL, example INTEGER NOT NULL,
    version INTEGER NOT NULL, state TEXT NOT NULL, reason TEXT, step INTEGER, reward REAL, num_tokens INTEGER,
    issued_at REAL NOT NULL, changed_at REAL NOT NULL
) WITHOUT ROWID
""",
    "CREATE INDEX IF NOT EXISTS rollouts_by_step ON rollouts (step) WHERE step IS NOT NULL",
    "CREATE TABLE IF NOT EXISTS steps (step INTEGER PRIMARY KEY, state TEXT NOT NULL, metrics TEXT NOT NULL)",
    """
CREATE TABLE IF NOT EXISTS pairs (
    id INTEGER PRIMARY KEY, version INTEGER NOT NULL, taken_step INTEGER, record TEXT NOT NULL
)
""",
    """
CREATE TABLE IF NOT EXISTS pools (
    example TEXT NOT NULL, step INTEGER NOT NULL, pool TEXT NOT NULL, PRIMARY KEY (example, step)
) WITHOUT ROWID
""",
    """
CREATE TABLE IF NOT EXISTS artifacts (
    store TEXT NOT NULL, id TEXT NOT NULL, place INTEGER NOT NULL, weight REAL NOT NULL, data TEXT NOT NULL,
    added_step INTEGER NOT NULL, removed_step INTEGER
)
""",
    "CREATE INDEX IF NOT EXISTS artifacts_there ON artifacts (store, id) WHERE removed_step IS NULL",
)
_UPSERT = f"INSERT OR REPLACE INTO rollouts VALUES ({', '.join('?' * 12)})"
NUM_STATES = 64
"""States of the newest batches that are kept; more than a channel holds unreceived."""
BUSY_S = 30.0
"""How long to wait where another process writes."""
RESTARTED, SUPERSEDED = "restarted", "superseded"
"""Reasons: the orchestrator ended before the rollout was trained, and its prompt is asked again; the run went on from a
checkpoint before the step that had trained it."""


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
    """Rollouts are named `group/number`. States only ever advance, but for a run that goes back to a checkpoint."""

    def __init__(self, path: Path) -> None:
        """`path` of the database, which is created."""
        self.path = path
        self._database = sqlite3.connect(path, check_same_thread=False, timeout=BUSY_S)
        self._lock = threading.Lock()
        """Of the database: what has changed is written by other threads."""
        try:
            self._database.execute("PRAGMA journal_mode = WAL")
            self._inode = path.stat().st_ino
            self._database.execute("PRAGMA synchronous = NORMAL")
            with self._transaction() as database:
                for table in _TABLES:
                    database.execute(table)
                self._num_pairs: int = database.execute("SELECT coalesce(max(id), 0) FROM pairs").fetchone()[0]
        except sqlite3.Error as error:
            self._database.close()
            raise self._unusable(error) from error
        self._num_written = 0
        self._queue: deque[tuple[str, list[tuple[object, ...]]]] = deque()
        """Statements with their rows as they were when they were handed over, in order, whichever thread comes to write
        them."""
        self._open: dict[str, _Row] = {}
        self._changed: dict[str, _Row] = {}
        self._by_step: dict[int, list[_Row]] = {}
        self.num_issued = 0
        self.num_trained = 0
        self.num_dropped: Counter[str] = Counter()

    # --- fates ---

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

    def shipping(
        self, rollout_ids: Iterable[str], step: int, *, state: Mapping[str, Any], metrics: Mapping[str, float]
    ) -> Callable[[], None]:
        """Rollouts that are about to leave in batch `step`, and the buffer's `state` after it. The batch may leave once
        what is returned, a blocking call, has made this durable."""
        rows = [self._advance(rollout_id, "shipping") for rollout_id in rollout_ids]
        for row in rows:
            row.step = step
            del self._open[row.id]
        self._by_step[step] = rows
        self._hand_over()
        shipped = (step, json.dumps(state), json.dumps(metrics))

        def commit() -> None:
            with self._transaction(durable=True) as database:
                self._write_queue(database)
                database.execute("INSERT OR REPLACE INTO steps VALUES (?, ?, ?)", shipped)

        return commit

    def shipped(self, step: int) -> None:
        """Batch `step` has left for the trainer, which may have been quick to train it."""
        self._advance_step(self._by_step.get(step, ()), "shipped")

    def trained(self, step: int) -> None:
        """The trainer has published the version that batch `step` gave."""
        if (rows := self._by_step.pop(step, None)) is not None:
            self._advance_step(rows, "trained")
            self.num_trained += len(rows)
        else:
            self.num_trained += self._trained_up_to(step)

    def _advance(self, rollout_id: str, state: str) -> _Row:
        row = self._changed[rollout_id] = self._open[rollout_id]
        row.state, row.changed_at = state, time.time()
        return row

    def _advance_step(self, rows: Iterable[_Row], state: str) -> None:
        now = time.time()
        for row in rows:
            row.state, row.changed_at = state, now
            self._changed[row.id] = row

    def _trained_up_to(self, step: int) -> int:
        """Of batches that an earlier process shipped. Returns how many rollouts were not known to be trained."""
        update = "UPDATE rollouts SET state = 'trained', changed_at = ? WHERE state = 'shipped' AND step <= ?"
        with self._transaction() as database:
            return database.execute(update, (time.time(), step)).rowcount

    # --- preference pairs ---

    def pair_made(self, version: int, record: str) -> int:
        """A pair of which a turn of `version` is the rejected part, as JSON. Returns its number."""
        self._num_pairs += 1
        self._queue.append(("INSERT INTO pairs VALUES (?, ?, NULL, ?)", [(self._num_pairs, version, record)]))
        return self._num_pairs

    def pairs_taken(self, numbers: Iterable[int], step: int) -> None:
        """Pairs go with batch `step`, in whose transaction this is written."""
        rows: list[tuple[object, ...]] = [(step, number) for number in numbers]
        self._queue.append(("UPDATE pairs SET taken_step = ? WHERE id = ?", rows))

    def pairs_waiting(self, most: int) -> list[tuple[int, str]]:
        """(number, JSON) of pairs that no batch has taken, those of the newest versions."""
        query = "SELECT id, record FROM pairs WHERE taken_step IS NULL ORDER BY version DESC, id DESC LIMIT ?"
        with self._lock:
            return self._database.execute(query, (most,)).fetchall()

    # --- easy and hard examples ---

    def examples_moved(self, pools: Mapping[str, str], step: int) -> None:
        """Examples by key that are in another pool since batch `step`, in whose transaction this is written."""
        self._queue.append(("INSERT OR REPLACE INTO pools VALUES (?, ?, ?)", [(k, step, p) for k, p in pools.items()]))

    def pools(self) -> dict[str, str]:
        """The pool of each example by key that was ever in another than the first."""
        with self._lock:
            rows = self._database.execute("SELECT example, pool, max(step) FROM pools GROUP BY example")
            return {example: pool for example, pool, _ in rows}

    # --- artifacts ---

    def artifacts_changed(
        self, store: str, changed: Iterable[str], there: Iterable[tuple[str, int, float, str]], step: int
    ) -> None:
        """Artifacts `changed` since the last batch, by id, of which (id, place, weight, data) are `there` now: written
        in the transaction of batch `step`."""
        gone = "UPDATE artifacts SET removed_step = ? WHERE store = ? AND id = ? AND removed_step IS NULL"
        self._queue.append((gone, [(step, store, artifact_id) for artifact_id in changed]))
        self._queue.append(
            ("INSERT INTO artifacts VALUES (?, ?, ?, ?, ?, ?, NULL)", [(store, *one, step) for one in there])
        )

    def artifacts(self, store: str) -> list[tuple[str, int, float, str]]:
        """(id, place, weight, data) of what a store holds, by place."""
        query = "SELECT id, place, weight, data FROM artifacts WHERE store = ? AND removed_step IS NULL ORDER BY place"
        with self._lock:
            return self._database.execute(query, (store,)).fetchall()

    def forget(self, checkpoints: Sequence[int]) -> None:
        """Removes what no run looks for that goes on after one of `checkpoints`, ascending, or one of the newest
        batches."""
        places = ", ".join("?" * len(checkpoints))
        with self._transaction() as database:
            database.execute("DELETE FROM artifacts WHERE removed_step <= ?", (checkpoints[0],))
            newest = "(SELECT max(step) FROM steps)"
            old = f"DELETE FROM steps WHERE step <= {newest} - ? AND step < ? AND step NOT IN ({places})"
            database.execute(old, (NUM_STATES, checkpoints[-1], *checkpoints))

    # --- the database ---

    @property
    def has_unwritten(self) -> bool:
        """Whether anything that was told is not in the database yet."""
        return bool(self._changed or self._queue)

    def changes(self) -> Callable[[], None]:
        """A blocking call that writes what has changed until now."""
        self._hand_over()

        def write() -> None:
            with self._transaction() as database:
                self._write_queue(database)

        return write

    def _hand_over(self) -> None:
        values, self._changed = [row.values() for row in self._changed.values()], {}
        if values:
            self._queue.append((_UPSERT, values))

    def _write_queue(self, database: sqlite3.Connection) -> None:
        self._num_written = len(self._queue)
        for position in range(self._num_written):
            database.executemany(*self._queue[position])

    @contextmanager
    def _transaction(self, *, durable: bool = False) -> Iterator[sqlite3.Connection]:
        """Commits at its end. What was taken from the queue leaves it with the commit. Raises StorageError."""
        with self._lock:
            self._num_written = 0
            self._check_file()
            try:
                self._database.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
                with self._database:
                    yield self._database
            except sqlite3.Error as error:
                raise self._unusable(error) from error
            for _ in range(self._num_written):
                self._queue.popleft()

    def _check_file(self) -> None:
        """SQLite goes on writing to a file that has been removed, which nobody would ever read. Raises StorageError."""
        try:
            inode = self.path.stat().st_ino
        except FileNotFoundError:
            inode = None
        if inode != self._inode:
            message = f"{self.path} was {'replaced' if inode else 'removed'} while the run goes on; put it back, or"
            raise StorageError(f"{message} give a new run another output_dir")

    def _unusable(self, error: sqlite3.Error) -> StorageError:
        return StorageError(
            f"{self.path} cannot be used: {error}; let nobody else write to it, or, if it is damaged, put a copy of an "
            "earlier time there, and resume"
        )

    def state_after(self, step: int) -> Mapping[str, Any] | None:
        """What was kept with batch `step`; None where nothing is."""
        return self._state("WHERE step = ?", step)

    def newest_state(self) -> Mapping[str, Any] | None:
        """What was kept with the newest batch of all; None without any."""
        return self._state("ORDER BY step DESC LIMIT 1")

    def _state(self, which: str, *values: int) -> Mapping[str, Any] | None:
        with self._lock:
            row = self._database.execute(f"SELECT state FROM steps {which}", values).fetchone()
        return None if row is None else json.loads(row[0])

    def metrics(self) -> dict[int, dict[str, float]]:
        """Those of the newest batches, by step."""
        with self._lock:
            newest = "SELECT step, metrics FROM steps ORDER BY step DESC LIMIT ?"
            rows = self._database.execute(newest, (NUM_STATES,)).fetchall()
        return {step: json.loads(metrics) for step, metrics in reversed(rows)}

    def is_empty(self) -> bool:
        """Whether no rollout was ever written down."""
        with self._lock:
            return self._database.execute("SELECT 1 FROM rollouts LIMIT 1").fetchone() is None

    def resume(self, step: int, *, count: bool = True) -> int:
        """Goes on after batch `step`, the newest that the trainer has or can have: what was open then is dropped, its
        prompts being asked again, and so is what belongs to later batches. Returns the number of the next group.

        `count`: the totals include what earlier processes did.
        """
        with self._transaction():
            for state, reason, which in (
                ("dropped", RESTARTED, "state IN ('issued', 'scored') OR (state = 'shipping' AND step > :step)"),
                ("dropped", SUPERSEDED, "state IN ('shipped', 'trained') AND step > :step"),
                ("shipped", None, "state = 'shipping'"),
            ):
                step_of = "step" if reason is None else "NULL"
                self._database.execute(
                    f"UPDATE rollouts SET state = :state, reason = :reason, step = {step_of}, changed_at = :now "
                    f"WHERE {which}",
                    {"state": state, "reason": reason, "step": step, "now": time.time()},
                )
            self._database.execute("DELETE FROM steps WHERE step > ?", (step,))
            self._database.execute("DELETE FROM pools WHERE step > ?", (step,))
            self._database.execute("DELETE FROM artifacts WHERE added_step > ?", (step,))
            self._database.execute("UPDATE artifacts SET removed_step = NULL WHERE removed_step > ?", (step,))
            self._database.execute("DELETE FROM pairs WHERE version > ?", (step,))
            self._database.execute("UPDATE pairs SET taken_step = NULL WHERE taken_step > ?", (step,))
            newest, num = self._database.execute("SELECT max(group_id), count(*) FROM rollouts").fetchone()
            trained = self._database.execute("SELECT count(*) FROM rollouts WHERE state = 'trained'").fetchone()[0]
            dropped = "SELECT reason, count(*) FROM rollouts WHERE state = 'dropped' GROUP BY reason"
            reasons = dict(self._database.execute(dropped).fetchall())
        if count:
            self.num_issued, self.num_trained, self.num_dropped = num, trained, Counter(reasons)
        return 0 if newest is None else int(newest) + 1

    def drop_unfinished(self, reason: str) -> None:
        """Whatever is not on its way to the trainer when a run ends."""
        self.dropped(list(self._open), reason)

    def close(self) -> None:
        """Writes the rest and closes the database."""
        try:
            self.changes()()
        finally:
            with self._lock:
                self._database.close()

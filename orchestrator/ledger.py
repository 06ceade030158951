"""The run's one store: the fate of every rollout (issued, scored, shipping, shipped, trained in a step, or dropped with
its reason), preference pairs with the step that took them, receipts of steps, which examples are easy and hard from
which step on, what artifact stores hold, and with each batch the state from which a later process goes on after it.

Counted in memory, kept in SQLite (WAL). What changed is written in batches, beside the event loop. A rollout is written
before any server is asked for it, so that one that a killed process had issued is known to the next, and its number is
not used again. A batch's state is on disk, durably, before the batch can be received. (Durably means through a power
cut. A process that is killed loses nothing that it has written; a power cut can take what was issued since the newest
batch.)
"""

import json
import sqlite3
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from grpo.transport.errors import StorageError
from grpo.transport.http import LoadReport
from grpo.transport.receipts import ExpectedWitness, KeptWitness, Receipt

_TABLES = """
CREATE TABLE IF NOT EXISTS rollouts (
    group_id INTEGER NOT NULL, number INTEGER NOT NULL, id TEXT AS (group_id || '/' || number), env TEXT NOT NULL,
    example INTEGER NOT NULL, epoch INTEGER, version INTEGER NOT NULL, issued_at REAL NOT NULL,
    changed_at REAL NOT NULL, state TEXT NOT NULL, reason TEXT, step INTEGER, reward REAL, num_tokens INTEGER,
    PRIMARY KEY (group_id, number)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS rollouts_by_step ON rollouts (step) WHERE step IS NOT NULL;
CREATE TABLE IF NOT EXISTS steps (step INTEGER PRIMARY KEY, state TEXT NOT NULL, metrics TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS pairs (
    id INTEGER PRIMARY KEY, version INTEGER NOT NULL, taken_step INTEGER, record TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS proofs (
    version INTEGER NOT NULL, snapshot TEXT NOT NULL, server TEXT NOT NULL,
    max_abs REAL NOT NULL, mean_abs REAL NOT NULL, base_max_abs REAL NOT NULL, base_mean_abs REAL NOT NULL,
    tolerance REAL NOT NULL, measure TEXT NOT NULL, proved_at REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS receipts (
    step INTEGER PRIMARY KEY, expected TEXT, receipt TEXT, finding TEXT,
    components BLOB, presence_size REAL, content_size REAL, gap REAL
);
CREATE TABLE IF NOT EXISTS pools (
    example TEXT NOT NULL, step INTEGER NOT NULL, pool TEXT NOT NULL, PRIMARY KEY (example, step)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS games (
    group_id INTEGER NOT NULL, number INTEGER NOT NULL, place TEXT NOT NULL, env TEXT NOT NULL,
    role TEXT NOT NULL, player TEXT NOT NULL, digest TEXT NOT NULL,
    other_role TEXT NOT NULL, other TEXT NOT NULL, other_digest TEXT NOT NULL, score REAL NOT NULL,
    PRIMARY KEY (group_id, number, place, role, other_role)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS artifacts (
    store TEXT NOT NULL, id TEXT NOT NULL, weight REAL NOT NULL, data TEXT NOT NULL, PRIMARY KEY (store, id)
);
"""
LEDGER_FILE = "ledger.sqlite"
STATES = ("issued", "scored", "shipping", "shipped", "trained", "dropped")
"""States of a rollout."""
NUM_STATES = 64
"""States of the newest batches that are kept; more than a channel holds unreceived."""
BUSY_S = 30.0
"""How long to wait where another process writes."""
RESTARTED, SUPERSEDED = "restarted", "superseded"
"""Reasons: the orchestrator ended before the rollout was trained, and its prompt is sampled again; the run went on from
a checkpoint before the step that had trained it."""


class RolloutRow(msgspec.Struct, kw_only=True):
    """The fate of one rollout: a row, in the order in which it is written.
    Example: ``RolloutRow(group_id=17, number=3, env="reverse-text", state="trained", step=2, ...)``"""

    group_id: int
    number: int
    """Number in its group."""
    env: str
    example: int
    """Number of the example in the environment's `train` split."""
    epoch: int | None = None
    """The pass over the examples, from 0, in which each comes once; None where they come as an arena asks for them."""
    version: int
    """Policy version that it was started under."""
    issued_at: float
    """Wall clock, seconds since 1970."""
    changed_at: float
    """When it came into this state; wall clock, seconds since 1970."""
    state: str = "issued"
    """One of `STATES`."""
    reason: str | None = None
    """Why it was dropped."""
    step: int | None = None
    """The batch that it is part of."""
    reward: float | None = None
    num_tokens: int | None = None
    """Sampled tokens."""

    @property
    def id(self) -> str:
        """`group/number`."""
        return f"{self.group_id}/{self.number}"

    @property
    def lag(self) -> int | None:
        """Versions that the policy had moved on by, where it is part of a batch."""
        return None if self.step is None else self.step - 1 - self.version


class Game(msgspec.Struct, kw_only=True):
    """How one side of a game came off against another: a row.
    Example: ``Game(group_id=17, number=3, env="nim", role="first", player="v12", other="v5", score=1.0, ...)``"""

    group_id: int
    number: int
    place: str
    """Which of the sub-episodes it is, as `.0.2`; empty for the rollout itself."""
    env: str
    role: str
    """The policy's own."""
    player: str
    digest: str
    other_role: str
    other: str
    other_digest: str
    score: float
    """1 where `player` won, 0.5 after a draw, 0 where it lost."""


_COUNTS = "sum(score = 1), sum(score = 0.5), sum(score = 0)"
_LEFT = """
FROM games JOIN rollouts ON games.group_id = rollouts.group_id AND games.number = rollouts.number
WHERE step IS NOT NULL"""
"""Games count whose batch has left: what a killed process had begun is rolled out again, and counts once."""
_OF_ENV = f"""
SELECT player, other, {_COUNTS} {_LEFT} AND games.env = ? AND step BETWEEN ? AND ? GROUP BY 1, 2 ORDER BY 1, 2"""
BY_ENV = f"SELECT games.env, player, other, {_COUNTS} {_LEFT} GROUP BY 1, 2, 3 ORDER BY 1, 2, 3"
"""Query of the games of all environments, counted by pair."""
_COLUMNS = RolloutRow.__struct_fields__
_UPSERT = f"INSERT OR REPLACE INTO rollouts ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"
_NOW = "UPDATE rollouts SET changed_at = max(?, changed_at),"  # a clock may go back
_KEEP_STATE = "INSERT OR REPLACE INTO steps VALUES (?, ?, ?)"


def _identity(path: Path) -> tuple[int, int] | None:
    """Returns device and inode of a file, which stay its own whatever its name; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def kept_witness(components: bytes, presence_size: float, content_size: float, gap: float) -> KeptWitness:
    """Returns the record of a row of the ledger."""
    return KeptWitness(components=components, presence_size=presence_size, content_size=content_size, gap=gap)


def _compact(record: msgspec.Struct) -> str:
    """Returns the record as JSON without spaces: there is one for each step."""
    return msgspec.json.encode(record).decode()


class Ledger:
    """Rollouts are named `group/number`. States only ever advance, but for a run that goes back to a checkpoint."""

    def __init__(self, path: Path) -> None:
        """`path` of the database, which is created."""
        self.path = path
        self._database = sqlite3.connect(path, check_same_thread=False, timeout=BUSY_S)
        self._lock = threading.Lock()
        """Guards the database: other threads write to it."""
        try:
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.executescript(f"BEGIN; {_TABLES} COMMIT;")  # a reader sees all of them or none
            self._num_pairs: int = self._database.execute("SELECT coalesce(max(id), 0) FROM pairs").fetchone()[0]
        except sqlite3.Error as error:
            self._database.close()
            raise self._unusable(error) from error
        self._file = _identity(path)
        self._queue: deque[tuple[str, list[tuple[object, ...]]]] = deque()
        """Statements with their rows as they were when they were handed over, in order, whichever thread comes to write
        them."""
        self._open: dict[str, RolloutRow] = {}
        self._changed: dict[str, RolloutRow] = {}
        self._sampled_s: dict[tuple[int, float], float] = {}
        """When the last rollout was scored or dropped, by group and time of issue, since the last `sampled_s`."""
        self._asked_at = 0.0
        self._num_shipped: dict[int, int] = {}
        """Rollouts of steps that are not known to be trained."""
        self.num_issued = 0
        self.num_trained = 0
        self.num_dropped: Counter[str] = Counter()

    # --- fates ---

    def issued(
        self,
        group: int,
        *,
        num: int,
        env: str,
        example: int,
        version: int,
        epoch: int | None = None,
        first: int = 0,
    ) -> None:
        """A group of `num` rollouts, numbered from `first` on, is about to be sampled."""
        now = time.time()
        for number in range(first, first + num):
            rollout_id = f"{group}/{number}"
            self._open[rollout_id] = self._changed[rollout_id] = RolloutRow(
                group_id=group,
                number=number,
                env=env,
                example=example,
                epoch=epoch,
                version=version,
                issued_at=now,
                changed_at=now,
            )
        self.num_issued += num

    def scored(self, rollout_id: str, *, reward: float, num_tokens: int) -> None:
        """A rollout has its reward."""
        row = self._advance(rollout_id, "scored")
        row.reward, row.num_tokens = reward, num_tokens

    def played(self, games: Iterable["Game"]) -> None:
        """Games of a rollout that has its reward. They count once its batch has left."""
        rows = [msgspec.structs.astuple(game) for game in games]
        if rows:
            self._hand_over(f"INSERT OR REPLACE INTO games VALUES ({', '.join('?' * len(rows[0]))})", *rows)

    def games(self, env: str, *, first: int = 0, last: int) -> dict[tuple[str, str], tuple[int, int, int]]:
        """Returns how many games of an environment, in batches `first` to `last`, each player won, drew and lost, by
        (player, other)."""
        rows = self._read(_OF_ENV, env, first, last)
        return {(player, other): (won, drawn, lost) for player, other, won, drawn, lost in rows}

    def dropped(self, rollout_ids: Iterable[str], reason: str) -> None:
        """Rollouts are not trained."""
        for rollout_id in rollout_ids:
            self._advance(rollout_id, "dropped").reason = reason
            self.num_dropped[reason] += 1
            del self._open[rollout_id]

    def shipping(
        self, rollout_ids: Sequence[str], step: int, *, state: Mapping[str, Any], metrics: Mapping[str, float]
    ) -> Callable[[], None]:
        """Rollouts that are about to leave in batch `step`, and the `state` to go on from after it. The batch may leave
        once what is returned, a blocking call, has made this durable."""
        for rollout_id in rollout_ids:
            self._advance(rollout_id, "shipping").step = step
            del self._open[rollout_id]
        self._num_shipped[step] = len(rollout_ids)
        self._hand_over(_KEEP_STATE, (step, json.dumps(state), json.dumps(metrics)))
        return self._write

    def shipped(self, step: int) -> None:
        """Batch `step` has left for the trainer, which may have been quick to train it."""
        self._hand_over(f"{_NOW} state = 'shipped' WHERE step = ? AND state = 'shipping'", (time.time(), step))

    def trained(self, step: int) -> None:
        """The trainer has published the version that batch `step` gave."""
        update = f"{_NOW} state = 'trained' WHERE step = ? AND state != 'trained'"
        for one in [one for one in self._num_shipped if one <= step]:
            self.num_trained += self._num_shipped.pop(one)
            self._hand_over(update, (time.time(), one))

    def drop_unfinished(self, reason: str) -> None:
        """Whatever is not on its way to the trainer when a run ends."""
        self.dropped(list(self._open), reason)

    def span_s(self, rollout_ids: Iterable[str]) -> tuple[float, float]:
        """Returns when the first of these rollouts was issued and the last one scored. They must be scored, and not be
        about to leave."""
        rows = [self._open[rollout_id] for rollout_id in rollout_ids]
        return min(row.issued_at for row in rows), max(row.changed_at for row in rows)

    def sampled_s(self) -> list[tuple[float, float]]:
        """Returns when rollouts were sampled and scored, by group, since the last call; up to now where they still
        are."""
        now, since = time.time(), self._asked_at
        ended, self._sampled_s, self._asked_at = self._sampled_s, {}, now
        going_on = {(row.group_id, row.issued_at): now for row in self._open.values() if row.state == "issued"}
        times = [(max(since, issued_at), end) for (_, issued_at), end in (ended | going_on).items()]
        return [(start, end) for start, end in times if end > start]

    def _advance(self, rollout_id: str, state: str) -> RolloutRow:
        row = self._changed[rollout_id] = self._open[rollout_id]
        if row.state == "issued":
            self._sampled_s[row.group_id, row.issued_at] = time.time()
        row.state, row.changed_at = state, max(time.time(), row.changed_at)  # a clock may go back
        return row

    # --- preference pairs ---

    def pair_made(self, version: int, record: str) -> int:
        """A pair of which a turn of `version` is the rejected part, as JSON. Returns its number."""
        self._num_pairs += 1
        self._hand_over("INSERT INTO pairs VALUES (?, ?, NULL, ?)", (self._num_pairs, version, record))
        return self._num_pairs

    def pairs_taken(self, numbers: Iterable[int], step: int) -> None:
        """Pairs go with batch `step`, in whose transaction this is written."""
        self._hand_over("UPDATE pairs SET taken_step = ? WHERE id = ?", *((step, number) for number in numbers))

    def pairs_waiting(self, most: int) -> list[tuple[int, str]]:
        """Returns (number, JSON) of pairs that no batch has taken, newest versions first."""
        query = "SELECT id, record FROM pairs WHERE taken_step IS NULL ORDER BY version DESC, id DESC LIMIT ?"
        return self._read(query, most)

    # --- versions ---

    def proved(self, server: str, report: LoadReport) -> None:
        """A server has proved that it serves a version's snapshot: how far its log-probabilities of the canary are from
        the trainer's, in nats, and those of the base."""
        canary = report.canary
        gaps = (canary.max_abs, canary.mean_abs, canary.base_max_abs, canary.base_mean_abs)
        allowed = (canary.tolerance, canary.measure)
        row = (report.version, report.snapshot, server, *gaps, *allowed, time.time())
        self._hand_over(f"INSERT INTO proofs VALUES ({', '.join('?' * len(row))})", row)

    # --- receipts ---

    def expects(self, step: int, witness: ExpectedWitness) -> None:
        """Batch `step` is about to leave, in whose transaction this is written: the witness that its gradients must
        show."""
        self._hand_over("INSERT OR REPLACE INTO receipts (step, expected) VALUES (?, ?)", (step, _compact(witness)))

    def received(
        self,
        receipt: Receipt,
        *,
        finding: str | None = None,
        expected: ExpectedWitness | None = None,
        kept: KeptWitness | None = None,
    ) -> None:
        """The trainer's receipt of a step, and how its witness differs from the one that was expected, if it does.
        `expected`: the witness without the samples that the trainer dropped, if it did. `kept` takes the place of both
        witnesses, where they agree."""
        if kept is not None:
            receipt = msgspec.structs.replace(receipt, witness=None)
        self._hand_over(
            "INSERT INTO receipts (step, receipt, finding, expected, components, presence_size, content_size, gap) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET receipt = excluded.receipt, "
            "expected = iif(excluded.gap IS NULL, coalesce(excluded.expected, expected), NULL), "
            "components = coalesce(excluded.components, components), "
            "presence_size = coalesce(excluded.presence_size, presence_size), "
            "content_size = coalesce(excluded.content_size, content_size), gap = coalesce(excluded.gap, gap), "
            "finding = iif(excluded.finding IS NULL, NULL, coalesce(finding, excluded.finding))",  # the first knew more
            (
                receipt.step,
                _compact(receipt),
                finding,
                None if expected is None or kept is not None else _compact(expected),
                *((None,) * 4 if kept is None else (kept.components, kept.presence_size, kept.content_size, kept.gap)),
            ),
        )

    def kept(self, step: int) -> KeptWitness | None:
        """Returns what is kept of the witness that a step had before; None where it was not received, or did not
        agree."""
        query = "SELECT components, presence_size, content_size, gap FROM receipts WHERE step = ? AND gap IS NOT NULL"
        return next((kept_witness(*row) for row in self._read(query, step)), None)

    def expected(self, step: int) -> ExpectedWitness | None:
        """Returns the witness that the gradients of batch `step` must show; None where no batch of it has left, or
        where it was received and agreed. Raises CorruptError."""
        rows = self._read("SELECT expected FROM receipts WHERE step = ? AND expected IS NOT NULL", step)
        return ExpectedWitness.from_json(rows[0][0]) if rows else None

    # --- easy and hard examples ---

    def examples_moved(self, pools: Mapping[str, str], step: int) -> None:
        """Examples by key that are in another pool since batch `step`, in whose transaction this is written."""
        rows = ((key, step, pool) for key, pool in pools.items())
        self._hand_over("INSERT OR REPLACE INTO pools VALUES (?, ?, ?)", *rows)

    def pools(self) -> dict[str, str]:
        """Returns the pools of examples that were ever in another than the first, by key."""
        rows = self._read("SELECT example, pool, max(step) FROM pools GROUP BY example")
        return {example: pool for example, pool, _ in rows}

    # --- artifacts ---

    def artifact_changed(self, store: str, artifact_id: str, kept: tuple[float, str] | None) -> None:
        """An artifact has this weight and this data now, or is gone."""
        if kept is None:
            self._hand_over("DELETE FROM artifacts WHERE store = ? AND id = ?", (store, artifact_id))
        else:  # one that is there keeps its place among the others
            upsert = "INSERT INTO artifacts VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET weight = excluded.weight"
            self._hand_over(upsert, (store, artifact_id, *kept))

    def artifacts(self, store: str) -> list[tuple[str, float, str]]:
        """Returns (id, weight, data) of what a store holds, oldest first."""
        return self._read("SELECT id, weight, data FROM artifacts WHERE store = ? ORDER BY rowid", store)

    # --- the database ---

    def changes(self) -> Callable[[], None]:
        """Returns a blocking call that writes what has changed until now."""
        self._hand_over()
        return self._write

    def _hand_over(self, statement: str = "", *rows: tuple[object, ...]) -> None:
        """Rollouts as they are now, and then a statement with its rows."""
        values, self._changed = [msgspec.structs.astuple(row) for row in self._changed.values()], {}
        self._queue.extend([(_UPSERT, values)] if values else [])
        self._queue.extend([(statement, list(rows))] if rows else [])

    def _write(self) -> None:
        """Writes what is in the queue; what could not be written stays in it. Raises StorageError."""
        with self._lock:
            queue = list(self._queue)  # the event loop may add to it meanwhile
            durable = any(statement == _KEEP_STATE for statement, _ in queue)  # whoever comes to write it
            with self._transaction(durable=durable) as database:
                for statement, values in queue:
                    database.executemany(statement, values)
            for _ in queue:
                self._queue.popleft()
            if durable:
                self._check_file()

    def _check_file(self) -> None:
        """Raises StorageError where what is written goes to a file that nobody will find again."""
        if _identity(self.path) != self._file:
            raise StorageError(
                f"{self.path} was removed or replaced while the run was writing to it; put back what was there, with "
                "its -wal and -shm, and start the run again, or give a new run another output_dir"
            )

    def _read(self, query: str, *values: object) -> list[Any]:
        with self._lock:
            return self._database.execute(query, values).fetchall()

    @contextmanager
    def _transaction(self, *, durable: bool = False) -> Iterator[sqlite3.Connection]:
        """Commits at its end. Raises StorageError."""
        try:
            self._database.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            with self._database:
                yield self._database
        except sqlite3.Error as error:
            raise self._unusable(error) from error

    def _unusable(self, error: sqlite3.Error) -> StorageError:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            mend = f"make room in {self.path.parent}, and start the same command again"
        else:
            mend = (
                "let nobody else write to it, or, if it is damaged, put a copy of an earlier time there, with the "
                "files -wal and -shm of that time, and resume"
            )
        return StorageError(f"{self.path} cannot be used: {error}; {mend}")

    def close(self) -> None:
        """Writes the rest and closes the database."""
        try:
            self.changes()()
        finally:
            with self._lock:
                self._database.close()

    # --- going on with a run ---

    def is_empty(self) -> bool:
        """Whether no rollout was ever written down."""
        return not self._read("SELECT 1 FROM rollouts LIMIT 1")

    def in_batches(self) -> set[tuple[str, int, int]]:
        """Returns environment, number and epoch of the examples of which rollouts are in batches."""
        which = "step IS NOT NULL AND epoch IS NOT NULL"
        return set(self._read(f"SELECT DISTINCT env, example, epoch FROM rollouts WHERE {which}"))

    def state_after(self, step: int) -> Mapping[str, Any] | None:
        """Returns what was kept with batch `step`; None where nothing is."""
        rows = self._read("SELECT state FROM steps WHERE step = ?", step)
        return json.loads(rows[0][0]) if rows else None

    def newest_state(self) -> Mapping[str, Any] | None:
        """Returns what was kept with the newest batch; None without any."""
        rows = self._read("SELECT state FROM steps ORDER BY step DESC LIMIT 1")
        return json.loads(rows[0][0]) if rows else None

    def metrics(self) -> dict[int, dict[str, float]]:
        """Returns the metrics of the newest batches, by step."""
        rows = self._read("SELECT step, metrics FROM steps ORDER BY step DESC LIMIT ?", NUM_STATES)
        return {step: json.loads(metrics) for step, metrics in reversed(rows)}

    def forget(self, checkpoints: Sequence[int]) -> None:
        """Removes what no run looks for that goes on after one of `checkpoints`, ascending, or one of the newest
        batches."""
        old = f"DELETE FROM steps WHERE step <= (SELECT max(step) FROM steps) - {NUM_STATES} AND step < ?"
        others = f"{old} AND step NOT IN ({', '.join('?' * len(checkpoints))})"
        with self._lock, self._transaction() as database:
            database.execute(others, (checkpoints[-1], *checkpoints))

    def resume(self, step: int, *, count: bool = True) -> int:
        """Goes on after batch `step`, the newest that the trainer has or can have: rollouts that were open then and
        those of later batches are dropped, because their prompts are sampled again. Returns the next group's number.

        `count`: the totals include what earlier processes did.
        """
        with self._lock, self._transaction() as database:
            for state, reason, which in (
                ("dropped", RESTARTED, "state IN ('issued', 'scored') OR (state = 'shipping' AND step > :step)"),
                ("dropped", SUPERSEDED, "state IN ('shipped', 'trained') AND step > :step"),
                ("shipped", None, "state = 'shipping'"),
            ):
                of_step = "step" if reason is None else "NULL"
                fate = f"state = :state, reason = :reason, step = {of_step}, changed_at = max(:now, changed_at)"
                values = {"state": state, "reason": reason, "step": step, "now": time.time()}
                database.execute(f"UPDATE rollouts SET {fate} WHERE {which}", values)
            for table, column in (("steps", "step"), ("receipts", "step"), ("pools", "step"), ("pairs", "version")):
                database.execute(f"DELETE FROM {table} WHERE {column} > ?", (step,))
            database.execute("UPDATE pairs SET taken_step = NULL WHERE taken_step > ?", (step,))
        by_step = "SELECT step, count(*) FROM rollouts WHERE state = 'shipped' GROUP BY step"
        self._num_shipped = dict(self._read(by_step))
        [(newest, num)] = self._read("SELECT max(group_id), count(*) FROM rollouts")
        if count:
            self.num_issued = num
            [(self.num_trained,)] = self._read("SELECT count(*) FROM rollouts WHERE state = 'trained'")
            dropped = "SELECT reason, count(*) FROM rollouts WHERE state = 'dropped' GROUP BY reason"
            self.num_dropped = Counter(dict(self._read(dropped)))
        return 0 if newest is None else int(newest) + 1

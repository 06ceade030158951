"""Reads the ledger of a run, whether or not it is being written: for commands, the page, and its check."""

import json
import math
import os
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
from grpo.orchestrator.ledger import BY_ENV, LEDGER_FILE, STATES, RolloutRow, kept_witness
from grpo.orchestrator.ratings import Pairs
from grpo.transport.errors import CorruptError, UserError
from grpo.transport.receipts import ExpectedWitness, KeptWitness, Receipt

_BUSY_S = 5.0
_PROGRESS_STEPS = 10_000
_COLUMNS = RolloutRow.__struct_fields__
_IN_A_BATCH = "('shipping', 'shipped', 'trained')"
_FAULTS = {
    "is in an unknown state": f"state NOT IN {STATES}",
    "is dropped without a reason": "state = 'dropped' AND reason IS NULL",
    "has a reason but is not dropped": "state != 'dropped' AND reason IS NOT NULL",
    "is in a batch, but no step is named": f"state IN {_IN_A_BATCH} AND step IS NULL",
    "names a step, but is in no batch": f"state NOT IN {_IN_A_BATCH} AND step IS NOT NULL",
    "is in a batch without a reward": f"state IN {_IN_A_BATCH} AND reward IS NULL",
    "has changed before it was issued": "changed_at < issued_at - 1",
}
_SAME_IN_A_GROUP = ("env", "example", "version", "step")


class NoRollouts(UserError):
    """There is no ledger, or none that a rollout was ever in: the orchestrator has not begun."""


@contextmanager
def open_ledger(folder: Path, *, limit_s: float = math.inf) -> Iterator["LedgerReader"]:
    """Opens the ledger of the run in `folder` for reading. Queries that take longer than `limit_s` altogether raise
    sqlite3.OperationalError. Raises `NoRollouts` where there is no ledger, and `UserError` for one that is not of this
    release."""
    path = folder / LEDGER_FILE
    if not path.is_file():
        raise NoRollouts(f"{path}: no such file; give the output_dir of a run whose orchestrator has started")
    try:
        with open_database(path, limit_s=limit_s) as database:
            if database.execute("SELECT 1 FROM sqlite_master WHERE name = 'rollouts'").fetchone() is None:
                raise NoRollouts(f"{path} has no rollouts yet; the orchestrator has only begun")
            yield LedgerReader(database)
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError) and "no such column" not in str(error):
            raise
        raise UserError(f"{path} is not a ledger of this release: {error}") from error


@contextmanager
def open_database(path: Path, *, limit_s: float = math.inf) -> Iterator[sqlite3.Connection]:
    """Opens a database for reading, whether or not it is being written. Queries that take longer than `limit_s`
    altogether raise sqlite3.OperationalError."""
    with ExitStack() as stack:
        # Without a writer there is no write-ahead log, and then nothing need be created for reading.
        is_open = path.with_name(f"{path.name}-wal").exists()
        if is_open and not os.access(path.parent, os.W_OK):  # a copy of a run that has not ended
            path = _copied(path, Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="grpo-ledger-"))))
        mode = "mode=ro" if is_open else "mode=ro&immutable=1"
        database = sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, timeout=_BUSY_S)
        stack.callback(database.close)
        deadline_s = time.monotonic() + limit_s
        database.set_progress_handler(lambda: time.monotonic() > deadline_s, _PROGRESS_STEPS)
        yield database


def _copied(path: Path, to: Path) -> Path:
    """Copies a ledger with its write-ahead log to a folder in which the log's index can be made."""
    for file in path.parent.glob(f"{path.name}*"):
        if not file.name.endswith("-shm"):
            (to / file.name).write_bytes(file.read_bytes())
    return to / path.name


class LedgerReader:
    """Answers questions about the rollouts of a run. Each method is one query."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def _rows(self, query: str, *values: object) -> list[Any]:
        return self._database.execute(query, values).fetchall()

    def freeze(self) -> None:
        """Shows all later questions the ledger as it is now, whatever is written meanwhile."""
        self._database.execute("BEGIN")

    # --- receipts ---

    def receipts(self) -> dict[int, tuple[ExpectedWitness | None, Receipt | None]]:
        """Returns by step the witness that was expected and the trainer's receipt, None for what is not there yet.
        Raises `UserError` for a row that is damaged."""
        try:
            return {
                step: (
                    None if expected is None else ExpectedWitness.from_json(expected),
                    None if receipt is None else Receipt.from_json(receipt),
                )
                for step, expected, receipt in self._rows("SELECT step, expected, receipt FROM receipts ORDER BY step")
            }
        except CorruptError as error:
            raise UserError(f"{LEDGER_FILE} has a damaged receipt: {error}") from None

    def kept(self) -> dict[int, KeptWitness]:
        """Returns by step what is kept of the witnesses that agreed."""
        columns = "step, components, presence_size, content_size, gap"
        rows = self._rows(f"SELECT {columns} FROM receipts WHERE gap IS NOT NULL ORDER BY step")
        return {step: kept_witness(*values) for step, *values in rows}

    def findings(self) -> dict[int, str]:
        """Returns by step how the trainer's witness differed from the one that was expected, where it did, as it was
        found while the batch's samples were known."""
        return dict(self._rows("SELECT step, finding FROM receipts WHERE finding IS NOT NULL ORDER BY step"))

    # --- games ---

    def games(self) -> dict[str, Pairs]:
        """Returns games by environment, counted by (player, other); none in a ledger of an earlier release."""
        if not self._rows("SELECT 1 FROM sqlite_master WHERE name = 'games'"):
            return {}
        found: dict[str, dict[tuple[str, str], tuple[int, int, int]]] = {}
        for env, player, other, *counts in self._rows(BY_ENV):
            won, drawn, lost = counts
            found.setdefault(env, {})[player, other] = (won, drawn, lost)
        return dict(found)

    def newest_games(self, env: str, most: int) -> list[dict[str, Any]]:
        """Returns the newest games of an environment, with the step of their batch."""
        names = ("rollout", "step", "player", "other", "role", "other_role", "score", "digest", "other_digest")
        query = (
            "SELECT games.group_id || '/' || games.number || place, step, player, other, role, other_role, score, "
            "digest, other_digest FROM games JOIN rollouts ON games.group_id = rollouts.group_id AND games.number = "
            "rollouts.number WHERE step IS NOT NULL AND games.env = ? ORDER BY games.group_id DESC, 1 LIMIT ?"
        )
        return [dict(zip(names, row, strict=True)) for row in self._rows(query, env, most)]

    # --- fates ---

    def rollouts(self, **which: str | int) -> list[RolloutRow]:
        """Returns the rollouts of which these columns have these values, by group and number. Raises `UserError` for a
        row that is damaged. Example: ``ledger.rollouts(group_id=17, number=3)``"""
        where = " AND ".join(f"{column} = ?" for column in which)
        rows = self._rows(
            f"SELECT {', '.join(_COLUMNS)} FROM rollouts WHERE {where} ORDER BY group_id, number", *which.values()
        )
        try:
            return [msgspec.convert(dict(zip(_COLUMNS, row, strict=True)), RolloutRow) for row in rows]
        except msgspec.ValidationError as error:
            raise UserError(f"{LEDGER_FILE} has a damaged row among its rollouts: {error}") from None

    def fates(self) -> Counter[tuple[str, str | None]]:
        """Returns the number of rollouts by state and reason. Those that are trained, most of them, are not grouped: to
        sort a million rows takes a second."""
        query = "SELECT state, reason, COUNT(*) FROM rollouts WHERE state != 'trained' GROUP BY 1, 2"
        others = Counter({(str(state), reason): num for state, reason, num in self._rows(query)})
        [(num,)] = self._rows("SELECT COUNT(*) FROM rollouts")
        return others + Counter({("trained", None): num - others.total()})

    def num_groups(self) -> int:
        """Returns the number of groups."""
        return int(self._rows("SELECT COUNT(DISTINCT group_id) FROM rollouts")[0][0])

    def steps(self) -> dict[int, bool]:
        """Returns each step that has rollouts, and whether all of them are trained."""
        query = "SELECT step, MIN(state = 'trained') FROM rollouts WHERE step IS NOT NULL GROUP BY step"
        return {step: bool(trained) for step, trained in self._rows(query)}

    def newest_step(self, *, has_left: bool = False) -> int | None:
        """Returns the newest step with rollouts, where `has_left` is set the newest that has left for the trainer."""
        which = "step IS NOT NULL" + (" AND state != 'shipping'" if has_left else "")
        rows = self._rows(f"SELECT step FROM rollouts WHERE {which} ORDER BY step DESC LIMIT 1")
        return int(rows[0][0]) if rows else None

    def ids_of(self, step: int) -> set[str]:
        """Returns the ids of a step's rollouts."""
        return {one for (one,) in self._rows("SELECT id FROM rollouts WHERE step = ?", step)}

    def steps_of(self, env: str, example: int) -> set[int]:
        """Returns the steps that an example was in."""
        query = "SELECT DISTINCT step FROM rollouts WHERE env = ? AND example = ? AND step IS NOT NULL"
        return {step for (step,) in self._rows(query, env, example)}

    def scored(self) -> dict[int, tuple[int, float]]:
        """Returns the number of scored rollouts in the groups of each step, those that filters dropped included, and
        their mean reward."""
        groups = (
            "SELECT MAX(step) AS step, COUNT(reward) AS num, SUM(reward) AS rewards FROM rollouts GROUP BY group_id"
        )
        query = f"SELECT step, SUM(num), SUM(rewards) / SUM(num) FROM ({groups}) WHERE step IS NOT NULL GROUP BY step"
        return {step: (num, reward) for step, num, reward in self._rows(query)}

    def trained_versions(self) -> dict[int, int]:
        """Returns the number of trained rollouts by the version that they were sampled under."""
        return dict(self._rows("SELECT version, COUNT(*) FROM rollouts WHERE state = 'trained' GROUP BY version"))

    # --- what must not be ---

    def faults(self) -> Iterator[tuple[str, str, str]]:
        """Yields id, state and fault of each rollout whose columns contradict each other."""
        faults = [f"({where})" for where in _FAULTS.values()]
        query = f"SELECT id, state, {', '.join(faults)} FROM rollouts WHERE {' OR '.join(faults)}"
        for rollout, state, *found in self._rows(query):
            yield from ((rollout, state, fault) for fault, is_so in zip(_FAULTS, found, strict=True) if is_so)

    def mixed_groups(self) -> Iterator[tuple[int, str]]:
        """Yields number and column of each group whose rollouts differ in what a group has in common."""
        differs = [f"MIN({column}) != MAX({column})" for column in _SAME_IN_A_GROUP]
        query = f"SELECT group_id, {', '.join(differs)} FROM rollouts GROUP BY group_id HAVING {' OR '.join(differs)}"
        for group, *found in self._rows(query):
            yield from ((group, column) for column, is_so in zip(_SAME_IN_A_GROUP, found, strict=True) if is_so)

    def asked_again(self) -> list[tuple[str, int, int, int]]:
        """Returns environment, number, epoch and number of groups of the examples that are in batches by more than one
        group of an epoch."""
        which = "step IS NOT NULL AND epoch IS NOT NULL"
        query = f"SELECT env, example, epoch, COUNT(DISTINCT group_id) AS num FROM rollouts WHERE {which}"
        return self._rows(f"{query} GROUP BY 1, 2, 3 HAVING num > 1 ORDER BY 1, 3, 2")

    def lagging(self, limit: int | None) -> list[tuple[str, int, int]]:
        """Returns id, step and lag of the rollouts whose lag is below 0 or above `limit`."""
        query = "SELECT id, step, step - 1 - version AS lag FROM rollouts WHERE lag < 0 OR lag > ?"
        return self._rows(query, 2**62 if limit is None else limit)

    def unfinished(self) -> list[tuple[str, str]]:
        """Returns id and state of the rollouts that are neither trained nor dropped."""
        return self._rows("SELECT id, state FROM rollouts WHERE state NOT IN ('trained', 'dropped')")

    # --- versions and pairs ---

    def proofs(self) -> list[dict[str, Any]]:
        """Returns the canary's figures of each proof, by version and server; a version that was published again with
        other files is there with several snapshots. `measure` names the figure that the tolerance is for."""
        figures = ("max_abs", "mean_abs", "base_max_abs", "base_mean_abs", "tolerance", "measure")
        names = ("version", "snapshot", "server", *figures)
        rows = self._rows(f"SELECT {', '.join(names)} FROM proofs ORDER BY version, server")
        return [dict(zip(names, row, strict=True)) for row in rows]

    def pairs(self) -> list[str]:
        """Returns all preference pairs as JSON, by number."""
        return [record for (record,) in self._rows("SELECT record FROM pairs ORDER BY id")]

    def pairs_of(self, rollout: str) -> list[dict[str, Any]]:
        """Returns the preference pairs whose rejected part is of a rollout."""
        rows = self._rows("SELECT record FROM pairs WHERE record ->> 'rollout_id' = ?", rollout)
        return [json.loads(record) for (record,) in rows]

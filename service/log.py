"""The durable log of commands, in SQLite: what was asked, in which order, and what was answered.

A command is answered from here when a client asks again, and computed again from here after the service was killed. A
request's id is that of whom it addresses and its number there, so that asking twice is asking once.
"""

import hashlib
import json
import queue
import sqlite3
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

from grpo.service.errors import LogFailed, Refused

_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions(session TEXT PRIMARY KEY, tenant TEXT, heard_at REAL);
CREATE TABLE IF NOT EXISTS models(model TEXT PRIMARY KEY, session TEXT, tenant TEXT, config TEXT, created_at REAL);
CREATE TABLE IF NOT EXISTS checkpoints(
    path TEXT PRIMARY KEY, model TEXT, tenant TEXT, bytes INTEGER, created_at REAL, expires_at REAL, metadata TEXT);
CREATE TABLE IF NOT EXISTS samplers(
    sampler TEXT PRIMARY KEY, tenant TEXT, model_path TEXT, version INTEGER, clones INTEGER DEFAULT 0);
CREATE TABLE IF NOT EXISTS versions(version INTEGER PRIMARY KEY AUTOINCREMENT, model TEXT, path TEXT, seq INTEGER);
CREATE TABLE IF NOT EXISTS canaries(version INTEGER, at REAL, report TEXT);
CREATE TABLE IF NOT EXISTS samples(tokens BLOB, logprobs BLOB, num_tokens INTEGER, version INTEGER);
CREATE INDEX IF NOT EXISTS samples_by_tokens ON samples(tokens);
CREATE TABLE IF NOT EXISTS commands(
    target TEXT, seq INTEGER, tenant TEXT, kind TEXT, body BLOB, digest BLOB,
    state TEXT DEFAULT 'waiting', answer BLOB, ended INTEGER, PRIMARY KEY(target, seq));
CREATE INDEX IF NOT EXISTS waiting ON commands(tenant) WHERE state='waiting';
CREATE INDEX IF NOT EXISTS ends ON commands(target, ended);
CREATE TABLE IF NOT EXISTS datums(
    target TEXT, seq INTEGER, forward_only INTEGER, lengths BLOB, digests BLOB, PRIMARY KEY(target, seq));
CREATE TABLE IF NOT EXISTS steps(
    target TEXT, seq INTEGER, step INTEGER, at REAL, metrics TEXT, expected TEXT, receipt TEXT,
    PRIMARY KEY(target, seq));
"""
DIGEST_BYTES = 16
SESSION_S = 3600.0
"""A session that was not heard for so long has ended."""
CLONE = 10**9
"""Numbers that each copy of a sampling session has for its requests."""


_Write = tuple[Callable[[sqlite3.Connection], Any], Future[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One request that is answered by a future. Example: ``Command(target="3f…:train:0", seq=4, kind="optim_step")``"""

    target: str
    """The model or sampling session that it addresses."""
    seq: int
    """Its number there."""
    tenant: str
    kind: str
    body: bytes
    """The request as it came, decompressed; empty once nothing can need it any more."""

    @property
    def request_id(self) -> str:
        """The future's name."""
        return f"{self.target}:{self.seq}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """The datums of a request as they came, before anybody reads them."""

    forward_only: bool
    lengths: Sequence[int]
    """Tokens of each."""
    digests: Sequence[bytes]
    """Of each one's tokens, `tokens_digest`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A sequence that a server has sampled."""

    tokens: bytes
    """`tokens_digest` of the prompt and the answer."""
    logprobs: bytes
    """Digest of the answer's log-probabilities."""
    num_tokens: int
    """Of the answer."""
    version: int | None
    """The version that sampled it; None for the base."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """The end of an `optim_step` that has used up its gradients."""

    step: int | None
    """The model's number of the step, from 1; None where the gradients were dropped."""
    metrics: str = "{}"
    expected: str = ""
    """`ExpectedWitness` as JSON."""
    receipt: str = ""
    """`Receipt` as JSON."""


def tokens_digest(token_ids: bytes) -> bytes:
    """Returns the digest of a sequence's token ids, which are 32-bit integers, little-endian."""
    return hashlib.blake2b(token_ids, digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A future's end. `state` is `done` with JSON, `proto` with protobuf, `failed` with the person's error, or `broken`
    with one of the service's own."""

    state: str
    content: bytes


class CheckpointRow(NamedTuple):
    """A checkpoint; times on the wall clock in seconds."""

    path: str
    num_bytes: int
    created_at: float
    expires_at: float | None
    metadata: str
    """JSON of the tenant's own."""


class CommandLog:
    """One SQLite file, written through before a command is acknowledged. Threads may share it.

    Commands and their ends are written by a thread of the log's own, all that have come meanwhile in one transaction:
    a disk takes milliseconds for each, however much is in it.
    """

    def __init__(self, path: Path) -> None:
        """Raises `LogFailed`, as do all methods that write, from the first one on that could not: what follows it must
        not be there without it."""
        self._lock, self._read_lock = threading.RLock(), threading.Lock()
        self._path, self._failure = path, cast("LogFailed | None", None)
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._db.executescript(f"PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; {_SCHEMA}")
        except sqlite3.Error as error:
            raise LogFailed(path, error) from error
        self._reader = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        [(self._num_ended,)] = self._rows("SELECT coalesce(max(ended), 0) FROM commands")
        """Numbers the ends of commands."""
        self._to_write: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write_all, name="command log", daemon=True)
        self._writer.start()

    def close(self) -> None:
        """Writes what was handed over, and closes the file."""
        self._to_write.put(None)
        self._writer.join()
        with self._read_lock:  # a connection that is closed while it reads ends the process
            self._reader.close()
        with self._lock:
            self._db.close()

    def _written(self, work: Callable[[sqlite3.Connection], Any]) -> Future[Any]:
        """Returns what `work` returns, or its `Refused`, once it is on the disk."""
        future: Future[Any] = Future()
        self._to_write.put((work, future))
        return future

    def _write_all(self) -> None:
        """The loop that writes. Consumes what `_written` hands over, and waits for it. Ends when the log is closed."""
        closing = False
        while not closing:
            handed_over = [self._to_write.get()]
            while not self._to_write.empty():
                handed_over.append(self._to_write.get())
            closing = None in handed_over
            self._write([one for one in handed_over if one is not None and one[1].set_running_or_notify_cancel()])

    def _write(self, together: "Sequence[_Write]") -> None:
        ends: list[Callable[[], None]] = []
        try:
            with self._transaction() as db:
                for work, future in together:
                    try:
                        ends.append(partial(future.set_result, work(db)))
                    except Refused as error:
                        ends.append(partial(future.set_exception, error))
        except Exception as error:  # whoever has handed it over is told
            ends = [partial(future.set_exception, error) for _, future in together]
        for end in ends:
            end()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self.check()
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield self._db
                self._db.execute("COMMIT")
            except BaseException as error:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                if not isinstance(error, sqlite3.OperationalError):
                    raise
                self._failure = LogFailed(self._path, error)
                raise self._failure from error

    def check(self) -> None:
        """Raises `LogFailed` if something could not be written."""
        if self._failure is not None:
            raise self._failure

    def _rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._read_lock:
            return self._reader.execute(query, values).fetchall()

    # --- commands ---

    def add(self, command: Command, received: Received | None = None) -> Future[bool]:
        """Adds a command, with its datums where it has any; the result is False where it is there already. Raises
        `Refused` where another one has its number."""
        digest = hashlib.sha256(command.kind.encode() + b"\0" + command.body).digest()
        where = (command.target, command.seq)

        def work(db: sqlite3.Connection) -> bool:
            found = db.execute("SELECT digest FROM commands WHERE target=? AND seq=?", where).fetchone()
            if found is None:
                row = (*where, command.tenant, command.kind, command.body, digest)
                db.execute("INSERT INTO commands(target, seq, tenant, kind, body, digest) VALUES (?,?,?,?,?,?)", row)
                if received is not None:
                    lengths = array("i", received.lengths).tobytes()
                    datums = (*where, received.forward_only, lengths, b"".join(received.digests))
                    db.execute("INSERT INTO datums VALUES (?,?,?,?,?)", datums)
            elif found[0] != digest:
                raise Refused(f"seq_id {command.seq} of {command.target} is another command already; count on from it")
            return found is None

        return self._written(work)

    def finish(
        self,
        command: Command,
        answer: Answer,
        *,
        checkpoint: tuple[str, int] | None = None,
        step: StepRow | None = None,
        samples: Sequence[Sample] = (),
    ) -> Future[None]:
        """Records the end of a command, with the `checkpoint` (path and bytes) that it has written, the `step` that it
        was, and the `samples` in its answer."""

        def work(db: sqlite3.Connection) -> None:
            self._num_ended += 1
            db.execute(
                "UPDATE commands SET state=?, answer=?, ended=? WHERE target=? AND seq=?",
                (answer.state, answer.content, self._num_ended, command.target, command.seq),
            )
            if checkpoint is not None:
                now, asked = time.time(), json.loads(command.body)
                ttl_s, metadata = asked.get("ttl_seconds"), json.dumps(asked.get("user_metadata"))
                expires_at = None if ttl_s is None else now + ttl_s
                row = (checkpoint[0], command.target, command.tenant, checkpoint[1], now, expires_at, metadata)
                db.execute("INSERT OR REPLACE INTO checkpoints VALUES (?,?,?,?,?,?,?)", row)
            if step is not None:
                about = (step.step, time.time(), step.metrics, step.expected, step.receipt)
                db.execute("INSERT INTO steps VALUES (?,?,?,?,?,?,?)", (command.target, command.seq, *about))
            rows = [(one.tokens, one.logprobs, one.num_tokens, one.version) for one in samples]
            db.executemany("INSERT INTO samples VALUES (?,?,?,?)", rows)

        return self._written(work)

    def answer(self, request_id: str, tenant: str) -> Answer | None:
        """Returns the end of a request of this tenant; None while it waits. Raises `Refused` for one that it has not
        made."""
        _, state, content = self._request(request_id, tenant)
        return None if state == "waiting" else Answer(state=state, content=content)

    def command(self, request_id: str, tenant: str) -> Command:
        """Returns a request of this tenant, without its body. Raises `Refused` for one that it has not made."""
        target, _, seq = request_id.rpartition(":")
        kind, _, _ = self._request(request_id, tenant)
        return Command(target=target, seq=int(seq), tenant=tenant, kind=kind, body=b"")

    def _request(self, request_id: str, tenant: str) -> tuple[str, str, bytes]:
        target, _, seq = request_id.rpartition(":")
        query = "SELECT kind, state, answer FROM commands WHERE target=? AND seq=? AND tenant=?"
        number = int(seq) if seq.isascii() and seq.isdecimal() and len(seq) < 19 else -1
        if not (rows := self._rows(query, target, number, tenant)):
            raise Refused(f"request_id is {request_id!r:.120}, and no such request was made", status=404)
        kind, state, content = rows[0]
        return kind, state, content

    def ends(self, target: str, *, clone: int, after: int) -> list[tuple[str, str, int, int]]:
        """Returns id, state, bytes of the answer and number of the ends after this number, at most 1,000, the oldest
        first, of the requests of one copy of a sampling session."""
        query = (
            "SELECT seq, state, length(answer), ended FROM commands WHERE target=? AND ended>? AND seq>=? AND seq<? "
            "ORDER BY ended LIMIT 1000"
        )
        rows = self._rows(query, target, after, clone * CLONE, (clone + 1) * CLONE)
        return [(f"{target}:{seq}", state, size, number) for seq, state, size, number in rows]

    def commands(self, target: str, *, after: int = -1) -> list[tuple[Command, str]]:
        """Returns the target's commands with higher numbers than `after` and their states, in order."""
        query = "SELECT target, seq, tenant, kind, body, state FROM commands WHERE target=? AND seq>? ORDER BY seq"
        return [
            (Command(target=t, seq=seq, tenant=tenant, kind=kind, body=body), state)
            for t, seq, tenant, kind, body, state in self._rows(query, target, after)
        ]

    def num_waiting(self, tenant: str) -> tuple[int, int]:
        """Returns how many datums and bytes of the tenant's requests wait."""
        query = "SELECT sum(length(lengths)), sum(length(body)) FROM commands LEFT JOIN datums USING(target, seq)"
        ((lengths, size),) = self._rows(f"{query} WHERE tenant=? AND state='waiting'", tenant)
        return (lengths or 0) // 4, size or 0

    def forget_bodies(self, target: str, *, up_to: int) -> None:
        """Empties the bodies of the target's commands up to this number, which a checkpoint has made superfluous."""
        with self._transaction() as db:
            db.execute("UPDATE commands SET body=x'' WHERE target=? AND seq<=? AND body<>x''", (target, up_to))

    # --- sessions, models, checkpoints, samplers ---

    def add_session(self, session: str, tenant: str) -> None:
        """Adds a session."""
        with self._transaction() as db:
            db.execute("INSERT INTO sessions VALUES (?,?,?)", (session, tenant, time.time()))

    def heard(self, session: str, tenant: str) -> None:
        """Records that a session lives. Raises `Refused` for one that is finished, or that the tenant does not
        have."""
        with self._transaction() as db:
            where = (session, tenant)
            found = db.execute("SELECT heard_at FROM sessions WHERE session=? AND tenant=?", where).fetchone()
            if found is None:
                raise Refused(f"session_id is {session!r:.80}, and there is no such session", status=404)
            if not found[0]:
                raise Refused(f"session {session} is finished", status=410)
            db.execute("UPDATE sessions SET heard_at=? WHERE session=?", (time.time(), session))

    def finish_session(self, session: str, tenant: str) -> None:
        """Records that a session makes no more models. One that is finished stays so."""
        with self._transaction() as db:
            if not db.execute(
                "UPDATE sessions SET heard_at=0 WHERE session=? AND tenant=?", (session, tenant)
            ).rowcount:
                raise Refused(f"session_id is {session!r:.80}, and there is no such session", status=404)

    def add_model(self, model: str, session: str, tenant: str, config: dict[str, Any]) -> None:
        """Adds a model, unless it is there already."""
        with self._transaction() as db:
            row = (model, session, tenant, json.dumps(config), time.time())
            db.execute("INSERT OR IGNORE INTO models VALUES (?,?,?,?,?)", row)

    def models(self, tenant: str | None = None) -> dict[str, dict[str, Any]]:
        """Returns the configurations of a tenant's models, of all for None, the oldest first."""
        rows = self._rows("SELECT model, config FROM models WHERE ? IS NULL OR tenant=? ORDER BY rowid", tenant, tenant)
        return {model: json.loads(config) for model, config in rows}

    def model(self, model: str, tenant: str) -> dict[str, Any]:
        """Returns a model's configuration. Raises `Refused` for one that the tenant does not have."""
        if not (rows := self._rows("SELECT config FROM models WHERE model=? AND tenant=?", model, tenant)):
            raise Refused(f"model_id is {model!r:.120}, and there is no such model", status=404)
        config: dict[str, Any] = json.loads(rows[0][0])
        return config

    def unload(self, model: str, tenant: str) -> int:
        """Records that a model takes no more commands, and returns the number of the command that ends it, which is the
        same when asked again. Raises `Refused` for one that the tenant does not have."""
        with self._transaction() as db:
            config = self.model(model, tenant)
            if "unloaded" not in config:
                query = "SELECT coalesce(max(seq), -1) + 1 FROM commands WHERE target=?"
                config["unloaded"] = db.execute(query, (model,)).fetchone()[0]
                db.execute("UPDATE models SET config=? WHERE model=?", (json.dumps(config), model))
            return int(config["unloaded"])

    def tenants_of_models(self) -> dict[str, str]:
        """Returns the tenant of each model, the oldest first."""
        return dict(self._rows("SELECT model, tenant FROM models ORDER BY rowid"))

    def created_at(self, model: str) -> float:
        """Returns when a model was made, on the wall clock in seconds."""
        return float(self._rows("SELECT created_at FROM models WHERE model=?", model)[0][0])

    def num_open_models(self, tenant: str, *, heard_since: float) -> int:
        """Returns how many models the tenant has in sessions that were heard since."""
        query = (
            "SELECT count(*) FROM models JOIN sessions USING(session) WHERE models.tenant=? AND heard_at>=? "
            "AND json_extract(config, '$.unloaded') IS NULL"
        )
        return int(self._rows(query, tenant, heard_since)[0][0])

    def sessions(self, tenant: str, *, heard_since: float = 0.0) -> list[str]:
        """Returns a tenant's sessions that were heard since, the newest first."""
        query = "SELECT session FROM sessions WHERE tenant=? AND heard_at>=? ORDER BY rowid DESC"
        return [session for (session,) in self._rows(query, tenant, heard_since)]

    def checkpoints(self, tenant: str, model: str | None = None) -> list[CheckpointRow]:
        """Returns a tenant's checkpoints, of this model where one is named, the oldest first; none of models that the
        tenant has not made itself."""
        query = (
            "SELECT path, bytes, created_at, expires_at, metadata FROM checkpoints WHERE tenant=? "
            "AND (? IS NULL OR model=?) AND coalesce(expires_at > ?, true) AND model IN (SELECT model FROM models) "
            "ORDER BY rowid"
        )
        return [CheckpointRow(*row) for row in self._rows(query, tenant, model, model, time.time())]

    def has_checkpoint(self, path: str, tenant: str) -> bool:
        """Returns whether the tenant has a checkpoint of this path."""
        query = "SELECT 1 FROM checkpoints WHERE path=? AND tenant=? AND coalesce(expires_at > ?, true)"
        return bool(self._rows(query, path, tenant, time.time()))

    def expire(self, path: str, *, at: float | None) -> None:
        """Records when a checkpoint is to be removed, on the wall clock in seconds; None: never."""
        with self._transaction() as db:
            db.execute("UPDATE checkpoints SET expires_at=? WHERE path=?", (at, path))

    def expired(self) -> list[str]:
        """Returns the paths of the checkpoints that are to be removed."""
        return [path for (path,) in self._rows("SELECT path FROM checkpoints WHERE expires_at<=?", time.time())]

    def forget_checkpoint(self, path: str) -> None:
        """Removes a checkpoint's row, whose files are gone."""
        with self._transaction() as db:
            db.execute("DELETE FROM checkpoints WHERE path=?", (path,))

    def new_version(self, command: Command, path: str) -> int:
        """Returns the number of the next version that servers are given, and records of which model it is, before which
        of its commands."""
        with self._transaction() as db:
            query = "INSERT INTO versions(model, path, seq) VALUES (?,?,?)"
            return int(db.execute(query, (command.target, path, command.seq)).lastrowid or 0)

    def add_canary(self, version: int, report: str) -> None:
        """Records that a server has proved a version, by its `LoadReport` as JSON."""
        with self._transaction() as db:
            db.execute("INSERT INTO canaries VALUES (?,?,?)", (version, time.time(), report))

    # --- steps and samples ---

    def steps(self, target: str) -> list[tuple[int, int, float, str]]:
        """Returns number, `seq`, time and metrics of the model's steps, in order."""
        query = "SELECT step, seq, at, metrics FROM steps WHERE target=? AND step IS NOT NULL ORDER BY seq"
        return [(step, seq, at, metrics) for step, seq, at, metrics in self._rows(query, target)]

    def last_step(self, target: str, *, seq: int | None = None) -> tuple[int, float] | None:
        """Returns number and time of the model's newest step, or of that which the command `seq` was."""
        query = (
            "SELECT step, at FROM steps WHERE target=? AND step IS NOT NULL AND (? IS NULL OR seq=?) "
            "ORDER BY seq DESC LIMIT 1"
        )
        rows = self._rows(query, target, seq, seq)
        return (int(rows[0][0]), float(rows[0][1])) if rows else None

    def dropped(self, target: str) -> set[int]:
        """Returns the numbers of the model's `optim_step`s that have dropped their gradients."""
        return {seq for (seq,) in self._rows("SELECT seq FROM steps WHERE target=? AND step IS NULL", target)}

    def sample(self, tokens: bytes, target: str) -> list[Sample]:
        """Returns what was sampled with these tokens (`tokens_digest`), a model's own first, then the newest."""
        query = (
            "SELECT tokens, logprobs, num_tokens, version FROM samples LEFT JOIN versions USING(version) "
            "WHERE tokens=? ORDER BY model IS ? DESC, samples.rowid DESC"
        )
        rows = self._rows(query, tokens, target)
        return [Sample(tokens=t, logprobs=p, num_tokens=n, version=v) for t, p, n, v in rows]

    def sampled(self, target: str, seq: int) -> list[tuple[str, bytes, bytes, int]]:
        """Returns id, request, answer and version of what was sampled from the model's 64 newest snapshots between its
        step that is the command `seq` and the step before, the newest 1,000 requests at most."""
        before = "SELECT max(ended) FROM steps JOIN commands USING(target, seq) WHERE target=? AND seq<? AND step>0"
        query = (
            "SELECT commands.target || ':' || commands.seq, body, answer, version FROM "
            "(SELECT version FROM versions WHERE model=? ORDER BY version DESC LIMIT 64) JOIN samplers USING(version) "
            f"JOIN commands ON target=sampler WHERE state='proto' AND ended>coalesce(({before}), 0) "
            "AND ended<coalesce((SELECT ended FROM commands WHERE target=? AND seq=?), 9e18) "
            "ORDER BY ended DESC LIMIT 1000"
        )
        return [(i, b, a, v) for i, b, a, v in self._rows(query, target, target, seq, target, seq)][::-1]

    def lag(self, version: int, target: str, seq: int) -> int | None:
        """Returns how often the model's weights have changed between a version and its command `seq`; None where the
        version is of another model."""
        rows = self._rows("SELECT model, seq FROM versions WHERE version=?", version)
        if not rows or rows[0][0] != target:
            return None
        query = (
            "SELECT count(*) FROM commands LEFT JOIN steps USING(target, seq) WHERE target=? AND seq>? AND seq<? "
            "AND (step IS NOT NULL OR (kind='load_weights' AND state='done'))"
        )
        return int(self._rows(query, target, *sorted((rows[0][1], seq)))[0][0])

    def canary(self, version: int) -> str | None:
        """Returns the newest `LoadReport` of a version as JSON."""
        rows = self._rows("SELECT report FROM canaries WHERE version=? ORDER BY rowid DESC LIMIT 1", version)
        return rows[0][0] if rows else None

    def version_of(self, path: str) -> int | None:
        """Returns the newest version that was published under this path."""
        rows = self._rows("SELECT max(version) FROM versions WHERE path=?", path)
        return None if rows[0][0] is None else int(rows[0][0])

    def pins(self, *, heard_since: float) -> dict[int, dict[str, int]]:
        """Returns how many of whom need each version that is needed: checkpoints, sampling sessions of sessions that
        were heard since and are not finished, and commands that have not ended."""
        query = """
            SELECT version, 'checkpoint' FROM versions JOIN checkpoints USING(path)
            UNION ALL SELECT version, 'session' FROM samplers JOIN sessions
                ON session = substr(sampler, 1, instr(sampler, ':') - 1) WHERE version IS NOT NULL AND heard_at >= ?
            UNION ALL SELECT (SELECT max(version) FROM versions JOIN canaries USING(version) WHERE path = model_path),
                'session' FROM samplers JOIN sessions ON session = substr(sampler, 1, instr(sampler, ':') - 1)
                WHERE version IS NULL AND model_path IS NOT NULL AND heard_at >= ?
            UNION ALL SELECT version, 'command' FROM versions JOIN commands
                ON commands.target = versions.model AND commands.seq = versions.seq WHERE state = 'waiting'"""
        found: dict[int, dict[str, int]] = {}
        for version, by in self._rows(query, heard_since, heard_since):
            if version is not None:  # as of an inflight session before the first proof
                of_version = found.setdefault(version, {})
                of_version[by] = of_version.get(by, 0) + 1
        return found

    def add_sampler(self, sampler: str, tenant: str, model_path: str | None, version: int | None) -> None:
        """Adds a sampling session of a version, unless it is there already. None is the base model, or, with a path,
        the newest version of this path that servers have."""
        with self._transaction() as db:
            row = (sampler, tenant, model_path, version)
            db.execute("INSERT OR IGNORE INTO samplers(sampler, tenant, model_path, version) VALUES (?,?,?,?)", row)

    def join_sampler(self, sampler: str, tenant: str) -> int:
        """Returns the number of one more copy of a sampling session, from 1. Raises `Refused` for one that the tenant
        does not have."""
        self.sampler(sampler, tenant)
        with self._transaction() as db:
            query = "UPDATE samplers SET clones=clones+1 WHERE sampler=? RETURNING clones"
            return int(db.execute(query, (sampler,)).fetchone()[0])

    def sampler(self, sampler: str, tenant: str) -> tuple[str | None, int | None]:
        """Returns path and version of a sampling session. Raises `Refused` for one that the tenant does not have."""
        newest = "SELECT max(version) FROM versions JOIN canaries USING(version) WHERE path = model_path"
        query = f"SELECT model_path, coalesce(version, ({newest})) FROM samplers WHERE sampler=? AND tenant=?"
        if not (rows := self._rows(query, sampler, tenant)):
            raise Refused(f"sampling_session_id is {sampler!r:.120}, and there is no such session", status=404)
        return rows[0][0], rows[0][1]

    def samplers(self, tenant: str, session: str) -> list[str]:
        """Returns the sampling sessions of a tenant's session, the oldest first."""
        query = "SELECT sampler FROM samplers WHERE tenant=? AND sampler GLOB ? ORDER BY rowid"
        return [sampler for (sampler,) in self._rows(query, tenant, f"{session}:*")]

    def waiting(self, kinds: Sequence[str]) -> list[Command]:
        """Returns the commands of these kinds that wait, the oldest first."""
        marks = ",".join("?" * len(kinds))
        query = f"SELECT target, seq, tenant, kind, body FROM commands WHERE state='waiting' AND kind IN ({marks})"
        rows = self._rows(f"{query} ORDER BY rowid", *kinds)
        return [Command(target=t, seq=s, tenant=n, kind=k, body=b) for t, s, n, k, b in rows]

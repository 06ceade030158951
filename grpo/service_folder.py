"""Reads the folder of a training service: its tenants' models, what became of every datum, its steps and snapshots.

Everything comes from the log of commands. `models/NAME` in it is a run of its own for the commands that look at runs.
"""

import json
import math
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from sqlite3 import Connection
from typing import Any, Literal

import msgspec

from grpo.orchestrator.ledger_reader import open_database
from grpo.run_files import read_run
from grpo.transport.errors import UserError
from grpo.transport.http import LoadReport
from grpo.transport.receipts import ExpectedWitness, Receipt
from grpo.transport.run import RUN_FILE, RunFile

COMMANDS_FILE = "commands.sqlite"
MODELS = "models"
SERVICE: Literal["service"] = "service"
_DIGEST_BYTES = 16
FATES = ("trained", "computed", "refused", "dropped", "waiting", "ended")


class Datum(msgspec.Struct, frozen=True, kw_only=True):
    """One datum that was received."""

    id: str
    """Number of its request, and its own in that, as `4/0`."""
    num_tokens: int
    digest: str
    """Of its tokens, and its last target."""
    fate: str
    """`trained` (in `step`), `computed` (by `forward`, without gradient), `refused`, `dropped` (with its gradient),
    `waiting` (for its turn, or its step), or `ended` (its model is gone before its step)."""
    step: int | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A tenant's model."""

    id: str
    tenant: str
    created_at: float
    """Wall clock in seconds, as all times here."""
    ended: bool
    """Its session is finished, or it was unloaded."""

    @property
    def name(self) -> str:
        """Name of its folder."""
        session, _, number = self.id.partition(":train:")
        return f"{self.tenant}-{session[:8]}-{number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of a model, as the log has it."""

    step: int
    seq: int
    at: float
    expected: ExpectedWitness
    receipt: Receipt


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """A version that a server has proved."""

    version: int
    model: str
    path: str
    report: LoadReport


def is_service(folder: Path) -> bool:
    """Returns whether the folder is a service's."""
    return (folder / COMMANDS_FILE).is_file()


def service_of(folder: Path) -> tuple[Path, str | None] | None:
    """Returns the service's folder that `folder` belongs to, and the id of the model that it is of, None: the service's
    own; None for a folder of another run."""
    if is_service(folder):
        return folder, None
    above = folder.absolute().parent.parent
    if folder.absolute().parent.name == MODELS and is_service(above) and (folder / RUN_FILE).is_file():
        return above, str(read_run(folder).programs.get(SERVICE, {}).get("model"))
    return None


def service_program(folder: Path) -> dict[str, Any]:
    """Returns what `run.json` says of the service: its settings, tenants and base model. Raises `NoRun`."""
    run: RunFile = read_run(folder)
    return run.programs.get(SERVICE, {})


@contextmanager
def open_service(folder: Path, *, limit_s: float = math.inf) -> Iterator["ServiceReader"]:
    """Opens the log of the service in `folder` as it is now. Queries that take longer than `limit_s` altogether raise
    sqlite3.OperationalError."""
    with open_database(folder / COMMANDS_FILE, limit_s=limit_s) as database:
        database.execute("BEGIN")
        yield ServiceReader(database)


class ServiceReader:
    """Answers questions about a service. Each method is one query."""

    def __init__(self, database: Connection) -> None:
        self._database = database

    def _rows(self, query: str, *values: object) -> list[Any]:
        return self._database.execute(query, values).fetchall()

    def models(self, only: str | None = None) -> list[Model]:
        """Returns all models, or the one of this id, the oldest first."""
        query = (
            "SELECT model, models.tenant, created_at, heard_at = 0 OR EXISTS (SELECT 1 FROM commands WHERE "
            "target = model AND kind = 'unload_model' AND state = 'done') "
            "FROM models JOIN sessions USING (session) WHERE ? IS NULL OR model = ? ORDER BY models.rowid"
        )
        rows = self._rows(query, only, only)
        return [Model(id=model, tenant=tenant, created_at=at, ended=bool(ended)) for model, tenant, at, ended in rows]

    def num_commands(self, model: str) -> Counter[str]:
        """Returns the number of a model's commands by state."""
        return Counter(dict(self._rows("SELECT state, count(*) FROM commands WHERE target = ? GROUP BY state", model)))

    def failures(self, model: str | None = None) -> list[tuple[str, int, str, str]]:
        """Returns target, number, kind and message of commands that the service could not do, the newest last."""
        query = "SELECT target, seq, kind, answer FROM commands WHERE state = 'broken' AND (? IS NULL OR target = ?)"
        return [(*about, bytes(text).decode()) for *about, text in self._rows(f"{query} ORDER BY rowid", model, model)]

    def newest_step(self, model: str) -> tuple[int, float] | None:
        """Returns number and time of the model's newest step."""
        query = "SELECT step, at FROM steps WHERE target = ? AND step IS NOT NULL ORDER BY seq DESC LIMIT 1"
        rows = self._rows(query, model)
        return rows[0] if rows else None

    def steps(self, model: str) -> list[Step]:
        """Returns the model's steps, in order."""
        query = "SELECT step, seq, at, expected, receipt FROM steps WHERE target = ? AND step IS NOT NULL ORDER BY seq"
        return [
            Step(
                step=step,
                seq=seq,
                at=at,
                expected=ExpectedWitness.from_json(expected.encode()),
                receipt=Receipt.from_json(receipt.encode()),
            )
            for step, seq, at, expected, receipt in self._rows(query, model)
        ]

    def metrics(self, model: str) -> list[dict[str, float]]:
        """Returns the figures of the model's steps, in order."""
        query = "SELECT metrics FROM steps WHERE target = ? AND step IS NOT NULL ORDER BY seq"
        return [json.loads(metrics) for (metrics,) in self._rows(query, model)]

    def datums(self, model: Model) -> list[Datum]:
        """Returns every datum that the model has received, with its fate. It follows from the commands' order and ends,
        so that what is done again after a kill counts once."""
        query = (
            "SELECT seq, kind, state, CASE WHEN state IN ('done', 'proto') THEN NULL ELSE answer END, forward_only, "
            "lengths, digests, step, at FROM commands LEFT JOIN datums USING (target, seq) LEFT JOIN steps "
            "USING (target, seq) WHERE target = ? AND kind IN ('forward_backward', 'optim_step', 'load_weights') "
            "ORDER BY seq"
        )
        found: list[Datum] = []
        pending: list[int] = []
        for seq, kind, state, answer, forward_only, lengths, digests, step, at in self._rows(query, model.id):
            done, reason = state in ("done", "proto"), None if answer is None else bytes(answer).decode()
            if kind == "forward_backward":
                fate = "waiting" if state == "waiting" else "refused"
                if done:
                    fate, reason = ("computed", None) if forward_only else ("waiting", None)
                    if not forward_only:
                        pending += range(len(found), len(found) + len(lengths or b"") // 4)
                found += _received(seq, lengths, digests, fate, reason)
            elif at is not None or (kind == "load_weights" and done):
                fate = "dropped" if step is None else "trained"
                why = (reason or "load_weights came before a step") if step is None else None
                for index in pending:
                    found[index] = msgspec.structs.replace(found[index], fate=fate, step=step, reason=why)
                pending = []
        if model.ended:
            found = [msgspec.structs.replace(one, fate="ended") if one.fate == "waiting" else one for one in found]
        return found

    def fates(self, model: Model) -> Counter[str]:
        """Returns the number of the model's datums by fate."""
        return Counter(one.fate for one in self.datums(model))

    # --- snapshots and checkpoints ---

    def canaries(self) -> list[Canary]:
        """Returns the newest proof of each version that a server has proved, by version."""
        query = (
            "SELECT version, model, path, report FROM versions JOIN canaries USING (version) "
            "ORDER BY version, canaries.rowid"
        )
        found = {
            version: Canary(version=version, model=model, path=path, report=LoadReport.from_json(report.encode()))
            for version, model, path, report in self._rows(query)
        }
        return list(found.values())

    def sampled_versions(self) -> Counter[int]:
        """Returns the number of sampled sequences by the version that sampled them, without those of the base."""
        query = "SELECT version, count(*) FROM samples WHERE version IS NOT NULL GROUP BY version"
        return Counter(dict(self._rows(query)))

    def checkpoints(self, model: str | None = None) -> list[str]:
        """Returns the paths of all checkpoints, or of a model's, the oldest first."""
        query = "SELECT path FROM checkpoints WHERE ? IS NULL OR model = ? ORDER BY rowid"
        return [path for (path,) in self._rows(query, model, model)]

    def version_of(self, path: str) -> int | None:
        """Returns the newest version that servers were given of a checkpoint."""
        found: int | None = self._rows("SELECT max(version) FROM versions WHERE path = ?", path)[0][0]
        return found

    def checkpoint(self, text: str) -> str:
        """Returns the path of the checkpoint that a person means: a path, or its end, as `weights/last` or `last`.
        Raises `UserError` for none, or several."""
        known = self.checkpoints()
        means = [path for path in known if path == text] or [path for path in known if path.endswith(f"/{text}")]
        if len(means) != 1:
            near = ", ".join((means or known)[-8:]) or "none"
            raise UserError(f"--checkpoint is {text!r:.200}, which is {len(means)} checkpoints; there are {near}")
        return means[0]


def _received(seq: int, lengths: bytes | None, digests: bytes | None, fate: str, reason: str | None) -> Iterator[Datum]:
    for number, num_tokens in enumerate(array("i", lengths or b"")):
        digest = (digests or b"")[_DIGEST_BYTES * number : _DIGEST_BYTES * (number + 1)]
        yield Datum(id=f"{seq}/{number}", num_tokens=num_tokens, digest=digest.hex(), fate=fate, reason=reason)

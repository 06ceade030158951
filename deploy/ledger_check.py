"""Whether a ledger agrees with itself, with the metrics of its steps and with the run's summary."""

import json
import math
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.liveness import is_alive
from transport.run import RUN_FILE
from transport.status import FINISHED, read_status

if TYPE_CHECKING:
    from transport.batches.store import StepStore

STATES = ("issued", "scored", "shipping", "shipped", "trained", "dropped")
IN_A_BATCH = ("shipping", "shipped", "trained")
OPEN = ("issued", "scored", "shipping", "shipped")
MAX_SHOWN = 10
"""Violations of one kind that are listed; the rest are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that must hold. Example: ``Check(name="every dropped rollout has a reason", violations=())``"""

    name: str
    violations: tuple[str, ...]
    """Empty where it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What the checks look at."""

    folder: Path
    database: sqlite3.Connection
    metrics: Mapping[int, Mapping[str, float]]
    """Of each step, from `metrics.jsonl`."""
    summary: Mapping[str, Any]
    """`summary.json` of a finished run, or nothing."""
    settings: Mapping[str, Any]
    """Of the orchestrator."""


def check(folder: Path, database: sqlite3.Connection) -> list[Check]:
    """All checks. Those that only hold of a finished run are left out before its end: one that was ended early may be
    resumed, and has open ends."""
    # A living run goes on meanwhile: the metrics of a step are written after its rollouts have left.
    metrics = _metrics(folder / "metrics.jsonl")
    finished = _is_finished(folder)
    database.execute("BEGIN")
    run = _Run(
        folder=folder,
        database=database,
        metrics=metrics,
        summary=_object(folder / "summary.json") if finished else {},
        settings=_settings(folder / RUN_FILE),
    )
    checks = _ALWAYS | (_AT_THE_END if finished else {})
    return [Check(name=name, violations=_listed(list(find(run)))) for name, find in checks.items()]


def _listed(violations: list[str]) -> tuple[str, ...]:
    more = len(violations) - MAX_SHOWN
    return (*violations[:MAX_SHOWN], *([f"and {more:,} more"] if more > 0 else []))


# --- what always holds ---


def _fates(run: _Run) -> Iterator[str]:
    known = ", ".join(f"'{state}'" for state in STATES)
    in_a_batch = ", ".join(f"'{state}'" for state in IN_A_BATCH)
    for fault, where in (
        ("is in an unknown state", f"state NOT IN ({known})"),
        ("is dropped without a reason", "state = 'dropped' AND reason IS NULL"),
        ("has a reason but is not dropped", "state != 'dropped' AND reason IS NOT NULL"),
        ("is in a batch, but no step is named", f"state IN ({in_a_batch}) AND step IS NULL"),
        ("names a step, but is in no batch", f"state NOT IN ({in_a_batch}) AND step IS NOT NULL"),
        ("is in a batch without a reward", f"state IN ({in_a_batch}) AND reward IS NULL"),
        ("has changed before it was issued", "changed_at < issued_at - 1"),
    ):
        for rollout, state in run.database.execute(f"SELECT id, state FROM rollouts WHERE {where}"):
            yield f"rollout {rollout} ({state}) {fault}"


def _groups(run: _Run) -> Iterator[str]:
    wrong = "SELECT id, group_id FROM rollouts WHERE id NOT LIKE group_id || '/%'"
    for rollout, group in run.database.execute(wrong):
        yield f"rollout {rollout} is filed under group {group}"
    for column in ("env", "example", "version"):
        several = f"SELECT group_id FROM rollouts GROUP BY group_id HAVING COUNT(DISTINCT {column}) > 1"
        for (group,) in run.database.execute(several):
            yield f"group {group} has more than one {column}"


def _once(run: _Run) -> Iterator[str]:
    twice = (
        "SELECT group_id, GROUP_CONCAT(DISTINCT step) FROM rollouts WHERE step IS NOT NULL "
        "GROUP BY group_id HAVING COUNT(DISTINCT step) > 1"
    )
    for group, steps in run.database.execute(twice):
        yield f"group {group} is in steps {steps}"


def _no_holes(run: _Run) -> Iterator[str]:
    steps = dict(run.database.execute("SELECT step, MIN(state = 'trained') FROM rollouts GROUP BY step"))
    steps.pop(None, None)
    newest = max(steps, default=0)
    for missing in sorted(set(range(1, newest + 1)) - steps.keys()):
        yield f"no rollout is in step {missing}, and step {newest} is there"
    trained = [step for step, all_trained in steps.items() if all_trained]
    for step in sorted(step for step, all_trained in steps.items() if not all_trained):
        if trained and step < max(trained):
            yield f"step {step} is not trained whole, and step {max(trained)} is"


def _lags(run: _Run) -> Iterator[str]:
    limit = run.settings.get("max_off_policy_steps")
    for rollout, step, version in run.database.execute("SELECT id, step, version FROM rollouts WHERE version >= step"):
        yield f"rollout {rollout} of step {step} was sampled under version {version}, which came of it or later"
    if limit is None:
        return
    stale = "SELECT id, step, step - 1 - version FROM rollouts WHERE step - 1 - version > ?"
    for rollout, step, lag in run.database.execute(stale, (limit,)):
        yield f"rollout {rollout} of step {step} has lag {lag}, more than max_off_policy_steps = {limit}"


def _as_in_metrics(run: _Run) -> Iterator[str]:
    """A batch's metrics count the rollouts that were scored in its groups, those that filters withheld included."""
    of_steps = (
        "WITH shipped AS (SELECT DISTINCT group_id, step FROM rollouts WHERE step IS NOT NULL) "
        "SELECT shipped.step, COUNT(*), AVG(reward) FROM shipped JOIN rollouts USING (group_id) "
        "WHERE reward IS NOT NULL GROUP BY shipped.step"
    )
    counted = {step: (num, reward) for step, num, reward in run.database.execute(of_steps)}
    for step, metrics in run.metrics.items():
        if step not in counted:
            yield f"step {step} has metrics, but no rollout is in it"
            continue
        num, reward = counted[step]
        if num != metrics.get("rollout/num", num):
            yield f"step {step} has {num} scored rollouts, its metrics say {metrics['rollout/num']:g}"
        elif not math.isclose(reward, metrics.get("reward/mean", reward), rel_tol=1e-9, abs_tol=1e-9):
            yield f"step {step} has a mean reward of {reward:.9g}, its metrics say {metrics['reward/mean']:.9g}"


def _as_in_batches(run: _Run) -> Iterator[str]:
    """Batches stay on disk until a checkpoint has passed them. One after the ledger's last step is of a time before the
    run went back to a checkpoint."""
    from transport.batches.store import StepStore
    from transport.errors import TransportError

    run_id = _object(run.folder / RUN_FILE).get("run_id")
    store = StepStore(run.folder / "batches", run_id=str(run_id))
    newest = run.database.execute("SELECT COALESCE(MAX(step), 0) FROM rollouts").fetchone()[0]
    for step in [step for step in _steps_in(store) if step <= newest]:
        try:
            sent = _rollouts_in(store, step)
        except (TransportError, FileNotFoundError) as error:
            if step in _steps_in(store):  # else it has been removed meanwhile
                yield f"batch {step} cannot be read: {error}"
            continue
        filed = {one for (one,) in run.database.execute("SELECT id FROM rollouts WHERE step = ?", (step,))}
        for rollout in sorted(sent - filed):
            yield f"rollout {rollout} is in the batch of step {step}, but not in that step of the ledger"
        for rollout in sorted(filed - sent):
            yield f"rollout {rollout} is in step {step} of the ledger, but not in its batch"


def _steps_in(store: "StepStore") -> list[int]:
    return store.steps() if store.folder.is_dir() else []


def _rollouts_in(store: "StepStore", step: int) -> set[str]:
    """Of all ranks. Raises FileNotFoundError where the step is gone, and `TransportError`."""
    from transport.errors import MissingRankError

    found, rank = set[str](), 0
    while True:
        try:
            batches = store.read(step, rank)
        except MissingRankError:
            return found
        if batches is None:
            raise FileNotFoundError(step)
        found |= {rollout for batch in batches for rollout in batch.rollout_ids if rollout}
        rank += 1


# --- what holds at the end ---


def _all_final(run: _Run) -> Iterator[str]:
    states = ", ".join(f"'{state}'" for state in OPEN)
    for rollout, state in run.database.execute(f"SELECT id, state FROM rollouts WHERE state IN ({states})"):
        yield f"rollout {rollout} is {state}, and the run is over"


def _all_steps(run: _Run) -> Iterator[str]:
    steps = {step for (step,) in run.database.execute("SELECT DISTINCT step FROM rollouts WHERE step IS NOT NULL")}
    for step in sorted(steps - run.metrics.keys()):
        yield f"step {step} has no metrics"
    expected = run.settings.get("max_steps")
    if expected is not None and max(steps, default=0) != expected:
        yield f"the last step is {max(steps, default=0)}, expected max_steps = {expected}"


def _as_in_summary(run: _Run) -> Iterator[str]:
    """A run that was resumed with `ckpt.skip_progress` counts anew."""
    if not run.summary or run.settings.get("ckpt", {}).get("skip_progress"):
        return
    count = "SELECT COUNT(*), COALESCE(SUM(state = 'trained'), 0) FROM rollouts"
    issued, trained = run.database.execute(count).fetchone()
    reasons = "SELECT reason, COUNT(*) FROM rollouts WHERE state = 'dropped' GROUP BY reason"
    found = {"rollouts_issued": issued, "rollouts_trained": trained}
    found["rollouts_dropped"] = dict(run.database.execute(reasons).fetchall())
    for key, value in found.items():
        if run.summary.get(key, value) != value:
            yield f"{key} is {value}, the summary says {run.summary[key]}"


def _served(run: _Run) -> Iterator[str]:
    """A version serves once its canary has been compared. One that was published while servers were down may never."""
    if "versions_served" not in run.summary:
        return
    served = set(run.summary["versions_served"])
    trained = "SELECT version, COUNT(*) FROM rollouts WHERE state = 'trained' GROUP BY version"
    for version, num in run.database.execute(trained):
        if version not in served:
            yield (
                f"version {version} is not in versions_served of summary.json, and {num} of the trained rollouts were "
                f"sampled under it"
            )


_ALWAYS: dict[str, Callable[[_Run], Iterator[str]]] = {
    "every rollout has one fate, and dropped ones have a reason": _fates,
    "a group is one prompt under one version": _groups,
    "no group is in two steps": _once,
    "steps follow each other without holes": _no_holes,
    "no rollout is from a later version, or staler than max_off_policy_steps": _lags,
    "each step's rollouts and mean reward are as in metrics.jsonl": _as_in_metrics,
    "the batches on disk hold just the rollouts of their step": _as_in_batches,
}
_AT_THE_END: dict[str, Callable[[_Run], Iterator[str]]] = {
    "every rollout is trained or dropped": _all_final,
    "every step up to max_steps has rollouts and metrics": _all_steps,
    "the totals are those of summary.json": _as_in_summary,
    "versions under which trained rollouts were sampled were proved to be served": _served,
}


# --- files ---


def _is_finished(folder: Path) -> bool:
    """The orchestrator has come to its end, and has ended: it writes the rest of the ledger last."""
    status = read_status(folder / "status" / "orch.json") or {}
    alive = is_alive(status.get("pid"), status.get("host"), since=status.get("since"))
    return status.get("state") == FINISHED and alive is not True


def _metrics(path: Path) -> dict[int, Mapping[str, float]]:
    """The newest record of each step; evaluations and torn lines are left out."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return {}
    steps: dict[int, Mapping[str, float]] = {}
    for line in lines:
        try:
            record = json.loads(line)
            if "reward/mean" in record:
                steps[int(record["progress/step"])] = record
        except (ValueError, KeyError, TypeError):
            continue
    return steps


def _object(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _settings(path: Path) -> dict[str, Any]:
    try:
        settings: dict[str, Any] = _object(path)["programs"]["orch"]["settings"]
    except (KeyError, TypeError):
        return {}
    return settings

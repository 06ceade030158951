"""A part of `grpo prove`: whether a ledger agrees with itself, with the metrics of its steps, the batches and traces on
disk, and the summary."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo.orchestrator.ledger_reader import LedgerReader
from grpo.run_files import REWARD, STEP, SUMMARY_FILE, orch_settings, read
from grpo.transport.folders import steps_in
from grpo.transport.run import RunFile

MAX_SHOWN = 10
"""Violations of one kind that are listed; the rest are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checked:
    """The parts of a run that the checks compare."""

    folder: Path
    run_id: str
    settings: Mapping[str, Any]
    """The orchestrator's."""
    ledger: LedgerReader
    metrics: Mapping[int, Mapping[str, float]]
    """The metrics of each step."""
    lines: Counter[int]
    """The number of lines in `metrics.jsonl` by step."""
    summary: Mapping[str, Any] | None


def check(
    folder: Path, run: RunFile, records: Sequence[Mapping[str, float]], ledger: LedgerReader, *, finished: bool
) -> dict[str, list[str]]:
    """Returns the violations that each check has found. Those that only hold of a finished run are left out before its
    end: one that was ended early may be resumed, and has open ends. `records` are the lines of `metrics.jsonl`; the
    ledger must have been frozen after they were read, because a step's line is written after its rollouts have left."""
    steps = [record for record in records if REWARD in record]
    checked = _Checked(
        folder=folder,
        run_id=run.run_id,
        settings=orch_settings(run),
        ledger=ledger,
        metrics={int(record[STEP]): record for record in steps},
        lines=Counter(int(record[STEP]) for record in steps),
        summary=read(folder / SUMMARY_FILE, dict[str, Any]),
    )
    checks = _ALWAYS | (_AT_THE_END if finished else {})
    return {name: _listed(list(find(checked))) for name, find in checks.items()}


def _listed(violations: list[str]) -> list[str]:
    more = len(violations) - MAX_SHOWN
    return violations[:MAX_SHOWN] + ([f"and {more:,} more"] if more > 0 else [])


# --- what always holds ---


def _fates(checked: _Checked) -> Iterator[str]:
    yield from (f"rollout {rollout} ({state}) {fault}" for rollout, state, fault in checked.ledger.faults())


def _groups(checked: _Checked) -> Iterator[str]:
    yield from (f"group {group} has more than one {column}" for group, column in checked.ledger.mixed_groups())


def _no_holes(checked: _Checked) -> Iterator[str]:
    steps = checked.ledger.steps()
    for missing in sorted(set(range(1, max(steps, default=0))) - steps.keys()):
        yield f"no rollout is in step {missing}, and step {max(steps)} is there"
    newest = max((step for step, trained in steps.items() if trained), default=0)
    for step in sorted(step for step, trained in steps.items() if not trained and step < newest):
        yield f"step {step} is not trained whole, and step {newest} is"


def _lags(checked: _Checked) -> Iterator[str]:
    limit = checked.settings.get("max_off_policy_steps")
    for rollout, step, lag in checked.ledger.lagging(limit):
        yield f"rollout {rollout} of step {step} has lag {lag}, expected 0 to max_off_policy_steps = {limit}"


def _once_an_epoch(checked: _Checked) -> Iterator[str]:
    """With `ckpt.skip_buffer` the order of examples begins anew."""
    if checked.settings.get("ckpt", {}).get("skip_buffer"):
        return
    for env, example, epoch, num in checked.ledger.asked_again():
        yield f"example {example} of {env} is in batches by {num} groups of epoch {epoch}"


def _as_in_metrics(checked: _Checked) -> Iterator[str]:
    """A batch's metrics count the rollouts that were scored in its groups, those that filters withheld included."""
    counted = checked.ledger.scored()
    for step in sorted(
        step for step in counted.keys() - checked.metrics.keys() if step < max(checked.metrics, default=0)
    ):
        yield f"step {step} has no metrics, and step {max(checked.metrics)} has"
    for step, record in checked.metrics.items():
        num, reward = counted.get(step, (0, math.nan))
        if checked.lines[step] > 1:
            yield f"step {step} has {checked.lines[step]} lines in metrics.jsonl"
        if step not in counted:
            yield f"step {step} has metrics, but no rollout is in it"
        elif num != record.get("rollout/num", num):
            yield f"step {step} has {num} scored rollouts, its metrics say {record['rollout/num']:g}"
        elif not math.isclose(reward, record[REWARD], rel_tol=1e-9, abs_tol=1e-9):
            yield f"step {step} has a mean reward of {reward:.9g}, its metrics say {record[REWARD]:.9g}"


def _as_in_batches(checked: _Checked) -> Iterator[str]:
    """Batches stay on disk until a checkpoint has passed them. One after the ledger's last step is of a time before the
    run went back to a checkpoint."""
    from grpo.transport.batches.store import StepStore
    from grpo.transport.errors import TransportError

    store = StepStore(checked.folder / "batches", run_id=checked.run_id)
    newest = checked.ledger.newest_step() or 0
    for step in [step for step in steps_in(store.folder) if step <= newest]:
        try:
            batches = store.read(step, rank=0, num_ranks=1) or ()
        except (TransportError, OSError) as error:
            if step in steps_in(store.folder):
                yield f"batch {step} cannot be read: {error}"
            continue
        if step not in steps_in(store.folder):
            continue  # it has been removed meanwhile
        sent = {rollout for batch in batches for rollout in batch.rollout_ids if rollout}
        filed = checked.ledger.ids_of(step)
        for rollout in sorted(sent ^ filed):
            where = ("its batch", "the ledger") if rollout in sent else ("the ledger", "its batch")
            yield f"rollout {rollout} is in step {step} of {where[0]}, but not of {where[1]}"


def _as_in_traces(checked: _Checked) -> Iterator[str]:
    """A step may be without a trace (`traces.every`, `keep_last`, a slow disk); one that is there has its rollouts."""
    from grpo.transport.traces import trace_path, traced_steps

    newest = checked.ledger.newest_step() or 0
    steps = [step for step in traced_steps(checked.folder) if step <= newest]
    if not steps:
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    for step in steps:
        try:
            table = pq.read_table(trace_path(checked.folder, step), columns=["step", "rollout", "trained"])
        except FileNotFoundError:
            continue  # it has been removed meanwhile
        except (OSError, pa.ArrowException) as error:
            yield f"the trace of step {step} cannot be read: {error}"
            continue
        if others := sorted(set(table["step"].to_pylist()) - {step}):
            yield f"the trace of step {step} has rollouts of step {others[0]}"
        rows = zip(table["rollout"].to_pylist(), table["trained"].to_pylist(), strict=True)
        traced = {rollout.partition(".")[0] for rollout, trained in rows if trained}
        filed = checked.ledger.ids_of(step)
        for rollout in sorted(traced ^ filed):
            where = ("its trace", "the ledger") if rollout in traced else ("the ledger", "its trace")
            yield f"rollout {rollout} is in step {step} of {where[0]}, but not of {where[1]}"


# --- what holds at the end ---


def _all_final(checked: _Checked) -> Iterator[str]:
    for rollout, state in checked.ledger.unfinished():
        yield f"rollout {rollout} is {state}, and the run is over"


def _all_steps(checked: _Checked) -> Iterator[str]:
    steps = checked.ledger.steps().keys()
    for step in sorted(steps - checked.metrics.keys()):
        yield f"step {step} has no metrics"
    expected = checked.settings.get("max_steps")
    if expected is not None and max(steps, default=0) != expected:
        yield f"the last step is {max(steps, default=0)}, expected max_steps = {expected}"


def _as_in_summary(checked: _Checked) -> Iterator[str]:
    """A run that was resumed with `ckpt.skip_progress` counts from there. A version serves once its canary has been
    compared; one that was published while servers were down may never."""
    if checked.summary is None:
        yield "the run has finished, and its summary.json is missing or cannot be read"
        return
    fates = checked.ledger.fates()
    found = {
        "rollouts_issued": fates.total(),
        "rollouts_trained": fates["trained", None],
        "rollouts_dropped": {reason: num for (state, reason), num in fates.items() if state == "dropped"},
    }
    for key, value in found.items():
        if not checked.settings.get("ckpt", {}).get("skip_progress") and checked.summary.get(key) != value:
            yield f"{key} is {value}, the summary says {checked.summary.get(key)}"
    served = checked.summary.get("versions_served")
    for version, num in checked.ledger.trained_versions().items():
        if not isinstance(served, list) or version not in served:
            yield f"{num} trained rollouts were sampled under version {version}, which was never proved to be served"


def _explained(checked: _Checked) -> Iterator[str]:
    for step, (_, receipt) in checked.ledger.receipts().items():
        for lag, mismatch in () if receipt is None else receipt.unexplained.items():
            yield f"step {step}: policy/mismatch_kl_lag{lag} is {mismatch:.3g} nats, far more than the policy has moved"


_ALWAYS: dict[str, Callable[[_Checked], Iterator[str]]] = {
    "every rollout has one fate, and dropped ones have a reason": _fates,
    "a group is one prompt under one version in one step": _groups,
    "steps follow each other without holes": _no_holes,
    "no rollout is from a later version, or staler than max_off_policy_steps": _lags,
    "an example is trained once an epoch": _once_an_epoch,
    "each step has one line in metrics.jsonl, with its rollouts and mean reward": _as_in_metrics,
    "the batches on disk hold just the rollouts of their step": _as_in_batches,
    "the traces on disk show just the trained rollouts of their step": _as_in_traces,
    "servers and trainer differ by what the policy has moved": _explained,
}
_AT_THE_END: dict[str, Callable[[_Checked], Iterator[str]]] = {
    "every rollout is trained or dropped": _all_final,
    "every step up to max_steps has rollouts and metrics": _all_steps,
    "the totals and the versions that were sampled under are those of summary.json": _as_in_summary,
}

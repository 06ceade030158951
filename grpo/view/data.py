"""Reads from the files of a run what the page shows. Every function returns what JSON takes."""

import contextlib
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from grpo.commands.ratings import ratings_of
from grpo.commands.status import as_fields, run_status
from grpo.orchestrator.ledger import LEDGER_FILE
from grpo.orchestrator.ledger_reader import NoRollouts, open_ledger
from grpo.orchestrator.monitoring.timeline import TIMELINE_FILE, Span, covered_s, read_timeline
from grpo.run_files import METRICS_FILE, REWARD, STEP, NoRun, read_file, read_run
from grpo.service_folder import COMMANDS_FILE, MODELS, is_service
from grpo.service_proofs import prove
from grpo.transport.errors import UserError
from grpo.transport.run import RUN_FILE, code_changes
from grpo.transport.run_warnings import WARNINGS_FOLDER
from grpo.transport.traces import traced_steps
from grpo.view import traces
from grpo.view.columns import Columns, columns_of, thinned
from grpo.view.findings import findings

_SPARKS = 60
"""Points of a small curve."""
_CHECK_S = 5.0
"""Time limit of the checks of the ledger, and of questions to it."""
_MAX_SPANS = 4_000
"""Spans of a timeline that are sent at once, the longest."""
_MAX_VERSIONS = 40
"""Evaluations of which pass@k is told."""
_MAX_GAMES = 200
"""Games that are listed."""
_WATCHED = (
    *(
        METRICS_FILE,
        f"{COMMANDS_FILE}-wal",
        TIMELINE_FILE,
        f"{LEDGER_FILE}-wal",
        LEDGER_FILE,
        "status",
        "traces",
        "summary.json",
    ),
    WARNINGS_FOLDER,
)


def find_runs(folders: Iterable[Path]) -> dict[str, Path]:
    """Returns the runs in the given folders, by name: a folder is a run, or has runs in it. Raises `NoRun`."""
    found: dict[str, Path] = {}
    for folder in folders:
        runs = (
            [folder] if (folder / RUN_FILE).is_file() else sorted(path.parent for path in folder.glob(f"*/{RUN_FILE}"))
        )
        runs = [one for run in runs for one in (run, *_models(run))]
        for run in runs:
            name, number = run.resolve().name, 2
            while found.get(name, run) != run:
                name, number = f"{run.resolve().name}-{number}", number + 1
            found[name] = run
    return found


def _models(run: Path) -> list[Path]:
    """Returns the folders of a training service's models, each of which is shown as a run."""
    return sorted(path.parent for path in (run / MODELS).glob(f"*/{RUN_FILE}")) if is_service(run) else []


def fingerprint(run: Path) -> tuple[tuple[int, int], ...]:
    """Changes whenever the run has written something that a page shows."""

    def state(name: str) -> tuple[int, int]:
        try:
            stat = (run / name).lstat()
        except OSError:
            return 0, 0
        return stat.st_mtime_ns, stat.st_size

    return tuple(map(state, _WATCHED))


def overview(name: str, run: Path) -> dict[str, Any]:
    """Returns one line of the table of runs."""
    try:
        status = as_fields(run_status(run, count=False))
    except NoRun as error:
        return {
            "name": name,
            "state": "unreadable",
            "waits": str(error),
            "rewards": [],
            "accuracies": [],
            "warnings": [],
            "findings": [],
        }
    train, evaluated = columns_of(run).read()
    rewards, accuracies = _known(train, REWARD), _known(evaluated, "eval/accuracy")
    seconds, num = sum(_known(train, "time/step_s")), sum(_known(train, "rollout/num"))
    traced = traced_steps(run)
    return {
        "name": name,
        "folder": str(run),
        **{key: status[key] for key in ("state", "waits", "max_steps", "processes", "live", "published", "warnings")},
        "step": int(max((*train.get(STEP, ()), *evaluated.get(STEP, ())), default=0)),
        "seconds": seconds or None,
        "rollouts_per_s": num / seconds if seconds and num else None,
        "findings": findings(
            train,
            evaluated,
            failures=lambda: traces.failures(run, traced[-1]) if traced else {},
            num_equal=lambda: traces.num_equal(run, traced[-1]) if traced else 0,
        ),
        "reward": rewards[-1] if rewards else None,
        "rewards": _thinned(rewards),
        "accuracies": _thinned(accuracies) if len(accuracies) > 2 * _SPARKS else accuracies,
        "traced": traced,
        "evaluated": traced_steps(run, evaluation=True),
        "models": [one.name for one in _models(run)],
    }


def _known(columns: Columns, name: str) -> list[float]:
    return [value for value in columns.get(name, np.empty(0)).tolist() if math.isfinite(value)]


def _thinned(values: Sequence[float]) -> list[float]:
    """Returns at most `_SPARKS` means of neighbours."""
    size = math.ceil(len(values) / _SPARKS) or 1
    parts = [values[begin : begin + size] for begin in range(0, len(values), size)]
    return [round(sum(part) / len(part), 5) for part in parts]


def curves(run: Path, low: float | None = None, high: float | None = None) -> dict[str, Any]:
    """Returns all metrics as columns: `train` by step and `eval` by version, between two steps; null where a line lacks
    one. `changes`: where the user's code has changed between two starts, the newest version then and the files."""
    train, evaluated = columns_of(run).read()
    return {
        "train": thinned(train, low, high),
        "eval": thinned(evaluated, low, high),
        "changes": [*code_changes(read_run(run)).items()],
    }


def settings(run: Path) -> dict[str, Any]:
    """Returns the resolved settings of each program, by dotted key, and which of them were `given`."""
    programs = json.loads(read_file(run, run / RUN_FILE).read_text()).get("programs", {})
    given: list[str] = []
    for role in programs:
        with contextlib.suppress(OSError, yaml.YAMLError, UserError):  # by hand, without the launcher, there is no file
            tree = yaml.safe_load(read_file(run, run / "settings" / f"{role}.yaml").read_text(encoding="utf-8"))
            given += [f"{role}.{key}" for key, _ in flat(tree or {})]
    values = {f"{role}.{key}": value for role, one in programs.items() for key, value in flat(one.get("settings", {}))}
    return {"values": values, "given": [key for key in given if key in values]}


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Returns the leaves of nested settings by dotted key."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def timeline(run: Path, start_s: float | None, end_s: float | None) -> dict[str, Any]:
    """Returns the spans of programs between two moments, seconds since the run's first span, and each one's idle
    share."""
    spans = read_timeline(run) if (run / TIMELINE_FILE).exists() and read_file(run, run / TIMELINE_FILE) else []
    if not spans:
        return {"lanes": [], "spans": [], "end_s": 0}
    origin = spans[0].start_s
    last = max(span.end_s for span in spans) - origin
    low, high = start_s or 0.0, last if end_s is None else end_s
    inside = [span for span in spans if span.end_s - origin >= low and span.start_s - origin <= high]
    lanes = sorted({span.who for span in inside})
    shown = sorted(inside, key=lambda span: -span.seconds)[:_MAX_SPANS]
    return {
        "lanes": [{"who": who, "busy": _busy([one for one in inside if one.who == who], high - low)} for who in lanes],
        "spans": [
            [lanes.index(one.who), one.what, round(one.start_s - origin, 4), round(one.end_s - origin, 4), one.step]
            for one in shown
        ],
        "left_out": len(inside) - len(shown),
        "end_s": last,
    }


def _busy(spans: Sequence[Span], seconds: float) -> float | None:
    """Returns the share of the time in which a program did something but wait; None for a single server, of which only
    loading and sleep are known."""
    if all(span.what in ("load", "sleep") for span in spans):
        return None
    working = [span for span in spans if span.what not in ("wait", "generate", "sleep")]
    return min(1.0, covered_s(working) / seconds) if seconds > 0 else None


def step(run: Path, number: int, *, evaluation: bool) -> dict[str, Any]:
    """Returns every rollout in a step's trace."""
    rows = traces.rollouts_of(run, number, evaluation=evaluation)
    return {"rollouts": rows, "traced": traced_steps(run, evaluation=evaluation)}


def rollout(run: Path, number: int, rollout_id: str, *, evaluation: bool) -> list[dict[str, Any]]:
    """Returns the rows of a rollout with tokens, and the preference pairs that were made of it."""
    rows = traces.rollout(run, number, rollout_id, evaluation=evaluation)
    pairs = [] if evaluation else pairs_of(run, rollout_id)
    return [row | {"pairs": pairs if place == 0 else []} for place, row in enumerate(rows)]


def prompt(run: Path, env: str, example: int) -> dict[str, Any]:
    """Returns all answers to one example, in training and evaluation, by version."""
    steps = traced_steps(run)
    try:
        with open_ledger(run, limit_s=_CHECK_S) as ledger:
            known = ledger.steps_of(env, example)
        steps = [number for number in steps if number in known]
    except UserError:
        pass
    evaluations = traced_steps(run, evaluation=True)
    return {
        "train": traces.versions_of(run, steps, env, example, evaluation=False),
        "eval": traces.versions_of(run, evaluations, env, example, evaluation=True),
    }


def evaluation(run: Path, before: int | None, after: int | None) -> dict[str, Any]:
    """Returns two evaluations beside each other, example by example, and pass@k of all."""
    versions = traced_steps(run, evaluation=True)
    if not versions:
        return {"versions": [], "examples": [], "pass": {}}
    chosen = [versions[0] if before is None else before, versions[-1] if after is None else after]
    answers = [_by_example(run, version) for version in chosen]
    every = math.ceil(len(versions) / _MAX_VERSIONS)
    listed = sorted({*versions[::every], *chosen, versions[-1]})
    both = sorted(answers[0].keys() & answers[1].keys())
    return {
        "versions": versions,
        "compared": chosen,
        "examples": [{"env": key[0], "example": key[1], **_compared(*(one[key] for one in answers))} for key in both],
        "pass": {version: _pass_at(_by_example(run, version)) for version in listed},
    }


def _by_example(run: Path, version: int) -> dict[tuple[str, int], list[dict[str, Any]]]:
    found: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for row in traces.scores_of(run, version):
        if not row["row"] and "." not in row["rollout"].rpartition("/")[2]:
            found[row["env"], row["example"]].append(row)
    return found


def _compared(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def mean(rows: Sequence[Mapping[str, Any]]) -> float:
        return sum(row["accuracy"] or 0.0 for row in rows) / len(rows)

    return {"before": mean(before), "after": mean(after), "rollouts": [before[0]["rollout"], after[0]["rollout"]]}


def _pass_at(examples: Mapping[tuple[str, int], Sequence[Mapping[str, Any]]]) -> dict[int, float]:
    """Returns pass@k for k = 1, 2, 4 … by the unbiased estimator of Chen et al. 2021 (arXiv:2107.03374)."""
    fewest = min((len(rows) for rows in examples.values()), default=0)
    right = [(len(rows), sum((row["accuracy"] or 0.0) >= 1.0 for row in rows)) for rows in examples.values()]
    ks = [2**power for power in range(fewest.bit_length())] if fewest else []
    return {k: sum(1.0 - math.comb(num - good, k) / math.comb(num, k) for num, good in right) / len(right) for k in ks}


def games(run: Path) -> list[dict[str, Any]]:
    """Returns for each environment with games what `grpo ratings` says, and its `newest` games."""
    try:
        with open_ledger(run, limit_s=_CHECK_S) as ledger:
            tables = ratings_of(ledger, run)
            return [table | {"newest": ledger.newest_games(table["env"], _MAX_GAMES)} for table in tables]
    except NoRollouts:
        return []


def proof(run: Path) -> dict[str, Any]:
    """Returns the page of `grpo prove`."""
    return prove(run, limit_s=_CHECK_S).as_fields()


def pairs_of(run: Path, rollout: str) -> list[dict[str, Any]]:
    """Returns the preference pairs whose rejected part is of this rollout."""
    try:
        with open_ledger(run, limit_s=_CHECK_S) as ledger:
            found = ledger.pairs_of(rollout)
    except UserError:
        return []
    names = ("messages", "chosen", "rejected", "source")
    return [{name: pair.get(name) for name in names} for pair in found]

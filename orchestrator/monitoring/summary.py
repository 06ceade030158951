"""The summary of a finished run: `summary.json`, and the same as a table."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from grpo.orchestrator.inference.weight_sync import CanaryReport
from grpo.orchestrator.ledger import Ledger
from grpo.orchestrator.monitoring.metrics import REWARD, STEP
from grpo.transport.folders import write_atomic
from grpo.transport.logs import printable
from grpo.transport.run_warnings import RunWarning, as_line

ACCURACY, MEASURE = "eval/accuracy/", "eval/measure/"
"""Before the names of environments, and of what their rubrics measure."""
Line = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The outcome of a run. Phases overlap where sampling runs ahead of training."""

    run_id: str
    steps: int
    """Number of optimizer steps."""
    accuracy_before: float | None
    """Held-out accuracy of version 0, the mean over environments; null where it was not evaluated."""
    accuracy_after: float | None
    """Held-out accuracy of the last version."""
    accuracies: Mapping[str, Mapping[str, float]]
    """Held-out accuracies by version and environment."""
    evaluations: Mapping[str, Mapping[str, float]]
    """All metrics of each evaluation, by version."""
    evaluations_failed: int
    """Held-out answers that could not be scored, over all evaluations; they count as wrong."""
    reward_first: float
    """Mean reward of the first batch."""
    reward_last: float
    """Mean reward of the last batch."""
    wall_s: float
    """Seconds from the orchestrator's start to the summary."""
    seconds: Mapping[str, float]
    """Seconds by phase: start_up, generate, train, publish, load, evaluate."""
    tokens: Mapping[str, int]
    """Tokens by phase: generate (sampled), train (packed, prompts included), evaluate (sampled)."""
    rollouts_per_s: float
    """Rollouts a second of sampling."""
    versions_served: tuple[int, ...]
    """Versions that every server proved by the canary."""
    rollouts_issued: int
    rollouts_trained: int
    rollouts_dropped: Mapping[str, int]
    """Number of rollouts that were not trained, by reason."""
    canary_max_abs: float
    """Largest difference between trainer and servers at the canary, over all versions, in nats."""
    canary_base_max_abs: float
    """The same of the base model: what the programs differ by without any training."""
    mismatch_max_lag0: float | None
    """Largest difference between trainer and server at a trained token of lag 0, in nats."""
    warnings: Sequence[Mapping[str, Any]]
    """Warnings of the programs, each kind once: program, message, the step of the first one, times."""

    def write(self, path: Path) -> None:
        """Writes it as JSON; the file appears whole or not at all."""
        write_atomic(path, json.dumps(asdict(self), indent=2).encode() + b"\n")

    def print(self) -> None:
        """Prints it as a table on standard output, which says each thing once, and the programs' warnings."""
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(title=f"run {self.run_id}", show_header=False)
        for name, value in self._rows():
            table.add_row(Text(printable(name)), Text(printable(value)))
        Console().print(table)
        for warning in self.warnings:
            print(f"warning: {as_line(RunWarning(**warning))}")

    def _rows(self) -> Iterator[tuple[str, str]]:
        yield "steps", _shown(self.steps)
        yield from self._held_out()
        yield "reward, first and last batch", f"{_shown(self.reward_first)} → {_shown(self.reward_last)}"
        parts = ", ".join(f"{name.replace('_', ' ')} {_shown(one)}" for name, one in self.seconds.items())
        yield "seconds", f"{_shown(self.wall_s)}, of which, side by side: {parts}"
        yield "tokens", ", ".join(f"{name} {_shown(one)}" for name, one in self.tokens.items())
        issued, trained = _shown(self.rollouts_issued), _shown(self.rollouts_trained)
        every = "all" if self.rollouts_issued == self.rollouts_trained else f"{trained} of {issued}"
        yield "rollouts", f"{issued}, {_shown(self.rollouts_per_s)} a second; trained: {every}"
        for reason, number in self.rollouts_dropped.items():
            yield f"  dropped, {reason}", _shown(number)
        if self.evaluations_failed:
            yield "held-out answers without a score", _shown(self.evaluations_failed)
        base = f"of the base model {_shown(self.canary_base_max_abs)}"
        yield "largest canary difference, nats", f"{_shown(self.canary_max_abs)}; {base}"
        if self.mismatch_max_lag0 is not None:
            yield "largest difference of a trained token at lag 0, nats", _shown(self.mismatch_max_lag0)

    def _held_out(self) -> Iterator[tuple[str, str]]:
        """Yields accuracies and rubrics' measures over all evaluations, but for measures that are the accuracy."""
        lines = list(self.evaluations.values())
        curves = {key: [line.get(key) for line in lines] for line in lines for key in line}
        shown: dict[str, list[float | None]] = {}
        for prefix, title in ((ACCURACY, "held-out accuracy"), (MEASURE, "held-out")):
            for key in sorted(key for key in curves if key.startswith(prefix)):
                env = key.rpartition("/")[2]
                if shown.get(env) != curves[key]:
                    shown.setdefault(env, curves[key])
                    yield f"{title}, {key.removeprefix(prefix)}", _ends(curves[key])


def _ends(curve: Sequence[float | None]) -> str:
    """Returns the first and the last value, and the best one where it is neither."""
    values = [one for one in curve if one is not None]
    ends = _shown(values[0]) if len(values) == 1 else f"{_shown(values[0])} → {_shown(values[-1])}"
    return f"{ends}, at most {_shown(max(values))}" if max(values) > max(values[0], values[-1]) else ends


def what_next(folder: Path) -> str:
    """Returns a line that says what can be done with a run that has ended."""
    place = shlex.quote(str(folder))
    return f"look at it: grpo view {place}    take it along: grpo export {place}"


def _shown(value: float) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}"


def summarise(
    lines: Sequence[Line],
    ledger: Ledger,
    *,
    run_id: str,
    first: CanaryReport,
    resumed: bool,
    counted_from: int,
    wall_s: float,
    start_up_s: float,
    warnings: Sequence[RunWarning],
) -> Summary:
    """Returns the summary from the lines of `metrics.jsonl`. `first`: of the version that this process began with,
    which has no line where the run begins with it. `counted_from`: the first step that the totals count."""
    steps = sorted((line for line in lines if REWARD in line), key=lambda line: line[STEP])
    evaluations = {int(line[STEP]): line for line in lines if REWARD not in line}
    counted = [line for line in steps if line[STEP] >= counted_from]
    served = {int(line[STEP]) for line in steps if "policy/canary_max_abs" in line} | {first.version}
    mismatches = [line["policy/mismatch_max_lag0"] for line in counted if "policy/mismatch_max_lag0" in line]

    def total(key: str) -> float:
        return sum(line.get(key, 0.0) for line in counted)

    def evaluated(key: str) -> float:
        return sum(line[key] for line in evaluations.values())

    def accuracy(version: int) -> float | None:
        return evaluations.get(version, {}).get("eval/accuracy")

    ordered, last = sorted(evaluations.items()), max(served)
    return Summary(
        run_id=run_id,
        steps=last,
        accuracy_before=accuracy(0),
        accuracy_after=accuracy(last),
        accuracies={
            str(version): {k.removeprefix(ACCURACY): v for k, v in line.items() if k.startswith(ACCURACY)}
            for version, line in ordered
        },
        evaluations={str(version): {k: v for k, v in line.items() if k != STEP} for version, line in ordered},
        evaluations_failed=int(evaluated("eval/failed")),
        reward_first=steps[0][REWARD],
        reward_last=steps[-1][REWARD],
        wall_s=wall_s,
        seconds={
            "start_up": start_up_s,
            **{name: total(f"time/{name}_s") for name in ("generate", "train", "publish")},
            "load": total("time/load_s") + (0.0 if resumed else first.load_s),
            "evaluate": evaluated("time/evaluate_s"),
        },
        tokens={
            **{name: int(total(f"perf/{name}_tokens")) for name in ("generate", "train")},
            "evaluate": int(evaluated("eval/num_tokens")),
        },
        rollouts_per_s=ledger.num_issued / max(total("time/generate_s"), 1e-9),
        versions_served=tuple(sorted(served | {0} if resumed else served)),
        rollouts_issued=ledger.num_issued,
        rollouts_trained=ledger.num_trained,
        rollouts_dropped=dict(ledger.num_dropped),
        canary_max_abs=max([first.canary_max_abs, *(line.get("policy/canary_max_abs", 0.0) for line in steps)]),
        canary_base_max_abs=max(
            [first.canary_base_max_abs, *(line.get("policy/canary_base_max_abs", 0.0) for line in steps)]
        ),
        mismatch_max_lag0=max(mismatches, default=None),
        warnings=[msgspec.to_builtins(one) for one in warnings],
    )

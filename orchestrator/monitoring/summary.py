"""The summary of a finished run: `summary.json`, and the same as a table."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.evaluate import MEASURE
from transport.folders import write_atomic

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What came of a run. Phases overlap where sampling runs ahead of training."""

    run_id: str
    steps: int
    """Optimizer steps."""
    accuracy_before: float | None
    """Held out, version 0, the mean over environments; null where it was not evaluated."""
    accuracy_after: float | None
    """The same of the last version."""
    accuracies: Mapping[str, Mapping[str, float]]
    """By version and environment."""
    evaluations: Mapping[str, Mapping[str, float]]
    """All that each evaluation has found, by version and metric. Not in the table."""
    evaluations_failed: int
    """Held-out answers that could not be scored, over all evaluations; they count as wrong."""
    reward_first: float
    """Mean reward of the first batch."""
    reward_last: float
    """Mean reward of the last batch."""
    wall_s: float
    """From the orchestrator's start to the summary."""
    seconds: Mapping[str, float]
    """By phase: start_up, generate, train, publish, load, evaluate."""
    tokens: Mapping[str, int]
    """By phase: generate (sampled), train (packed, prompts included), evaluate (sampled)."""
    rollouts_per_s: float
    """Rollouts a second of sampling."""
    versions_served: tuple[int, ...]
    """Versions that every server proved by the canary."""
    rollouts_issued: int
    rollouts_trained: int
    rollouts_dropped: Mapping[str, int]
    """By reason."""
    canary_max_abs: float
    """Largest difference between trainer and servers at the canary, over all versions, in nats."""
    mismatch_max_lag0: float | None
    """Largest difference between trainer and server at a trained token of lag 0, in nats."""
    reports_lost: int = 0
    """Reports to Weights & Biases that have not arrived."""

    def write(self, path: Path) -> None:
        """As JSON, whole or not at all."""
        write_atomic(path, json.dumps(asdict(self), indent=2).encode() + b"\n")

    def print(self) -> None:
        """As a table on standard output."""
        from rich.console import Console
        from rich.table import Table

        table = Table(title=f"run {self.run_id}", show_header=False)
        for name, value in asdict(self).items():
            if name not in ("run_id", "evaluations"):
                table.add_row(name.replace("_", " "), _shown(name, value))
        Console().print(table)
        for measures in self._before_and_after():
            Console().print(measures)

    def _before_and_after(self) -> Iterator["Table"]:
        """For each environment whose rubric measures more than one thing: what each was at the first evaluation and at
        the last one."""
        from rich.table import Table

        if len(self.evaluations) < 2:
            return
        (first, before), *_, (last, after) = self.evaluations.items()
        names = [key.removeprefix(MEASURE).rpartition("/") for key in after if key.startswith(MEASURE)]
        for env in dict.fromkeys(env for *_, env in names):
            own = [name for name, _, of in names if of == env]
            if len(own) < 2:
                continue
            table = Table("measure", f"version {first}", f"version {last}", title=f"{env}, held out")
            for name in own:
                key = f"{MEASURE}{name}/{env}"
                table.add_row(name, *(_shown("", found.get(key, "")) for found in (before, after)))
            yield table


def _shown(name: str, value: object) -> str:
    if name == "versions_served" and isinstance(value, tuple):
        return f"{len(value)}: {value[0]} to {value[-1]}" if value else "none"
    if isinstance(value, Mapping):
        return "\n".join(f"{key}: {_shown('', inner)}" for key, inner in value.items()) or "none"
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value if value is not None else "not evaluated")

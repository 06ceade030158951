"""The figures of the runs of a comparison, as a table, as a picture and as JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo.orchestrator.monitoring.timeline import SERVERS, Span, covered_s, read_timeline
from grpo.run import Run
from grpo.run_files import REWARD, SUMMARY_FILE
from grpo.transport.folders import write_atomic
from grpo.transport.logs import printable

if TYPE_CHECKING:
    import pandas as pd

_HELD_OUT = ("eval/accuracy/", "eval/reward/", "eval/measure/")
_MEANS = {
    "reward, last quarter": REWARD,
    "errors a rollout, last quarter": "rollout/step_errors",
    "loss, last quarter": "loss/total",
    "  of the policy": "loss/policy",
    "  of hints": "loss/sdpo",
    "  of pairs": "loss/dpo",
    "share of the gradient: policy": "optim/grad_share_policy",
    "  hints": "optim/grad_share_sdpo",
    "  pairs": "optim/grad_share_dpo",
    "divergence from the hinted policy": "policy/sdpo_divergence",
    "pairs preferred rightly": "policy/dpo_accuracy",
    "KL to the teacher": "policy/teacher_kl",
}
"""Figures that are means over the last quarter of the steps, of those steps that have the metric."""
_SUMS = {
    "errors that could have hints": "hints/errors",
    "hints given": "hints/given",
    "pairs made": "pairs/made",
    "pairs trained": "policy/dpo_pairs",
}
"""Figures that are sums over all steps."""
_COSTS = ("pairs/cost", "hints/model_cost")
"""Metrics of the money that was spent until a step."""
_STEP_TIMES = {
    "generating a batch, s, mean": "time/generate_s",
    "training a step, s, mean": "time/train_s",
    "weight sync, s, mean": "time/load_s",
}
"""Figures that are mean times of one step's parts."""
Runs = Mapping[str, Sequence[tuple[int | None, Path]]]
"""Seed and folder of the runs of each arm."""


def report(runs: Runs, folder: Path) -> None:
    """Measures finished runs, writes figures and a picture to `folder`, and prints the table."""
    import pandas as pd

    arms: dict[str, Any] = {}
    for name, own in runs.items():
        figures = [measured(Run(path)) for _, path in own]
        done = zip(own, figures, strict=True)
        frame = pd.DataFrame(figures, columns=_ordered(figures))
        arms[name] = {
            "runs": [{"seed": seed, "folder": str(path), "figures": one} for (seed, path), one in done],
            "mean": frame.mean().to_dict(),
            "deviation": frame.std().dropna().to_dict(),
        }
    write_atomic(folder / SUMMARY_FILE, json.dumps({"arms": arms}, indent=1).encode() + b"\n")
    plot_curves(folder / "curves.png", runs)
    _print_table(arms)
    print(f"figures in {folder / SUMMARY_FILE}, curves in {folder / 'curves.png'}; timelines: grpo view {folder}")


# --- figures ---


def measured(run: Run) -> dict[str, float]:
    """Returns the figures of a finished run by their titles; a figure that the run does not have is absent."""
    steps, summary = run.metrics, run.summary or {}
    last = steps.tail(max(1, len(steps) // 4))
    found = _held_out(run.evaluations) | _titled(last.mean(), _MEANS)
    found |= _titled(last.sem(), {"reward, its standard error": REWARD}) | _titled(steps.sum(), _SUMS)
    if costs := [key for key in _COSTS if key in steps]:
        found["cost of teachers"] = float(steps[costs].max().sum())
    return found | _times(run.folder, steps) | {f"tokens, {phase}": n for phase, n in summary.get("tokens", {}).items()}


def _titled(figures: "pd.Series[float]", titles: Mapping[str, str]) -> dict[str, float]:
    """Returns the figures that are there, by title."""
    found = figures.reindex(list(titles.values())).set_axis(list(titles)).dropna()
    return {str(title): float(figure) for title, figure in found.items()}


def _ordered(several: Sequence[Mapping[str, float]]) -> list[str]:
    """Returns the titles of all, with those that only some have after the ones that they follow there."""
    names: list[str] = []
    for one in several:
        place = 0
        for name in one:
            if name not in names:
                names.insert(place, name)
            place = names.index(name) + 1
    return names


def _held_out(evaluations: "pd.DataFrame") -> dict[str, float]:
    """Returns accuracies, rewards and measures of each environment under the first and the last evaluated version, and
    of eight or more evaluations the mean accuracy of the quarter, after the first one, in which it was lowest."""
    if len(evaluations) < 2:
        return {}
    first, final, num = evaluations.iloc[0].dropna(), evaluations.iloc[-1].dropna(), len(evaluations) // 4
    return {
        f"{key.removeprefix('eval/')} {when}": float(evaluation[key])
        for key in sorted(final.index)
        if key.startswith(_HELD_OUT)
        for when, evaluation in (("before", first), ("after", final))
        if key in evaluation
    } | {
        f"{key.removeprefix('eval/')}, lowest quarter": float(evaluations[key].iloc[num:].rolling(num).mean().min())
        for key in sorted(final.index)
        if key.startswith("eval/accuracy/") and num > 1
    }


def _times(folder: Path, steps: "pd.DataFrame") -> dict[str, float]:
    """Returns the times between version 0 being live and the last version being live, without start-up and the last
    evaluation."""
    spans = training(read_timeline(folder), last=max(steps.index, default=0))
    of = {what: [span for span in spans if span.what == what] for what in ("busy", "train", "wait")}
    if not (of["busy"] and of["train"]):
        return {}
    wall_s = max(span.end_s for span in spans) - spans[0].start_s
    generate_s, train_s = covered_s([span for span in of["busy"] if span.who == SERVERS]), covered_s(of["train"])
    num = steps["rollout/num"]
    figures = {
        "wall time, s": wall_s,
        "seconds a step, median": steps["time/step_s"].median(),
        "generating, s": generate_s,
        "training, s": train_s,
        "trainer waits, s": covered_s([span for span in of["wait"] if span.step != steps.index[0]]),
        "wall / longer of generating and training": wall_s / max(generate_s, train_s),
        **_titled(steps.mean(), _STEP_TIMES),
        "weight syncs": len({span.step for span in spans if span.what == "load"} - {0}),
        "rollouts": num.sum(),
        "rollouts a second": num.sum() / wall_s,
        "sampled tokens a second": (steps["rollout/num_tokens_mean"] * num).sum() / wall_s,
        "lag, mean": (steps["policy/lag_mean"] * num).sum() / num.sum(),
        "lag, largest": steps["policy/lag_max"].max(),
    }
    return {title: float(figure) for title, figure in figures.items()}


def training(spans: Sequence[Span], *, last: int) -> list[Span]:
    """Returns the spans between version 0 being live, with which the first one begins, and version `last` being
    live."""
    starts_s = [span.end_s for span in spans if span.what == "load" and span.step == 0]
    ends_s = [span.end_s for span in spans if span.what == "load" and span.step == last]
    if not (starts_s and ends_s):
        return []
    start_s, end_s = max(starts_s), max(ends_s)
    inside = [
        replace(span, start_s=max(start_s, span.start_s), end_s=min(end_s, span.end_s))
        for span in spans
        if span.start_s <= end_s and span.end_s >= start_s
    ]
    return sorted(inside, key=lambda span: span.start_s)


# --- table and picture ---


def _print_table(arms: Mapping[str, Any]) -> None:
    """Prints a row for each figure, a column for each arm and, of two arms, the second divided by the first."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    num = max(len(arm["runs"]) for arm in arms.values())
    ratio = " / ".join(reversed(list(arms))) if len(arms) == 2 else None
    title = f"mean ± standard deviation over {num} seeds" if num > 1 else None
    table = Table("", *arms, *([ratio] if ratio else []), title=title)
    for name in _ordered([arm["mean"] for arm in arms.values()]):
        cells = [_shown(arm, name) for arm in arms.values()]
        if ratio:
            one, two = (arm["mean"].get(name) for arm in arms.values())
            cells.append(f"{two / one:.2f}" if one and two is not None else "")
        table.add_row(Text(printable(name)), *cells)
    Console().print(table)


def _shown(arm: Mapping[str, Any], name: str) -> str:
    if name not in arm["mean"]:
        return ""
    form = "{:,.0f}" if abs(arm["mean"][name]) >= 1000 else "{:.4g}"
    deviation = arm["deviation"].get(name)
    return form.format(arm["mean"][name]) + ("" if deviation is None else f" ± {deviation:.2g}")


def plot_curves(path: Path, runs: Runs) -> None:
    """Draws rewards by step, the mean over an arm's seeds and their range; below, held-out accuracy by policy
    version. Writes a PNG."""
    import pandas as pd
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 7), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    for number, (name, folders) in enumerate(runs.items()):
        color, own = f"C{number % 10}", [Run(folder) for _, folder in folders]
        for axes, key, mark, frames in (
            (above, REWARD, "-", [run.metrics for run in own]),
            (below, "eval/accuracy", "o--", [run.evaluations for run in own]),
        ):
            if curves := [frame[key].dropna() for frame in frames if key in frame]:
                by_step = pd.concat(curves, axis=1).sort_index()
                axes.plot(by_step.index, by_step.mean(axis=1), mark, color=color, label=name)
                axes.fill_between(by_step.index, by_step.min(axis=1), by_step.max(axis=1), color=color, alpha=0.2)
    for axes, title in ((above, "reward, mean of the batch"), (below, "held-out accuracy")):
        axes.set_ylabel(title)
        axes.grid(alpha=0.3)
    figure.legend(*above.get_legend_handles_labels(), loc="outside right upper")
    below.set_xlabel("step")
    figure.savefig(path)

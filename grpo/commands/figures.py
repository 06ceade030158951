"""The figures of the runs of a comparison, as a table, as pictures and as JSON."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo.orchestrator.monitoring.timeline import SERVERS, Span, covered_s, read_timeline
from grpo.run_files import REWARD, STEP, SUMMARY_FILE, metrics, read
from grpo.transport.folders import write_atomic
from grpo.transport.logs import printable

NUM_PICTURED = 10
"""So many steps of the first arm fill the picture of who did what when."""
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
"""What was spent until a step."""
COLOURS = {
    "generate": "tab:green",
    "busy": "lightgreen",
    "load": "tab:olive",
    "sleep": "lavender",
    "ship": "tab:purple",
    "evaluate": "tab:cyan",
    "wait": "lightgrey",
    "train": "tab:blue",
    "publish": "tab:orange",
}
"""What is drawn of who did what when, from the back to the front."""
Runs = Mapping[str, Sequence[tuple[int | None, Path]]]
"""Seed and folder of the runs of each arm."""


def report(runs: Runs, folder: Path) -> None:
    """Measures finished runs, writes figures and pictures to `folder`, and prints the table."""
    arms: dict[str, Any] = {}
    for name, own in runs.items():
        figures = [measured(path) for _, path in own]
        done = zip(own, figures, strict=True)
        arms[name] = {"runs": [{"seed": seed, "folder": str(path), "figures": one} for (seed, path), one in done]}
        names = _ordered(figures)
        values = {key: [one[key] for one in figures if key in one] for key in names}
        arms[name]["mean"] = {key: statistics.fmean(some) for key, some in values.items()}
        arms[name]["deviation"] = {key: statistics.stdev(some) for key, some in values.items() if len(some) > 1}
    write_atomic(folder / SUMMARY_FILE, json.dumps({"arms": arms}, indent=1).encode() + b"\n")
    plot_curves(folder / "curves.png", runs)
    plot_gantt(folder / "gantt.png", runs)
    _print_table(arms)
    print(f"figures in {folder / SUMMARY_FILE}, pictures in {folder / 'curves.png'} and {folder / 'gantt.png'}")


# --- figures ---


def measured(folder: Path) -> dict[str, float]:
    """The figures of a finished run by their titles; what it does not have is absent."""
    steps = [record for record in metrics(folder) if REWARD in record]
    summary = read(folder / SUMMARY_FILE, dict[str, Any]) or {}
    last = steps[-max(1, len(steps) // 4) :]
    rewards = [record[REWARD] for record in last]
    found = _held_out(summary.get("evaluations", {}))
    for title, key in _MEANS.items():
        if some := [record[key] for record in last if key in record]:
            found[title] = statistics.fmean(some)
    if len(rewards) > 1:
        found["reward, its standard error"] = statistics.stdev(rewards) / math.sqrt(len(rewards))
    for title, key in _SUMS.items():
        if some := [record[key] for record in steps if key in record]:
            found[title] = math.fsum(some)
    costs = [max(spent) for key in _COSTS if (spent := [record[key] for record in steps if key in record])]
    if costs:
        found["cost of teachers"] = math.fsum(costs)
    return found | _times(folder, steps) | {f"tokens, {phase}": n for phase, n in summary.get("tokens", {}).items()}


def _ordered(several: Sequence[Mapping[str, float]]) -> list[str]:
    """The titles of all, those that only some have beside the ones that they follow there."""
    names: list[str] = []
    for one in several:
        place = 0
        for name in one:
            if name not in names:
                names.insert(place, name)
            place = names.index(name) + 1
    return names


def _held_out(evaluations: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Accuracies, rewards and measures of each environment, by the first and by the last version that was evaluated."""
    if len(evaluations) < 2:
        return {}
    first, *_, final = evaluations.values()
    return {
        f"{key.removeprefix('eval/')} {when}": evaluation[key]
        for key in sorted(final)
        if key.startswith(_HELD_OUT)
        for when, evaluation in (("before", first), ("after", final))
        if key in evaluation
    }


def _times(folder: Path, steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Between version 0 being live and the last version being live, start-up and the last evaluation left out."""
    spans = training(read_timeline(folder), last=int(steps[-1][STEP]) if steps else 0)
    of = {what: [span for span in spans if span.what == what] for what in ("busy", "train", "wait")}
    if not (of["busy"] and of["train"]):
        return {}
    wall_s = max(span.end_s for span in spans) - spans[0].start_s
    generate_s, train_s = covered_s([span for span in of["busy"] if span.who == SERVERS]), covered_s(of["train"])
    num = [record["rollout/num"] for record in steps]
    tokens = sum(record["rollout/num_tokens_mean"] * n for record, n in zip(steps, num, strict=True))
    steps_s = [record["time/step_s"] for record in steps if "time/step_s" in record]
    return {
        "wall time, s": wall_s,
        "seconds a step, median": statistics.median(steps_s),
        "generating, s": generate_s,
        "training, s": train_s,
        "trainer waits, s": covered_s([span for span in of["wait"] if span.step != steps[0][STEP]]),
        "wall / longer of generating and training": wall_s / max(generate_s, train_s),
        **_of_steps(steps),
        "weight syncs": float(len({span.step for span in spans if span.what == "load"} - {0})),
        "rollouts": sum(num),
        "rollouts a second": sum(num) / wall_s,
        "sampled tokens a second": tokens / wall_s,
        "lag, mean": sum(record["policy/lag_mean"] * n for record, n in zip(steps, num, strict=True)) / sum(num),
        "lag, largest": max(record["policy/lag_max"] for record in steps),
    }


def _of_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean times of one step's parts."""
    found = {}
    for title, key in (("generating a batch", "generate"), ("training a step", "train"), ("weight sync", "load")):
        if some := [record[f"time/{key}_s"] for record in steps if f"time/{key}_s" in record]:
            found[f"{title}, s, mean"] = statistics.fmean(some)
    return found


def training(spans: Sequence[Span], *, last: int) -> list[Span]:
    """What was done between version 0 being live, which the first span begins with, and version `last` being live."""
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


# --- table and pictures ---


def _print_table(arms: Mapping[str, Any]) -> None:
    """A row a figure, a column an arm, and of two arms what the second is divided by the first."""
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
    """Rewards by step, the mean over an arm's seeds and between which values they lie; below, held-out accuracy by
    policy version. Writes a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 7), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    for number, (name, own) in enumerate(runs.items()):
        color = f"C{number % 10}"
        records = [record for _, path in own for record in metrics(path)]
        for axes, key, mark in ((above, REWARD, "-"), (below, "eval/accuracy", "o--")):
            by_step: dict[float, list[float]] = {}
            for record in records:
                if key in record:
                    by_step.setdefault(record[STEP], []).append(record[key])
            steps = sorted(by_step)
            axes.plot(steps, [statistics.fmean(by_step[step]) for step in steps], mark, color=color, label=name)
            if len(own) > 1:
                lowest, highest = ([which(by_step[step]) for step in steps] for which in (min, max))
                axes.fill_between(steps, lowest, highest, color=color, alpha=0.2)
    for axes, title in ((above, "reward, mean of the batch"), (below, "held-out accuracy")):
        axes.set_ylabel(title)
        axes.grid(alpha=0.3)
        axes.legend()
    below.set_xlabel("step")
    figure.savefig(path)


def plot_gantt(path: Path, runs: Runs) -> None:
    """Who did what when in the first steps of each arm's first run: lanes of programs for each arm, all on one axis of
    seconds since version 0 was live. Writes a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(12, 1 + 2 * len(runs)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    window_s = 0.0
    for axes, (name, [(_, folder), *_]) in zip(rows, runs.items(), strict=True):
        steps = [int(record[STEP]) for record in metrics(folder) if REWARD in record]
        spans = training(read_timeline(folder), last=max(steps, default=0))
        # All servers together repeat what each of them did.
        spans = [one for one in spans if one.what in COLOURS and (one.who, one.what) != (SERVERS, "busy")]
        lanes, start_s = sorted({span.who for span in spans}), min((span.start_s for span in spans), default=0.0)
        for span in sorted(spans, key=lambda span: list(COLOURS).index(span.what)):
            bar = (span.start_s - start_s, span.seconds)
            axes.broken_barh([bar], (lanes.index(span.who) - 0.4, 0.8), color=COLOURS[span.what], edgecolor="white")
        wall_s = max((span.end_s for span in spans), default=start_s) - start_s
        window_s = window_s or wall_s * min(1.0, NUM_PICTURED / max(1, len(steps)))
        axes.set_yticks(range(len(lanes)), lanes)
        axes.invert_yaxis()
        axes.set_title(f"{name}: {len(steps)} steps in {wall_s:.1f} s")
    rows[-1].set_xlim(0, window_s or 1.0)
    rows[-1].set_xlabel("seconds")
    figure.legend(
        handles=[Patch(color=colour, label=what) for what, colour in COLOURS.items()],
        ncols=len(COLOURS),
        loc="outside lower center",
    )
    figure.savefig(path)

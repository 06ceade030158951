"""`grpo bench-async FOLDER`: the same training twice, synchronously and asynchronously, and what the difference is."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from deploy.arguments import ROLES, Arguments, parse
from deploy.compare import (
    CannotCompare,
    RunFailed,
    exit_code_of,
    last_quarter,
    make_parser,
    steps_of,
    with_options,
    with_steps,
    write_report,
)
from orchestrator.monitors.timeline import SERVERS, Span, covered_s, read_timeline

DEFAULT_FOLDER = "outputs/bench_async"
REPORT_FILE, PICTURE_FILE = "bench_async.json", "gantt.png"
EQUAL = 0.1
"""The share by which generation may be the longer and still count as equal."""
NUM_CALIBRATION_STEPS = 8
NUM_PICTURED = 10
"""So many steps of the synchronous run fill the picture."""
EQUAL_WITHIN = 0.05
"""Generation and training count as equally long where they differ by no more than this share."""
_DELAYED = "deploy.delayed:Delayed"
_EPILOG = """\
All other options are those of grpo, and hold for both runs; see grpo --help. Both runs have the same seeds and steps.
The synchronous one has max_async_level: 0, the asynchronous one what is configured, at least 1. Evaluation uses the
same servers as training: --orch.eval.num_examples 0 keeps it out of the measurement.

Compared are: the wall time from version 0 being live to the last version being live; the seconds in which any rollout
was sampled or scored, and in which the trainer trained; the staleness (lag) of rollouts; the mean reward of the last
quarter of the steps. The longer of generation and training is each run's own; the ideal is that of the synchronous
run, where neither slows the other.

exit codes: 0 done, 1 a run failed, 2 settings that cannot be honoured, 130 Ctrl-C, 143 SIGTERM"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One run. Seconds are those between version 0 and the last version being live."""

    mode: str
    """`sync` or `async`."""
    max_async_level: int
    steps: int
    wall_s: float
    generate_s: float
    """In which any rollout was sampled or scored."""
    train_s: float
    """In which the trainer computed steps."""
    trainer_waits_s: float
    """In which it waited for batches, the first one's apart."""
    generate_step_s: float
    """Median over the steps, from the start of a batch's first group to the end of its last."""
    train_step_s: float
    """Median over the steps."""
    rollouts: int
    """Trained ones, those that filters withheld from the loss included."""
    sampled_tokens: float
    """Of those rollouts."""
    lag_mean: float
    lag_max: float
    reward_last: float
    """Mean over the last quarter of the steps."""
    reward_stderr: float
    """Standard error of that, from how the steps' means vary."""

    @property
    def longer_s(self) -> float:
        """The longer of generation and training, as they were in this run."""
        return max(self.generate_s, self.train_s)

    @property
    def rollouts_per_s(self) -> float:
        """Of wall time."""
        return self.rollouts / self.wall_s

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens of trained rollouts a second of wall time."""
        return self.sampled_tokens / self.wall_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Both runs."""

    sync: Figures
    asynchronous: Figures
    delay_s: float | None
    """That each reward was made to take longer by, to equalise generation and training; None: not asked for."""

    @property
    def ideal_s(self) -> float:
        """The longer of generation and training, as the synchronous run had them, where neither slows the other."""
        return self.sync.longer_s

    @property
    def imbalance(self) -> float:
        """By what share of the longer of the two generation and training differ in the synchronous run."""
        return 1 - min(self.sync.generate_s, self.sync.train_s) / self.ideal_s

    @property
    def reward_difference(self) -> float:
        """Asynchronous minus synchronous."""
        return self.asynchronous.reward_last - self.sync.reward_last

    @property
    def reward_noise(self) -> float:
        """Two standard errors of the difference."""
        return 2 * math.hypot(self.sync.reward_stderr, self.asynchronous.reward_stderr)

    def fields(self) -> dict[str, Any]:
        """As JSON."""
        runs = {one.mode: asdict(one) | _rates(one, self.ideal_s) for one in (self.sync, self.asynchronous)}
        return {
            **runs,
            "ideal_s": self.ideal_s,
            "imbalance": self.imbalance,
            "speedup": self.sync.wall_s / self.asynchronous.wall_s,
            "reward_difference": self.reward_difference,
            "reward_noise": self.reward_noise,
            "delay_s": self.delay_s,
        }


def _rates(figures: Figures, ideal_s: float) -> dict[str, float]:
    return {
        "rollouts_per_s": figures.rollouts_per_s,
        "tokens_per_s": figures.tokens_per_s,
        "wall_over_longer": figures.wall_s / figures.longer_s,
        "wall_over_ideal": figures.wall_s / ideal_s,
        "efficiency": ideal_s / figures.wall_s,
    }


# --- the command ---


def main(argv: Sequence[str]) -> int:
    """`grpo bench-async`; the exit code."""
    parser = make_parser(
        "bench-async",
        description="Trains twice from the same settings, synchronously and asynchronously, and compares the two.",
        epilog=_EPILOG,
        own_usage="[--equalise]",
        output_dir=DEFAULT_FOLDER,
    )
    parser.add_argument(
        "--equalise",
        action="store_true",
        help="lengthen each reward by sleeping, until generation takes as long as training; measured in short runs",
    )
    own, others = parser.parse_known_args(argv)

    def work() -> None:
        arguments = parse(with_steps(others, own.steps))
        print_table(compare(arguments, own.output_dir, equalise=own.equalise))
        print(f"figures in {own.output_dir / REPORT_FILE}, who did what when in {own.output_dir / PICTURE_FILE}")

    return exit_code_of(work)


def compare(arguments: Arguments, folder: Path, *, equalise: bool) -> Comparison:
    """Runs both, one after the other, in `folder`/sync and `folder`/async, and writes report and picture. Raises
    `CannotCompare`."""
    from configs.common import exit_with_problems
    from configs.errors import SettingsError
    from deploy.plan import resolve

    try:
        orch = resolve(arguments).orch
    except SettingsError as error:
        exit_with_problems(error)
    if orch.max_steps is None:
        raise CannotCompare("both runs need an end; give --steps N")
    level = max(1, orch.max_async_level)
    synchronous = with_options(arguments, "orch", {"max_async_level": 0})
    if orch.oversampling_factor > 1:
        synchronous = with_options(synchronous, "orch", {"oversampling_factor": 1})
    delay_s = None
    if equalise:
        environments = [env.model_dump(mode="json") for env in orch.env]
        delay_s = find_delay(synchronous, folder, environments, batch_size=orch.batch_size)
        delayed = {"env": json.dumps(delayed_by(environments, delay_s))}
        arguments, synchronous = (with_options(one, "orch", delayed) for one in (arguments, synchronous))
    asynchronous = with_options(arguments, "orch", {"max_async_level": level})
    _run(synchronous, folder / "sync")
    _run(asynchronous, folder / "async")
    comparison = Comparison(
        sync=measured(folder / "sync", mode="sync", max_async_level=0),
        asynchronous=measured(folder / "async", mode="async", max_async_level=level),
        delay_s=delay_s,
    )
    report(comparison, folder)
    return comparison


def _run(arguments: Arguments, folder: Path) -> None:
    from deploy.launcher import run
    from deploy.progress import shown

    for role in ROLES:
        arguments = with_options(arguments, role, {"output_dir": folder})
    if exit_code := run(arguments, shown):
        raise RunFailed(exit_code)


# --- generation as long as training ---


def find_delay(
    synchronous: Arguments, folder: Path, environments: Sequence[Mapping[str, Any]], *, batch_size: int
) -> float:
    """Seconds by which each reward must take longer so that a batch's generation takes as long as its training.
    Measured by two short runs in `folder`/calibration_0 and _1; by one, where they are about equal without. Raises
    `CannotCompare` where training is the shorter.
    """
    short = with_options(synchronous, "orch", {"max_steps": NUM_CALIBRATION_STEPS, "eval.num_examples": 0})
    short = with_options(short, "train", {"max_steps": NUM_CALIBRATION_STEPS})

    def steps_with(delay_s: float, name: str) -> Figures:
        delayed = with_options(short, "orch", {"env": json.dumps(delayed_by(environments, delay_s))})
        _run(delayed, folder / name)
        return measured(folder / name, mode="sync", max_async_level=0)

    plain = steps_with(0.0, "calibration_0")
    lacking_s = plain.train_step_s - plain.generate_step_s
    if -EQUAL * plain.train_step_s <= lacking_s <= 0:
        return 0.0  # as long as it is
    if lacking_s < 0:
        raise CannotCompare(
            f"generation takes {plain.generate_step_s:.3g} s a step, training {plain.train_step_s:.3g} s; --equalise "
            "only lengthens generation: leave it out, or lengthen training (gradient_checkpointing, a larger model)"
        )
    first_s = lacking_s / batch_size
    delayed = steps_with(first_s, "calibration_1")
    target_s = (plain.train_step_s + delayed.train_step_s) / 2
    known = {0.0: plain.generate_step_s, first_s: delayed.generate_step_s}
    return delay_for(target_s, known, batch_size=batch_size)


def delay_for(target_s: float, known: Mapping[float, float], *, batch_size: int) -> float:
    """The delay with which generation takes `target_s`. `known`: how long it takes without a delay and with one.

    Between the two it is interpolated. Beyond, all that is added counts, because rewards are computed one after the
    other; the first part of a delay is hidden behind the sampling of other groups.
    """
    (_, plain_s), (delay_s, took_s) = sorted(known.items())
    if target_s >= took_s:
        return delay_s + (target_s - took_s) / batch_size
    return delay_s * max(0.0, target_s - plain_s) / (took_s - plain_s)


def delayed_by(environments: Sequence[Mapping[str, Any]], delay_s: float) -> list[dict[str, Any]]:
    """The same environments by the same names, each reward of which takes `delay_s` seconds more."""
    return [
        {
            **env,
            "id": _DELAYED,
            "name": env["name"] or env["id"],
            "args": {"id": env["id"], "args": env["args"], "delay_s": delay_s},
        }
        for env in environments
    ]


# --- figures ---


def measured(folder: Path, *, mode: str, max_async_level: int) -> Figures:
    """The figures of a finished run, from its timeline and metrics. Raises `CannotCompare`."""
    steps = steps_of(folder)
    spans = training(read_timeline(folder), last=max(steps))
    of = {what: [span for span in spans if span.what == what] for what in ("generate", "busy", "train", "wait", "load")}
    if not (of["generate"] and of["train"] and of["load"]):
        raise CannotCompare(f"{folder} has no timeline of servers and trainer; see its logs")
    last = last_quarter(steps, "reward/mean")
    weights = [metrics["rollout/num"] for metrics in steps.values()]
    tokens = [metrics["rollout/num_tokens_mean"] for metrics in steps.values()]
    lags = [metrics["policy/lag_mean"] for metrics in steps.values()]
    return Figures(
        mode=mode,
        max_async_level=max_async_level,
        steps=len(steps),
        wall_s=max(span.end_s for span in of["load"]) - spans[0].start_s,
        generate_s=covered_s([span for span in of["busy"] if span.who == SERVERS]),
        train_s=covered_s(of["train"]),
        trainer_waits_s=covered_s([span for span in of["wait"] if span.step != min(steps)]),
        generate_step_s=statistics.median(span.seconds for span in of["generate"]),
        train_step_s=statistics.median(span.seconds for span in of["train"]),
        rollouts=int(sum(weights)),
        sampled_tokens=sum(one * num for one, num in zip(tokens, weights, strict=True)),
        lag_mean=sum(lag * num for lag, num in zip(lags, weights, strict=True)) / sum(weights),
        lag_max=max(metrics["policy/lag_max"] for metrics in steps.values()),
        reward_last=statistics.fmean(last),
        reward_stderr=statistics.stdev(last) / math.sqrt(len(last)) if len(last) > 1 else 0.0,
    )


def training(spans: Sequence[Span], *, last: int) -> list[Span]:
    """What was done between version 0 being live, which the first span begins with, and version `last` being live."""
    starts_s = [span.end_s for span in spans if span.what == "load" and span.step == 0]
    ends_s = [span.end_s for span in spans if span.what == "load" and span.step == last]
    if not (starts_s and ends_s):
        return []
    start_s, end_s = max(starts_s), max(ends_s)
    began = Span(who=SERVERS, what="began", start_s=start_s, end_s=start_s)
    inside = [
        replace(span, start_s=max(start_s, span.start_s), end_s=min(end_s, span.end_s))
        for span in spans
        if span.start_s <= end_s and span.end_s >= start_s
    ]
    return [began, *sorted(inside, key=lambda span: span.start_s)]


# --- table, report, picture ---


def report(comparison: Comparison, folder: Path) -> None:
    """Writes the figures as JSON, and the picture."""
    from orchestrator.monitors.gantt import plot_gantt

    write_report(folder / REPORT_FILE, comparison.fields())
    runs = {}
    for name, figures in (("sync", comparison.sync), ("async", comparison.asynchronous)):
        title = f"{name}, max_async_level {figures.max_async_level}: {figures.steps} steps in {figures.wall_s:.1f} s"
        runs[title] = training(read_timeline(folder / name), last=figures.steps)
    step_s = comparison.sync.wall_s / comparison.sync.steps
    plot_gantt(folder / PICTURE_FILE, runs, window_s=step_s * min(NUM_PICTURED, comparison.sync.steps))


def rows(comparison: Comparison) -> list[tuple[str, str, str, str]]:
    """The table: name, synchronous, asynchronous, and asynchronous divided by synchronous."""
    sync, other, ideal_s = comparison.sync, comparison.asynchronous, comparison.ideal_s

    def row(name: str, form: str, one: float, two: float, *, ratio: bool = True) -> tuple[str, str, str, str]:
        return name, form.format(one), form.format(two), f"{two / one:.2f}" if ratio and one else ""

    return [
        row("wall time, s", "{:.1f}", sync.wall_s, other.wall_s),
        row("rollouts a second", "{:,.1f}", sync.rollouts_per_s, other.rollouts_per_s),
        row("sampled tokens a second", "{:,.0f}", sync.tokens_per_s, other.tokens_per_s),
        row("generating, s", "{:.1f}", sync.generate_s, other.generate_s),
        row("training, s", "{:.1f}", sync.train_s, other.train_s),
        row("trainer waits, s", "{:.1f}", sync.trainer_waits_s, other.trainer_waits_s),
        row("generation of a batch, s", "{:.3f}", sync.generate_step_s, other.generate_step_s),
        row("training step, s", "{:.3f}", sync.train_step_s, other.train_step_s),
        row("staleness, mean", "{:.2f}", sync.lag_mean, other.lag_mean, ratio=False),
        row("staleness, largest", "{:.0f}", sync.lag_max, other.lag_max, ratio=False),
        row("reward, last quarter", "{:.3f}", sync.reward_last, other.reward_last, ratio=False),
        row("wall / longer of the two", "{:.2f}", sync.wall_s / sync.longer_s, other.wall_s / other.longer_s),
        row("wall / ideal", "{:.2f}", sync.wall_s / ideal_s, other.wall_s / ideal_s),
        row("efficiency, ideal / wall", "{:.0%}", ideal_s / sync.wall_s, ideal_s / other.wall_s, ratio=False),
    ]


def print_table(comparison: Comparison) -> None:
    """On standard output."""
    from rich.console import Console
    from rich.table import Table

    table = Table("", "sync", "async", "async / sync", title=f"{comparison.sync.steps} steps, both ways")
    for one in rows(comparison):
        table.add_row(*one)
    Console().print(table)
    noise = f"{comparison.reward_difference:+.3f}, two standard errors are {comparison.reward_noise:.3f}"
    print(f"rewards of the last quarter differ by {noise}")
    if comparison.delay_s is not None:
        equal = "equal" if comparison.imbalance <= EQUAL_WITHIN else f"{comparison.imbalance:.0%} apart"
        print(f"each reward took {1e3 * comparison.delay_s:.2f} ms longer; generation and training are {equal}")

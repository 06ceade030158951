"""`grpo report RUN…`: what runs have come to, on one page for a paper or a pull request."""

import argparse
import html
import json
import math
import re
import shlex
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from grpo.commands.status import run_status
from grpo.configs.keys import drop
from grpo.configs.run import PROGRAMS
from grpo.proofs import Page
from grpo.run_files import EVALUATED, REWARD, STEP, SUMMARY_FILE, NoRun, metrics, read, read_run
from grpo.service_proofs import prove
from grpo.transport.errors import UserError
from grpo.transport.folders import write_atomic
from grpo.transport.run import code_changes
from grpo.view.data import find_runs, flat

EPILOG = """\
It reads the runs' folders alone, or copies of them. Runs that differ in nothing but their seeds are one arm: curves and
figures are means over its seeds, with the 95 % interval of Student's t distribution. The file's ending chooses the
format: .html, with curves drawn, or .md. Settings whose names are those of secrets, as api_key, are shown as ***; look
through the page before you publish it, because arguments of environments and prompts are in it.

  grpo report outputs/first                                  outputs/first/report.html
  grpo report outputs/compare/*/* --output report.md

exit codes: 0 the page is written; 2 there is no run, or the command line is wrong"""
PLACES = (
    *("output_dir", "run_id", "resume", "overwrite_output_dir", "resume_with_changed_code", "ckpt.resume_step"),
    *("port", "host", "num_threads", "client.base_url", "rollout_transport.port", "weight_broadcast.port"),
)
"""Settings that say where a run is and not what it does: another one is somewhere else."""
_SECRET = {"key", "token", "secret", "password", "credential", "credentials", "auth", "authorization"}
_NUM_ROWS = 10
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's, which the colour-blind can tell apart."""
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""The 97.5 % quantile of Student's t distribution with 1, 2, … degrees of freedom; beyond these it is near 2.1."""
_STYLE = """\
body{font:16px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem;color:#1a1a1a;background:#fff}
table{border-collapse:collapse;margin:1rem 0;display:block;overflow-x:auto}
th,td{padding:.25rem .75rem;border-bottom:1px solid #ddd;text-align:left;vertical-align:top;
font-variant-numeric:tabular-nums}
pre{background:#f5f5f5;padding:1rem;overflow-x:auto}svg{width:100%;height:auto}svg text{font:12px system-ui,sans-serif}
code{overflow-wrap:anywhere}"""
Row = Sequence[str]
Curve = list[tuple[int, float, float]]
"""Step, mean over the seeds, half of the interval's width."""


@dataclass(frozen=True)
class _Run:
    """What a page says of one run."""

    name: str
    folder: Path

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What differs from the defaults, by program: a run's file."""
        found = {}
        for role, cls in PROGRAMS.items():
            file = self.folder / "settings" / f"{role}.yaml"
            try:
                tree = yaml.safe_load(file.read_text(encoding="utf-8"))
            except (OSError, yaml.YAMLError):  # by hand, without the launcher
                try:
                    recorded = read_run(self.folder).programs.get(role, {})["settings"]
                    tree = cls.model_validate(recorded).model_dump(mode="json", exclude_defaults=True)
                except (KeyError, ValueError):
                    continue
            for key in PLACES:
                drop(tree, key)
                if (section := key.partition(".")[0]) != key and tree.get(section) == {}:
                    drop(tree, section)
            found[role] = _without_secrets(tree)
        return found

    @property
    def seed(self) -> int | None:
        """The one that the run was given, or that it has by default."""
        recorded: dict[str, Any] = read_run(self.folder).programs.get("train", {}).get("settings", {})
        seed: int | None = recorded.get("seed", self.settings.get("train", {}).get("seed"))
        return seed

    @cached_property
    def arm(self) -> str:
        """Equal for runs that differ in nothing but their seeds."""
        without = {
            role: {key: one for key, one in tree.items() if key != "seed"} for role, tree in self.settings.items()
        }
        return json.dumps(without, sort_keys=True, default=str)

    @cached_property
    def lines(self) -> list[dict[str, float]]:
        return metrics(self.folder)

    @cached_property
    def summary(self) -> dict[str, Any]:
        return read(self.folder / SUMMARY_FILE, dict[str, Any]) or {}

    @cached_property
    def proof(self) -> Page | str:
        """The page of `grpo prove`, or why there is none."""
        try:
            return prove(self.folder)
        except (UserError, OSError) as error:
            return str(error)

    def curve(self, key: str) -> dict[int, float]:
        """A metric by step or, of an evaluation, by version."""
        evaluated = key.startswith("eval/")
        return {int(one[STEP]): one[key] for one in self.lines if key in one and (EVALUATED in one) == evaluated}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a run's folder, or a folder of runs")
    parser.add_argument("--output", type=Path, metavar="FILE", help="FILE.html or FILE.md (default: RUN/report.html)")
    parser.add_argument("--title", default="Report", help="the page's title")
    parser.add_argument("--metric", action="append", default=[], metavar="NAME", help="draw this metric, too")


def main(options: argparse.Namespace) -> int:
    """Writes the page, and returns the exit code."""
    found = find_runs(options.runs)
    if not found:
        raise NoRun(f"{options.runs[0]} holds no run; give the output_dir of a run, or a folder with such folders")
    output: Path = options.output or options.runs[0] / "report.html"
    if output.suffix not in (".html", ".md"):
        raise UserError(f"--output {output}: expected a name that ends with .html or .md")
    page = report(found, title=options.title, metrics=options.metric, drawn=output.suffix == ".html")
    write_atomic(output, page.encode())
    print(f"{output}: {len(page) / 1e3:.0f} kB")
    return 0


def report(runs: Mapping[str, Path], *, title: str, metrics: Sequence[str] = (), drawn: bool = True) -> str:
    """Returns the page of these runs: HTML where it is to be `drawn`, else Markdown. Raises `NoRun`, and UserError for
    one of `metrics` that no run has."""
    made = [_Run(name, folder) for name, folder in runs.items()]
    arms: dict[str, list[_Run]] = {}
    for run in made:
        arms.setdefault(run.arm, []).append(run)
    named = {_arm_name(some): some for some in arms.values()}
    keys = [REWARD, "eval/accuracy", *metrics]
    for key in metrics:
        if not any(run.curve(key) for run in made):
            raise UserError(f"--metric {key}: no run has it; `grpo docs metrics` lists what runs have")
    form = HTML if drawn else MARKDOWN
    parts = [
        form.table(("run", "seed", "state", "steps", "reward", "held-out accuracy"), [*map(_outcome, made)]),
        form.table(("what differs", *named), _differences(named)),
        form.heading("Curves"),
    ]
    for key in keys:
        curves = {
            name: curve for name, some in named.items() if (curve := over_seeds([one.curve(key) for one in some]))
        }
        parts += [form.chart(key, curves)] if curves else []
    parts += [
        form.heading("Held out"),
        form.table(("arm", "metric", "before", "after", "seeds"), [*_held_out(named)]),
        form.heading("Proofs"),
        form.table(("run", "verdict", "digest of all files"), [*map(_verdict, made)]),
    ]
    for run in made:
        if isinstance(run.proof, Page):
            rows = [(one.name, one.summary) for one in run.proof.parts]
            parts.append(form.table((f"{run.name}: part", "what grpo prove says"), rows))
    head = ("run", "programs", "versions", "base model", "user's files")
    parts += [
        form.heading("Costs"),
        form.table(("run", *_COSTS), [(run.name, *_costs(run)) for run in made]),
        form.heading("Versions"),
        form.table(head, [row for run in made for row in _versions(run)]),
        form.heading("Settings, and how to repeat it"),
    ]
    for name, some in named.items():
        parts += _repeat(form, name, some)
    return form.page(title, [*filter(None, parts)])


# --- figures ---


def over_seeds(curves: Sequence[Mapping[int, float]]) -> Curve:
    """Returns mean and interval at each step that any of the curves has."""
    steps = sorted(set().union(*curves))
    return [(step, *interval([one[step] for one in curves if step in one])) for step in steps]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean and half the width of its 95 % interval, t · s / √n, which is 0 for a single value."""
    mean, num = statistics.fmean(values), len(values)
    if num < 2:
        return mean, 0.0
    t = _T_95[num - 2] if num - 2 < len(_T_95) else 1.96 + 2.4 / (num - 1)
    return mean, t * statistics.stdev(values) / math.sqrt(num)


def _arm_name(some: Sequence[_Run]) -> str:
    return some[0].name if len(some) == 1 else f"{some[0].name} and {len(some) - 1} more"


def _outcome(run: _Run) -> Row:
    status, rewards, accuracies = run_status(run.folder, count=False), run.curve(REWARD), run.curve("eval/accuracy")
    num = max((int(one[STEP]) for one in run.lines), default=0)
    return run.name, _text(run.seed), status.state, f"{num:,}", _change(rewards), _change(accuracies)


def _change(curve: Mapping[int, float]) -> str:
    if not curve:
        return ""
    first, last = curve[min(curve)], curve[max(curve)]
    return f"{first:.3f}" if len(curve) == 1 else f"{first:.3f} → {last:.3f}"


def _held_out(named: Mapping[str, Sequence[_Run]]) -> Iterable[Row]:
    """Rows of accuracies and rewards under the first and the last evaluated version. The interval is over seeds, or of
    a single run its standard error over the examples, times 1.96."""
    for name, some in named.items():
        found = {key for run in some for line in run.lines for key in line if key.startswith(_EVALUATED)}
        for key in sorted(found):
            cells = []
            for end in (min, max):
                with_it = [(run, curve) for run in some if (curve := run.curve(key))]
                mean, half = interval([curve[end(curve)] for _, curve in with_it])
                if len(with_it) == 1:
                    errors = with_it[0][0].curve(key.replace("eval/accuracy/", "eval/accuracy_stderr/"))
                    half = 1.96 * errors.get(end(with_it[0][1]), 0.0) if key.startswith("eval/accuracy/") else 0.0
                cells.append(f"{mean:.3f}" + (f" ± {half:.3f}" if half else ""))
            yield name, key, *cells, str(len(with_it))


_EVALUATED = ("eval/accuracy/", "eval/reward/")


def _verdict(run: _Run) -> Row:
    return (
        (run.name, run.proof, "")
        if isinstance(run.proof, str)
        else (run.name, run.proof.verdict, run.proof.digest or "")
    )


_COSTS = ("wall, s", "tokens sampled, trained, evaluated", "rollouts issued, trained, dropped", "GPUs", "money")


def _costs(run: _Run) -> Row:
    about, tokens = run.summary, run.summary.get("tokens", {})
    dropped = sum(about.get("rollouts_dropped", {}).values())
    settings = {role: one.get("settings", {}) for role, one in read_run(run.folder).programs.items()}
    gpus = sum(
        one.get("gpus") or one.get("tp", 1) * one.get("dp", 1)
        for one in settings.values()
        if one.get("device") == "cuda"
    )
    money = sum(max(run.curve(key).values(), default=0.0) for key in ("pairs/cost", "hints/model_cost"))
    counted = f"{about.get('rollouts_issued', 0):,}, {about.get('rollouts_trained', 0):,}, {dropped:,}" if about else ""
    return (
        f"{about['wall_s']:,.0f}" if "wall_s" in about else "",
        ", ".join(f"{tokens.get(phase, 0):,}" for phase in ("generate", "train", "evaluate")) if tokens else "",
        counted,
        str(gpus),
        f"{money:.2f}" if money else "",
    )


def _versions(run: _Run) -> Iterable[Row]:
    changed = [
        f"{', '.join(files)} changed after step {step}" for step, files in code_changes(read_run(run.folder)).items()
    ]
    programs = read_run(run.folder).programs
    alike: dict[str, list[str]] = {}
    for role, program in programs.items():
        versions = ", ".join(f"{name} {version}" for name, version in program.get("versions", {}).items())
        alike.setdefault(versions, []).append(role)
    models = {model: None for one in programs.values() if (model := one.get("base_model"))}
    files = {f"{name}: {digest}": None for one in programs.values() for name, digest in one.get("code", {}).items()}
    for number, (versions, roles) in enumerate(alike.items()):
        more = ("", "") if number else ("; ".join(models), "; ".join([*files, *changed]))
        yield run.name, ", ".join(roles), versions, *more


# --- how to repeat it ---


def _differences(named: Mapping[str, Sequence[_Run]]) -> Sequence[Row]:
    """Returns the settings in which arms differ."""
    told = [dict(flat(_one_seed(some[0].settings))) for some in named.values()]
    rows = [(key, *(_text(one.get(key, "default")) for one in told)) for key in sorted(set().union(*told))]
    return [row for row in rows if len(set(row[1:])) > 1]


def _repeat(form: "_Format", name: str, some: Sequence[_Run]) -> list[str]:
    settings = yaml.safe_dump(_one_seed(some[0].settings), sort_keys=False, allow_unicode=True)
    seeds = [[] if one.seed is None else ["--seed", str(one.seed)] for one in some]
    lines = [
        shlex.join(["grpo", "run.yaml", *words, "--output_dir", f"outputs/again-{number}"])
        for number, words in enumerate(seeds, 1)
    ]
    return [
        form.paragraph(
            f"{name}: what differs from the defaults, as a file run.yaml. All other settings are the defaults."
        ),
        form.code(settings),
        form.code("\n".join([*lines, "grpo prove outputs/again-1", "grpo report outputs/again-*"]) + "\n"),
    ]


def _one_seed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings without the seed, which the command line gives."""
    return {role: {key: one for key, one in tree.items() if key != "seed"} for role, tree in settings.items() if tree}


def _without_secrets(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: "***" if _is_secret(str(key), one) else _without_secrets(one) for key, one in tree.items()}
    return [_without_secrets(one) for one in tree] if isinstance(tree, list) else tree


def _is_secret(key: str, value: Any) -> bool:
    """Tells whether a text's name ends as that of a secret, as `api_key`; `key_var` names a variable."""
    return isinstance(value, str) and re.split(r"[^a-z0-9]", key.lower())[-1] in _SECRET


def _text(value: Any) -> str:
    return "" if value is None else str(value)


# --- formats ---


@dataclass(frozen=True, slots=True)
class _Format:
    """How each kind of part of a page is written."""

    heading: Callable[[str], str]
    paragraph: Callable[[str], str]
    code: Callable[[str], str]
    table: Callable[[Row, Sequence[Row]], str]
    """Empty where there are no rows."""
    chart: Callable[[str, Mapping[str, Curve]], str]
    page: Callable[[str, Sequence[str]], str]
    """Takes the title and all parts."""


def _markdown_code(text: str) -> str:
    fence = "`" * max(3, *(len(run) + 1 for run in _ticks(text)))
    return f"{fence}\n{text}{fence}\n"


def _ticks(text: str) -> list[str]:
    return ["", *("".join(one) for one in text.replace("\n", " ").split() if set(one) == {"`"})]


def _markdown_table(head: Row, rows: Sequence[Row]) -> str:
    lines = [[_escaped(cell) for cell in line] for line in (head, *rows)]
    lines.insert(1, ["---"] * len(head))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) if rows else ""


def _escaped(text: str) -> str:
    for mark in "\\`*_|<>[]":
        text = text.replace(mark, f"\\{mark}")
    return text.replace("\n", " ")


def _markdown_chart(key: str, curves: Mapping[str, Curve]) -> str:
    """Returns curves as a table, since a pull request has no place for pictures."""
    steps = sorted({step for curve in curves.values() for step, *_ in curve})
    chosen = dict.fromkeys([*steps[:: math.ceil(len(steps) / _NUM_ROWS)], steps[-1]])
    at = [{step: (mean, half) for step, mean, half in curve} for curve in curves.values()]
    rows = [(f"{step:,}", *(_shown(*one[step]) if step in one else "" for one in at)) for step in chosen]
    return _markdown_table((f"{key} at", *curves), rows)


def _shown(mean: float, half: float) -> str:
    return f"{mean:.4g}" + (f" ± {half:.2g}" if half else "")


MARKDOWN = _Format(
    heading=lambda text: f"## {text}\n",
    paragraph=lambda text: f"{_escaped(text)}\n",
    code=_markdown_code,
    table=_markdown_table,
    chart=_markdown_chart,
    page=lambda title, parts: "\n".join([f"# {_escaped(title)}\n", *parts]),
)
"""As GitHub shows it."""


def _html_table(head: Row, rows: Sequence[Row]) -> str:
    names = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in head)
    lines = ("".join(f"<td>{html.escape(cell)}</td>" for cell in line) for line in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<table tabindex="0"><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>' if rows else ""


def _html_page(title: str, parts: Sequence[str]) -> str:
    title = html.escape(title)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    body = "\n".join([f"<main><h1>{title}</h1>", *parts, "</main>"])
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n'
    )


def _svg(key: str, curves: Mapping[str, Curve]) -> str:
    """Returns a picture of curves with their intervals as bands."""
    left, top, width, height = 64, 28, 800, 260
    points = [one for curve in curves.values() for one in curve if all(map(math.isfinite, one))]
    if not points:
        return ""
    x_min, x_max = min(one[0] for one in points), max(one[0] for one in points)
    y_min, y_max = min(one[1] - one[2] for one in points), max(one[1] + one[2] for one in points)
    x_span, y_span = (x_max - x_min) or 1, (y_max - y_min) or abs(y_max) or 1.0

    def at(step: float, value: float) -> str:
        return f"{left + (step - x_min) / x_span * width:.1f},{top + (1 - (value - y_min) / y_span) * height:.1f}"

    parts = [f'<text x="{left}" y="16" font-weight="600">{html.escape(key)}</text>']
    for part in range(5):
        value, y = y_min + y_span * part / 4, top + height * (1 - part / 4)
        parts.append(f'<line x1="{left}" x2="{left + width}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{value:.3g}</text>')
        x, step = left + width * part / 4, x_min + x_span * part / 4
        parts.append(f'<text x="{x}" y="{top + height + 18}" text-anchor="middle">{step:,.0f}</text>')
    for number, (name, curve) in enumerate(curves.items()):
        color, kept = _COLORS[number % len(_COLORS)], [one for one in curve if all(map(math.isfinite, one))]
        if any(half for *_, half in kept):
            edge = [at(step, mean + half) for step, mean, half in kept]
            edge += [at(step, mean - half) for step, mean, half in reversed(kept)]
            parts.append(f'<polygon points="{" ".join(edge)}" fill="{color}" opacity="0.2"/>')
        line = " ".join(at(step, mean) for step, mean, _ in kept)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        y = top + height + 40 + 18 * number
        parts.append(f'<rect x="{left}" y="{y - 9}" width="10" height="10" fill="{color}"/>')
        last = f"{_shown(*kept[-1][1:])} at {kept[-1][0]:,}" if kept else ""
        parts.append(f'<text x="{left + 16}" y="{y}">{html.escape(name)}: {last}</text>')
    total = top + height + 40 + 18 * len(curves)
    label = html.escape(f"{key} by step", quote=True)
    return f'<svg viewBox="0 0 {left + width + 24} {total}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


HTML = _Format(
    heading=lambda text: f"<h2>{html.escape(text)}</h2>",
    paragraph=lambda text: f"<p>{html.escape(text)}</p>",
    code=lambda text: f'<pre tabindex="0"><code>{html.escape(text)}</code></pre>',
    table=_html_table,
    chart=_svg,
    page=_html_page,
)
"""One file without scripts, which needs no network."""

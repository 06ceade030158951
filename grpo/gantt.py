"""Who did what when, as a picture: a lane for each program, a bar for each span."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.monitoring.timeline import ORCHESTRATOR, SERVERS, TRAINER, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "generate": "tab:green",
    "busy": "lightgreen",
    "load": "tab:olive",
    "sleep": "lavender",
    "pack": "tab:brown",
    "ship": "tab:purple",
    "evaluate": "tab:cyan",
    "wait": "lightgrey",
    "train": "tab:blue",
    "publish": "tab:orange",
}
"""What is drawn, from the back to the front."""
_LONG = ("generate", "wait", "train")
_MAX_LABELS = 40
"""More bars than this in a lane have no numbers: they would cover each other."""


def plot_gantt(path: Path, runs: Mapping[str, Sequence[Span]], *, window_s: float | None = None) -> None:
    """One row of lanes for each of `runs`, by its title, on one axis of seconds since that run's first span. `window_s`
    leaves out what begins later. Writes a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    num_lanes = sum(len(lanes(spans)) for spans in runs.values())
    size = (12, 1.4 + 0.9 * len(runs) + 0.45 * num_lanes)
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(runs), 1, sharex=True, squeeze=False)
    for row, (title, spans) in zip(rows[:, 0], runs.items(), strict=True):
        _draw(row, title, spans, window_s)
    rows[-1, 0].set_xlabel("seconds")
    drawn = {span.what for spans in runs.values() for span in spans if _is_drawn(span)}
    patches = [Patch(color=colour, label=what) for what, colour in COLOURS.items() if what in drawn]
    if patches:
        figure.legend(handles=patches, loc="outside lower center", ncols=len(patches))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def lanes(spans: Sequence[Span]) -> list[str]:
    """Names of the lanes that have something to draw: servers first, then the orchestrator, then the trainer."""
    order = {ORCHESTRATOR: 1, TRAINER: 2}
    return sorted({span.who for span in spans if _is_drawn(span)}, key=lambda who: (order.get(who, 0), who))


def _is_drawn(span: Span) -> bool:
    """Not when all servers together were busy: that repeats generation, without its batches."""
    return span.what in COLOURS and not (span.what == "busy" and span.who == SERVERS)


def _draw(axes: "Axes", title: str, spans: Sequence[Span], window_s: float | None) -> None:
    names = lanes(spans)
    start_s = min((span.start_s for span in spans), default=0.0)
    shown = [one for one in spans if window_s is None or one.start_s - start_s <= window_s]
    for lane, name in enumerate(names):
        mine = [span for span in shown if span.who == name and _is_drawn(span)]
        for depth, (what, colour) in enumerate(COLOURS.items()):
            bars = [span for span in mine if span.what == what]
            # Generation of two batches overlaps: even and odd ones have a half of the lane each.
            halves = [bars[::2], bars[1::2]] if what == "generate" else [bars]
            for half, some in enumerate(halves):
                height = 0.8 / len(halves)
                bottom = lane - 0.4 + half * height
                ranges = [(span.start_s - start_s, span.seconds) for span in some]
                edge = "white" if what in _LONG else colour  # a white edge would hide what is narrow
                axes.broken_barh(
                    ranges, (bottom, height), facecolors=colour, edgecolor=edge, linewidth=0.4, zorder=2 + depth
                )
                if what in ("generate", "train") and len(bars) <= _MAX_LABELS:
                    _number(axes, some, start_s, bottom + height / 2)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_title(title)
    axes.grid(axis="x", alpha=0.3)
    if window_s is not None:
        axes.set_xlim(0, window_s)


def _number(axes: "Axes", spans: Sequence[Span], start_s: float, height: float) -> None:
    for span in spans:
        middle_s = (span.start_s + span.end_s) / 2 - start_s
        axes.text(
            middle_s,
            height,
            str(span.step),
            ha="center",
            va="center",
            fontsize=6,
            color="white",
            zorder=20,
            clip_on=True,
        )

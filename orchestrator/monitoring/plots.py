"""The reward curve as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path


def plot_rewards(
    path: Path,
    *,
    steps: Sequence[int],
    rewards: Sequence[float],
    held_out: Mapping[str, Mapping[int, tuple[float, float]]],
    title: str,
) -> None:
    """Mean reward of each step's batch; by environment and policy version, held-out accuracy with its standard error.
    Writes a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(steps, rewards, label="reward, mean of the batch", color="tab:blue")
    for number, (env, points) in enumerate(held_out.items(), start=1):
        versions = sorted(points)
        values, errors = zip(*(points[version] for version in versions), strict=True)
        label, color = f"held-out accuracy, {env}", f"C{number % 10}"
        axes.errorbar(versions, values, yerr=errors, fmt="o--", capsize=2, label=label, color=color)
    axes.set_xlabel("step")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)

"""The reward curve as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path


def plot_rewards(
    path: Path, *, steps: Sequence[int], rewards: Sequence[float], accuracies: Mapping[int, float], title: str
) -> None:
    """Mean reward of each step's batch, and held-out accuracy by policy version. Writes a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(steps, rewards, label="reward, mean of the batch", color="tab:blue")
    if accuracies:
        versions = sorted(accuracies)
        values = [accuracies[version] for version in versions]
        axes.plot(versions, values, "o--", label="held-out accuracy, greedy", color="tab:orange")
    axes.set_xlabel("step")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)

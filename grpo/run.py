"""`grpo.Run`: a run from Python, one that was just started or any run folder."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo.commands.status import RunStatus, run_status, shown
from grpo.run_files import EVALUATED, REWARD, STEP, SUMMARY_FILE, metrics, read, read_run
from grpo.transport.extras import check_installed, is_installed
from grpo.transport.logs import printable
from grpo.transport.parent import PARENT_VAR
from grpo.transport.run import code_changes
from grpo.transport.status import FAILED, FINISHED, STOPPED
from grpo.transport.traces import trace_path, traced_steps

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

LOG_FILE = "grpo.log"
"""File in the run's folder with the output of `grpo`, where the run was started from Python."""
GRPO = (sys.executable, "-P", "-m", "grpo.cli")
POLL_S = 0.2
DRAW_S = 2.0
"""Seconds between two drawings of a live curve, where there is a new step."""
END_S = 30.0
"""Longest time that a run may take to end once it is told to."""
_ACCURACY = "eval/accuracy/"


class RunFailed(RuntimeError):
    """A run, or a command on it, that has ended with an error; the message is the last one on its screen."""


def command(*words: str) -> str:
    """Runs a `grpo` command to its end, and returns what it prints. Raises ValueError where its words make no sense,
    and `RunFailed`, with what it says."""
    variables = {**os.environ, PARENT_VAR: str(os.getpid())}
    done = subprocess.run([*GRPO, *words], capture_output=True, text=True, env=variables)
    if done.returncode:
        raise (ValueError if done.returncode == 2 else RunFailed)(done.stderr.strip())
    return done.stdout


class Run:
    """A run, living or ended.

    Example::

        run = grpo.Run("outputs/quickstart")
        run.metrics["reward/mean"].plot()
        run.rollouts(60)[["reward", "messages"]]
    """

    def __init__(self, folder: str | Path, *, process: "subprocess.Popen[bytes] | None" = None) -> None:
        """Opens the run in `folder` (its `output_dir`). `process` is the `grpo` that runs it, where it was started
        here. Raises `NoRun`, a ValueError, for a folder without a run."""
        self.folder = Path(folder)
        self._process = process
        if process is None:
            read_run(self.folder)

    # --- what it has come to ---

    @property
    def metrics(self) -> "pd.DataFrame":
        """One row a training step, by step, with a column for each metric of `grpo docs metrics`."""
        return _frame([one for one in metrics(self.folder) if EVALUATED not in one], "step")

    @property
    def evaluations(self) -> "pd.DataFrame":
        """One row an evaluation, by the policy version that was evaluated."""
        return _frame([one for one in metrics(self.folder) if EVALUATED in one], "version")

    def rollouts(self, step: int, *, evaluation: bool = False) -> "pd.DataFrame":
        """Every rollout of a step's batch, or of the `evaluation` of version `step`, token by token: the columns of
        `grpo docs traces`. Raises ValueError for a step of which no trace is there."""
        pandas = _pandas()
        if not (path := trace_path(self.folder, step, evaluation=evaluation)).is_file():
            there = traced_steps(self.folder, evaluation=evaluation)
            raise ValueError(f"{path} is not there; there are traces of {there or 'none'}")
        table: pd.DataFrame = pandas.read_parquet(path)
        return table

    @property
    def summary(self) -> dict[str, Any] | None:
        """The figures at the end, as in `summary.json`; None before it."""
        return read(self.folder / SUMMARY_FILE, dict[str, Any])

    @property
    def status(self) -> RunStatus:
        """The state of each program, and who waits for whom. Raises `NoRun`."""
        return run_status(self.folder)

    @property
    def log(self) -> str:
        """The output of `grpo`; empty where the run was not started from Python."""
        try:
            return (self.folder / LOG_FILE).read_text(errors="replace")
        except OSError:
            return ""

    def plot(self, *keys: str) -> "Figure":
        """Draws metrics by step, the mean reward of each batch and held-out accuracies where no `keys` are given.
        Returns a matplotlib figure, which a notebook shows. Raises ValueError for a metric that the run has not."""
        return _curves(self, keys)

    def export(self, output: str | Path, *, step: int | None = None, merged: bool = False) -> Path:
        """Writes the version of `step`, None for the newest, to the folder `output`: a PEFT adapter, or a whole model
        where it is to be `merged`. Returns the folder. Raises `RunFailed` where the version is not there any more."""
        words = [] if step is None else [f"--step={step}"]
        words += ["--merged"] if merged else []
        return Path(command("export", str(self.folder), f"--output={output}", *words).splitlines()[-1])

    # --- while it goes on ---

    @property
    def is_running(self) -> bool:
        """True until the run has ended."""
        if self._process is not None:
            return self._process.poll() is None
        return self.status.state not in (FINISHED, FAILED, STOPPED)

    def wait(self, timeout_s: float | None = None) -> "Run":
        """Waits for the end, and shows the run meanwhile: a live curve in a notebook that has the extra `plots`, else
        what `grpo` shows.
        Returns the run itself. Interrupting it stops the waiting, not the run.

        Raises `RunFailed` where the run has failed, and TimeoutError after `timeout_s` seconds.
        """
        deadline_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        with _live_curve(self) if _in_notebook() and is_installed("plots") else shown(self.folder) as tick:
            while self.is_running:
                if time.monotonic() >= deadline_s:
                    raise TimeoutError(f"{self.folder} has not ended after {timeout_s:g} s: {self.status.waits}")
                tick()
                time.sleep(POLL_S)
        self.check()
        return self

    def check(self) -> None:
        """Raises `RunFailed` where the run has ended with an error."""
        if self._process is None:
            if (status := self.status).state in (FAILED, STOPPED):
                raise RunFailed(printable(f"{self.folder}: {status.waits}"))
        elif self._process.poll():
            lines = self.log.splitlines()
            errors = [number for number, line in enumerate(lines) if line.startswith("error: ")]
            told = "\n".join(lines[errors[0] :] if errors else lines[-20:])
            raise RunFailed(printable(f"{self.folder}: grpo ended with exit code {self._process.returncode}\n{told}"))

    def stop(self) -> None:
        """Ends a run that was started here, as Ctrl-C ends the command; the same call of `train` goes on with it.
        Raises ValueError for a run that was started elsewhere."""
        if self._process is None:
            raise ValueError(f"{self.folder} was not started here; end the grpo that runs it")
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(END_S)

    def __repr__(self) -> str:
        """One line: the folder, the state, the newest step and its reward."""
        steps = [one for one in metrics(self.folder) if REWARD in one]
        newest = f", step {steps[-1][STEP]:.0f}, reward {steps[-1][REWARD]:.3f}" if steps else ""
        return f"<grpo.Run {self.folder}: {'running' if self.is_running else 'ended'}{newest}>"


def _pandas() -> Any:
    check_installed("plots", "a table of grpo.Run")
    import pandas

    return pandas


def _frame(records: list[dict[str, float]], index: str) -> "pd.DataFrame":
    frame: pd.DataFrame = (
        _pandas().DataFrame(records, columns=None if records else [STEP]).rename(columns={STEP: index})
    )
    return frame.astype({index: int}).set_index(index)


def _curves(run: Run, keys: tuple[str, ...]) -> "Figure":
    check_installed("plots", "a figure of grpo.Run")
    from matplotlib.figure import Figure

    class Shown(Figure):
        """A figure that a notebook shows without pyplot."""

        def _repr_png_(self) -> bytes:
            return _png(self)

    steps, evaluations = run.metrics, run.evaluations
    if unknown := [key for key in keys if key not in steps and key not in evaluations]:
        raise ValueError(
            f"{run.folder} has no metric {unknown[0]!r}; there are {', '.join(map(str, [*steps, *evaluations]))}"
        )
    figure = Shown(figsize=(7, 4), dpi=100, layout="constrained")
    axes = figure.subplots()
    for frame, mark, chosen in (
        (steps, "-", [key for key in keys or (REWARD,) if key in steps]),
        (evaluations, "o--", [key for key in evaluations if (key in keys if keys else str(key).startswith(_ACCURACY))]),
    ):
        for key in chosen:
            axes.plot(frame.index, frame[key], mark, label=key)
    for step, files in code_changes(read_run(run.folder)).items():
        axes.axvline(
            step, color="tab:red", linestyle=":", label=f"changed: {', '.join(Path(one).name for one in files)}"
        )
    axes.set_xlabel("step")
    axes.set_title(str(run.folder))
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    return figure


def _png(figure: "Figure") -> bytes:
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()


def _in_notebook() -> bool:
    """Returns whether this process is a notebook's kernel."""
    shell: Any = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell is not None and hasattr(shell, "kernel")


@contextlib.contextmanager
def _live_curve(run: Run) -> Iterator[Callable[[], None]]:
    """Shows the run's curve in a notebook's cell, and draws it again when there are new steps. The caller calls what it
    yields often."""
    import IPython.display as ipython  # without types

    show: Any = ipython

    def picture() -> Any:
        return show.Image(data=_png(run.plot()))

    handle = show.display(picture(), display_id=True)
    drawn, next_s = 0, 0.0

    def tick(*, last: bool = False) -> None:
        nonlocal drawn, next_s
        if time.monotonic() < next_s and not last:
            return
        next_s, num_lines = time.monotonic() + DRAW_S, len(metrics(run.folder))
        if num_lines != drawn:
            drawn = num_lines
            handle.update(picture())

    try:
        yield tick
    finally:
        tick(last=True)

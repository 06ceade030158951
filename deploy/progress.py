"""What a run is doing, read from its folder and shown: a live table on a terminal, otherwise one line a step."""

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self
from urllib.parse import urlsplit

import yaml
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from transport.status import AWAY, read_status

REFRESH_S = 0.5
_PROBE_S = 0.1
# Title, key in metrics.jsonl, format.
_STEP = "progress/step"
_COLUMNS = (
    ("reward", "reward/mean", "{:.3f}"),
    ("tokens/s", "perf/generate_tokens_per_s", "{:,.0f}"),
    ("policy", "policy/version", "v{:.0f}"),
    ("lag", "policy/lag_mean", "{:.2f}"),
    ("seconds", "time/step_s", "{:.2f}"),
)
_ACCURACY = "eval/accuracy/"


class RunView:
    """Follows the run folder. `address` is where the server will answer, and `server_status` the name of the file in
    which the launcher says that it is away."""

    def __init__(
        self, folder: Path, *, max_steps: int | None, address: tuple[str, int], server_status: str = "infer.json"
    ) -> None:
        self.folder, self.max_steps, self._address = folder, max_steps, address
        self._server_status = folder / "status" / server_status
        self.started_s = time.monotonic()
        self.last_step: dict[str, float] = {}
        """The newest step's metrics; empty before the first."""
        self.last_evaluation: dict[str, float] = {}
        """The newest evaluation's metrics; empty before the first."""
        self._offset, self._serving = 0, False

    def new_records(self) -> list[dict[str, float]]:
        """Metrics of the steps and evaluations that were finished since the last call."""
        try:
            with (self.folder / "metrics.jsonl").open("rb") as file:
                # An orchestrator that is started again takes back what is to be made anew.
                self._offset = min(self._offset, file.seek(0, os.SEEK_END))
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        records: list[dict[str, float]] = []
        for line in whole.splitlines():
            with contextlib.suppress(ValueError):  # the rest of a line, where it has taken back more than was added
                records.append(json.loads(line))
        for record in records:
            if _is_evaluation(record):
                self.last_evaluation = record
            else:
                self.last_step = record
        return records

    def states(self) -> dict[str, tuple[str, float | None]]:
        """What each program does and for whom it waits; and for how many seconds, where it says so."""
        states: dict[str, tuple[str, float | None]] = {"infer": self._server_state()}
        for role in ("orch", "train"):
            status = read_status(self.folder / "status" / f"{role}.json")
            states[role] = ("starting", None) if status is None else _state(status)
        if (status := read_status(self.folder / "status" / "teacher.json")) is not None:
            states["teacher"] = _state(status)
        return states

    def _server_state(self) -> tuple[str, float | None]:
        """Before it has loaded a version, only its address tells that it is up."""
        status = read_status(self._server_status)
        if status is not None and status["state"] in (AWAY, "starting"):
            return _state(status)
        return ("serving" if self._is_serving() else "starting", None)

    def _is_serving(self) -> bool:
        if not self._serving:
            try:
                with socket.create_connection(self._address, timeout=_PROBE_S):
                    self._serving = True
            except OSError:
                return False
        return True


class Display(AbstractContextManager["Display"], Protocol):
    """Shows a run while it is entered."""

    def tick(self) -> None:
        """Called often; shows what has changed."""


class PlainDisplay(Display):
    """One line a step, and one for every new state of a program before the first step."""

    def __init__(self, view: RunView) -> None:
        self._view, self._next_s = view, 0.0
        self._states: dict[str, str] = {}

    def __enter__(self) -> Self:
        print(f"run folder {self._view.folder}", flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._show()

    def tick(self) -> None:
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + REFRESH_S
            self._show()

    def _show(self) -> None:
        for record in self._view.new_records():
            print(record_line(record, self._view.max_steps), flush=True)
        if self._view.last_step:
            return
        for role, (state, _) in self._view.states().items():
            if self._states.get(role) != state:
                self._states[role] = state
                print(f"{_elapsed(self._view):>5}  grpo-{role}: {state}", flush=True)


class LiveDisplay(Display):
    """A table that is drawn anew in place."""

    def __init__(self, view: RunView, console: Console) -> None:
        self._view, self._next_s = view, 0.0
        self._live = Live(console=console, auto_refresh=False, transient=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._draw()
        self._live.stop()

    def tick(self) -> None:
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + REFRESH_S
            self._draw()

    def _draw(self) -> None:
        self._view.new_records()
        self._live.update(render(self._view), refresh=True)


def make_display(
    folder: Path, *, max_steps: int | None, address: tuple[str, int], server_status: str = "infer.json"
) -> Display:
    """For a terminal or for anything else, whichever standard output is."""
    view = RunView(folder, max_steps=max_steps, address=address, server_status=server_status)
    return LiveDisplay(view, Console()) if sys.stdout.isatty() else PlainDisplay(view)


def record_line(record: Mapping[str, float], max_steps: int | None) -> str:
    """A step or an evaluation in one line: `step 12/80  reward 0.512  tokens/s 4,210  policy v12  lag 1.00`, or
    `evaluation of v80  reverse-text 0.935`."""
    if _is_evaluation(record):
        return _evaluation(record)
    return "  ".join([_step(record, max_steps), *_texts(record)])


def render(view: RunView) -> RenderableType:
    """The live table: progress, the newest step, the newest evaluation, and what each program does."""
    done, metrics = int(view.last_step.get(_STEP, 0)), Table.grid(padding=(0, 2))
    bar = ProgressBar(total=view.max_steps, completed=done, width=24) if view.max_steps is not None else ""
    metrics.add_row(_step(view.last_step, view.max_steps), bar, _elapsed(view), *_texts(view.last_step))
    programs = Table.grid(padding=(0, 2))
    for role, (state, since_s) in view.states().items():
        programs.add_row(f"grpo-{role}", state if since_s is None else f"{state}, {since_s:.0f} s")
    evaluation = [_evaluation(view.last_evaluation)] if view.last_evaluation else []
    return Group(f"run folder {view.folder}", metrics, *evaluation, programs)


def _step(record: Mapping[str, float], max_steps: int | None) -> str:
    of = f"/{max_steps}" if max_steps is not None else ""
    return f"step {record.get(_STEP, 0):.0f}{of}"


def _texts(record: Mapping[str, float]) -> list[str]:
    return [f"{title} {form.format(record[key])}" for title, key, form in _COLUMNS if key in record]


def _is_evaluation(record: Mapping[str, float]) -> bool:
    return any(key.startswith(_ACCURACY) for key in record)


def _evaluation(record: Mapping[str, float]) -> str:
    accuracies = {k.removeprefix(_ACCURACY): v for k, v in record.items() if k.startswith(_ACCURACY)}
    texts = [f"evaluation of v{record[_STEP]:.0f}", *(f"{env} {value:.3f}" for env, value in accuracies.items())]
    return "  ".join(texts)


def _state(status: Mapping[str, Any]) -> tuple[str, float]:
    step = f" (step {status['step']})" if status.get("step") is not None else ""
    doing = f"{status['state']}{step}"
    if status.get("waiting_for"):
        doing += (
            f" for {status['waiting_for']}" if status["state"] == "waiting" else f", waits for {status['waiting_for']}"
        )
    return doing, time.time() - status["since"]


def _elapsed(view: RunView) -> str:
    return f"{time.monotonic() - view.started_s:.0f} s"


@contextlib.contextmanager
def shown(folder: Path) -> Iterator[Callable[[], None]]:
    """Shows the run in a folder; what it gives is called often."""
    settings = yaml.safe_load((folder / "settings" / "orch.yaml").read_text())
    parts = urlsplit(settings["client"]["base_url"][0])
    status = f"infer.{parts.hostname}_{parts.port}.json"
    address = (parts.hostname or "", parts.port or 0)
    with make_display(folder, max_steps=settings.get("max_steps"), address=address, server_status=status) as display:
        yield display.tick

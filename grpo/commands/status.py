"""`grpo status RUN`, and what `grpo` shows while a run goes on: what each program does and who waits for whom, from the
run's files alone."""

import argparse
import contextlib
import json
import math
import sqlite3
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from grpo.commands.ledger import states_of
from grpo.orchestrator.ledger_reader import open_ledger
from grpo.run_files import REWARD, STEP, NoRun, ProgramStatus, metrics, orch_settings, read, read_run
from grpo.service_folder import SERVICE, Model, ServiceReader, open_service, service_of
from grpo.transport.checkpoints import TRAINER
from grpo.transport.errors import UserError
from grpo.transport.folders import steps_in
from grpo.transport.logs import printable
from grpo.transport.run_warnings import RunWarning, as_line, run_warnings, without_traceback
from grpo.transport.status import FAILED, FINISHED, LAUNCHER_FILE, STOPPED

if TYPE_CHECKING:
    from rich.console import Group

_NOT_STARTED = "not started"
ROLES = ("infer", "orch", "train")
TEACHER = "teacher"
"""The server of a teacher is there only in runs that start one."""
_REPLACEABLE = ("grpo-infer", f"grpo-{TEACHER}")
"""Programs whose failure need not be the run's."""
NUM_REWARDS = 5
"""Number of the newest steps whose rewards are shown."""
COUNT_LIMIT_S = 0.4
"""Counting the rollouts of a long run may take no longer; `grpo ledger` has the time."""
REFRESH_S = 0.5
CLOCKS_S = 5.0
"""The clocks of a run's machines may differ by so much."""
_TAIL_BYTES = 256 * 1024
_AWAITED = {"orchestrator": "grpo-orch", "trainer": "grpo-train", "inference servers": "grpo-infer"}
"""Names in status files of programs that are waited for."""
_TOLD_TO_END = {
    "SystemExit: 143": "ended by SIGTERM",
    "SystemExit: 130": "ended by SIGINT",
    "KeyboardInterrupt": "ended by SIGINT",
    "CancelledError": "ended by a signal",
}
_ENDED = (FINISHED, FAILED, STOPPED)
_COMMANDS = {"waiting": "waiting", "failed": "refused", "broken": "failed"}
"""States of a service's commands that are told, and how."""
_COLUMNS = (
    ("reward", REWARD, "{:.3f}"),
    ("tokens/s", "perf/generate_tokens_per_s", "{:,.0f}"),
    ("policy", "policy/version", "v{:.0f}"),
    ("lag", "policy/lag_mean", "{:.2f}"),
    ("seconds", "time/step_s", "{:.2f}"),
)
_ACCURACY, _STEP_S, _MEAN_ACCURACY = "eval/accuracy/", "time/step_s", "eval/accuracy"
_SPARKS, _BLOCKS, _PACE = 40, "▁▂▃▄▅▆▇█", 10
"""Characters of a curve, from low to high, and the steps whose pace tells how long the rest takes."""
EPILOG = """\
exit codes: 0 the run has finished; 1 it has failed: a program has, or is gone without a word; 2 there is no run, or the
command line is wrong; 3 it is starting or running; 4 it was stopped (Ctrl-C, SIGTERM), and the same command goes on. To
wait for its end:

  while grpo status outputs/first > /dev/null; [ $? -eq 3 ]; do sleep 10; done"""
EXIT_CODES = {FINISHED: 0, FAILED: 1, "starting": 3, "running": 3, STOPPED: 4}
"""By state of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStatus:
    """State of one process, and whether it is there."""

    name: str
    """`grpo-train`, `grpo-orch`, `grpo-infer`; other ranks and servers have their part of the file's name after it."""
    state: str
    """Its own word; `not started` where it has not joined the run, `joined` where it has not said more yet."""
    step: int | None = None
    seconds: float | None = None
    """Since it is in this state."""
    waiting_for: str | None = None
    message: str | None = None
    """The error of one that has failed."""
    pid: int | None = None
    alive: bool | None = None
    """None where that cannot be told: it runs on another machine, or has not joined."""

    @property
    def failed(self) -> bool:
        """True where it has failed, or disappeared without having finished."""
        return self.state == FAILED or (self.alive is False and self.state not in _ENDED)

    @property
    def awaited(self) -> tuple[str, str] | None:
        """The program that it waits for, and what for; None where it waits for nobody."""
        if self.waiting_for is None or self.failed or self.state in _ENDED:
            return None
        who, _, what = self.waiting_for.partition(": ")
        return _AWAITED.get(who, who), what


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """A model of a training service."""

    name: str
    tenant: str
    id: str
    steps: int
    since_s: float | None
    """Seconds since its last step."""
    commands: Mapping[str, int]
    """Its commands by state."""
    datums: Mapping[str, int] | None
    """By fate; None where they are not counted."""
    ended: bool

    def __str__(self) -> str:
        """What a person asks first."""
        parts = [f"step {self.steps}" + ("" if self.since_s is None else f", {duration(self.since_s)} ago")]
        parts += [f"{num} {text}" for state, text in _COMMANDS.items() if (num := self.commands.get(state))]
        if self.datums:
            parts.append("datums: " + ", ".join(f"{num:,} {fate}" for fate, num in sorted(self.datums.items())))
        return "; ".join([*parts, *(["ended"] if self.ended else [])])


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A run, as its folder shows it. None stands for what is not there (yet)."""

    folder: str
    run_id: str
    state: str
    """`starting`, `running`, `finished`, `failed`, or `stopped`."""
    processes: tuple[ProcessStatus, ...]
    waits: str
    """One line that says who waits for whom or, where the run has ended for a reason, that reason."""
    shipped: int | None
    """Newest batch that has left for the trainer."""
    published: int | None
    """Newest policy version that the trainer has published."""
    live: int | None
    """Newest policy version that the servers serve."""
    held: Mapping[int, str]
    """Versions that servers hold, when the newest became live: the snapshot's digest, and who needs it."""
    max_steps: int | None
    checkpoint: int | None
    """Newest step with a checkpoint."""
    rewards: Mapping[int, float]
    """Mean reward of the newest steps."""
    rollouts: Mapping[str, int] | None
    """Number by state; None where they are not counted."""
    warnings: tuple[RunWarning, ...]
    """The warnings of the programs, each kind once."""
    models: tuple[ModelStatus, ...] | None = None
    """The models of a training service; None of any other run."""


class _Held(msgspec.Struct):
    snapshot: str | None
    pins: dict[str, int]


class _InUse(msgspec.Struct):
    newest: int
    versions: dict[int, _Held]


def run_status(folder: Path, *, count: bool = True) -> RunStatus:
    """Returns the state of the run by its folder, with the numbers of rollouts if `count`. Raises `NoRun`."""
    run = read_run(folder)
    if (service := service_of(folder)) is not None:
        return _service_status(folder, run.run_id, *service, count=count)
    processes = tuple(_processes(folder / "status", run.programs))
    state, reason = _state(processes, read(folder / "status" / LAUNCHER_FILE, ProgramStatus))
    if state in (FINISHED, STOPPED):
        processes = tuple(map(_ended_with_run, processes))
    steps = {int(one[STEP]): one for one in metrics(folder, last_bytes=_TAIL_BYTES) if REWARD in one}
    counts, trained = _ledger(folder) if count else (None, [])
    in_use = read(folder / "broadcasts" / "in_use.json", _InUse)
    return RunStatus(
        folder=str(folder),
        run_id=run.run_id,
        state=state,
        processes=processes,
        waits=reason or wait_graph(processes),
        shipped=max([*steps_in(folder / "batches"), *trained], default=None),
        published=max(steps_in(folder / "broadcasts"), default=None),
        live=max([*([in_use.newest] if in_use else []), *steps], default=None),
        held={} if in_use is None else {version: _needed(one) for version, one in sorted(in_use.versions.items())},
        max_steps=orch_settings(run).get("max_steps"),
        checkpoint=max(steps_in(folder / "checkpoints", part=TRAINER), default=None),
        rewards={step: steps[step][REWARD] for step in sorted(steps)[-NUM_REWARDS:]},
        rollouts=counts,
        warnings=tuple(run_warnings(folder)),
    )


def _service_status(folder: Path, run_id: str, service: Path, only: str | None, *, count: bool) -> RunStatus:
    """Returns the state of a training service, or of one of its models."""
    programs = read_run(service).programs
    roles = (SERVICE, *(["infer"] if programs.get(SERVICE, {}).get("samples", True) else []))
    processes = tuple(_processes(service / "status", programs, roles=roles))
    own = processes[0]
    state = own.state if own.state in _ENDED else FAILED if own.failed else "running"
    if state in (STOPPED, FAILED):
        processes = tuple(map(_ended_with_run, processes))
    with open_service(service) as reader:
        models = tuple(_model_status(reader, one, count=count) for one in reader.models(only))
        failed = reader.failures(only)[-1:]
        versions = [one.version for one in reader.canaries() if only in (None, one.model)]
    waiting = sum(one.commands.get("waiting", 0) for one in models)
    tenants = programs.get(SERVICE, {}).get("tenants", [])
    told = [
        doing(own) + _for(own),
        f"{len(models)} model{'' if len(models) == 1 else 's'}" if only is None else "",
        f"{waiting} commands wait" if waiting else "no command waits",
    ]
    told += [f"tenants {', '.join(tenants)}"] if only is None else []
    told += [f"{kind} {target}:{seq} failed: {text}" for target, seq, kind, text in failed]
    steps = [one.steps for one in models]
    return RunStatus(
        folder=str(folder),
        run_id=run_id,
        state=state,
        processes=processes,
        waits="; ".join(filter(None, told)),
        shipped=max(steps, default=None),
        published=max(versions, default=None),
        live=max(versions, default=None),
        held={},
        max_steps=None,
        checkpoint=None,
        rewards={},
        rollouts=dict(sum((Counter(one.datums) for one in models), Counter())) if count else None,
        warnings=tuple(run_warnings(service)),
        models=models,
    )


def _model_status(reader: ServiceReader, model: Model, *, count: bool) -> ModelStatus:
    newest = reader.newest_step(model.id)
    return ModelStatus(
        name=model.name,
        tenant=model.tenant,
        id=model.id,
        steps=0 if newest is None else newest[0],
        since_s=None if newest is None else max(0.0, time.time() - newest[1]),
        commands=dict(reader.num_commands(model.id)),
        datums=dict(reader.fates(model)) if count else None,
        ended=model.ended,
    )


def _needed(held: _Held) -> str:
    by = ", ".join(name if num == 1 else f"{num} {name}" for name, num in held.pins.items())
    return f"{held.snapshot or 'no digest'}, pinned by {by}"


def _processes(
    folder: Path, programs: Mapping[str, Mapping[str, Any]], *, roles: Sequence[str] = (*ROLES, TEACHER)
) -> Iterator[ProcessStatus]:
    """Returns at least one process for each program, in the order of `roles`, and a teacher's server where there is
    one."""
    for role in roles:
        files = sorted(folder.glob(f"{role}.json")) + sorted(folder.glob(f"{role}.?*.json"))
        said = {path.name: one for path in files if (one := read(path, ProgramStatus)) is not None}
        if role != TEACHER and (not said or (role in ("orch", "train") and f"{role}.json" not in said)):
            joined = programs.get(role, {})
            alive = ProgramStatus(state="joined", **{key: joined.get(key) for key in ("pid", "host", "started")}).alive
            if role not in programs or alive is False:  # that of an earlier start
                yield ProcessStatus(name=f"grpo-{role}", state=_NOT_STARTED)
            else:
                yield ProcessStatus(name=f"grpo-{role}", state="joined", pid=joined.get("pid"), alive=alive)
        for name, one in said.items():
            more = name.removesuffix(".json").removeprefix(role).removeprefix(".")
            more = more.replace("_", ":" if role == "infer" else " ")
            yield ProcessStatus(
                name=f"grpo-{role} {more}".strip(),
                state=STOPPED if one.message in _TOLD_TO_END else one.state,
                step=one.step,
                seconds=None if one.since is None else max(0.0, time.time() - one.since),
                waiting_for=one.waiting_for,
                message=one.message and _TOLD_TO_END.get(one.message, without_traceback(one.message).strip()),
                pid=one.pid,
                alive=one.alive,
            )


def _state(processes: Sequence[ProcessStatus], launcher: ProgramStatus | None) -> tuple[str, str | None]:
    """The run's state, and why it has ended, where the launcher has said so. Its word counts until somebody starts
    programs without it."""
    by_name = {process.name: process for process in processes}
    orch, train = by_name["grpo-orch"], by_name["grpo-train"]
    beginning = "starting" if {orch.state, train.state} & {_NOT_STARTED, "joined"} else "running"
    finished = train.state == FINISHED and orch.state in (FINISHED, _NOT_STARTED)  # a supervised stage has no orch
    if launcher is not None and not _is_older(launcher, orch, train):
        if launcher.state in _ENDED:
            return launcher.state, launcher.message
        if launcher.alive:  # it will say how the run has ended
            return beginning, None
        if launcher.alive is False and not finished:
            return FAILED, "grpo, which started the programs, is gone without a word"
    if finished:
        return FINISHED, None
    # A server may go: others may be left, and the orchestrator says where none is.
    needed = [one for one in processes if not one.name.startswith(_REPLACEABLE)]
    if any(one.failed for one in needed):
        return FAILED, None
    if any(one.state == STOPPED for one in needed):  # what waits for it in vain fails
        at_work = any(one.alive is not False and one.state not in _ENDED for one in (orch, train))
        return FAILED if at_work else STOPPED, None
    return beginning, None


def _is_older(launcher: ProgramStatus, *programs: ProcessStatus) -> bool:
    """Returns whether a program has changed its state since, as one does that was started by hand."""
    since_s = time.time() - (launcher.since or 0.0)
    ended = launcher.state in _ENDED or launcher.alive is False
    return ended and any(one.seconds is not None and one.seconds < since_s - CLOCKS_S for one in programs)


def _ended_with_run(process: ProcessStatus) -> ProcessStatus:
    """A server that the end of its run has ended, as a scheduler ends jobs, needs no word of its own."""
    ended = process.name.startswith(_REPLACEABLE) and process.alive is False and process.state not in _ENDED
    return replace(process, state=STOPPED, waiting_for=None) if ended else process


def _ledger(folder: Path) -> tuple[dict[str, int] | None, list[int]]:
    """Returns the numbers of rollouts by state, and the newest step that has left; None and none where they cannot be
    read (yet), or not in time."""
    newest: list[int] = []
    try:
        with open_ledger(folder, limit_s=COUNT_LIMIT_S) as ledger:
            step = ledger.newest_step(has_left=True)
            newest = [] if step is None else [step]
            return dict(states_of(ledger.fates())), newest
    except (UserError, sqlite3.Error):
        return None, newest


# --- who waits for whom ---


def wait_graph(processes: Sequence[ProcessStatus]) -> str:
    """Returns one line that says who waits for whom, the longest wait first, and what the other programs do."""
    waits = sorted((one for one in processes if one.awaited), key=lambda one: -(one.seconds or 0.0))
    parts = [_wait(one) for one in waits]
    others = [one for one in processes if not one.awaited and one.state not in (FINISHED, STOPPED)]
    parts += [f"{one.name} is {doing(one)}{_for(one)}" for one in others]
    return "; ".join(parts) or "nobody waits: all have finished"


def _wait(process: ProcessStatus) -> str:
    who, what = process.awaited or ("nobody", "")
    doing = "" if process.state == "waiting" else f" ({process.state})"
    return f"{process.name}{doing} waits for {who}{f': {what}' if what else ''}{_for(process)}"


def doing(process: ProcessStatus) -> str:
    """Returns what it does and for whom it waits, or how it has ended."""
    state = process.state if process.message is None else f"{process.state}: {process.message}"
    state += "" if process.step is None else f" in step {process.step}"
    state += "" if process.awaited is None else f", waits for {process.waiting_for}"
    return f"gone without a word; it was {state}" if process.failed and process.state != FAILED else state


def _for(process: ProcessStatus) -> str:
    return "" if process.seconds is None else f", for {duration(process.seconds)}"


def duration(seconds: float) -> str:
    """Returns a duration as `4.2 s`, `3 min 12 s` or `5 h 3 min`."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min {seconds % 60:.0f} s" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


# --- the command ---


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder (output_dir)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def main(options: argparse.Namespace) -> int:
    """`grpo status`; the exit code."""
    status = run_status(options.run)
    print(json.dumps(as_fields(status), indent=1) if options.json else text(status))
    return EXIT_CODES[status.state]


def as_fields(status: RunStatus) -> dict[str, Any]:
    """The status as JSON takes it."""
    return asdict(status) | {"warnings": [msgspec.to_builtins(one) for one in status.warnings]}


def text(status: RunStatus) -> str:
    """The answer for people."""
    width = max(len(process.name) for process in status.processes)
    of = "" if status.max_steps is None else f" of {status.max_steps}"
    figures = {model.name: str(model) for model in status.models or ()}
    if status.models is None:
        figures = _figures(status, of)
    named = max([17, *map(len, figures)])
    lines = [f"run {status.run_id} in {status.folder}: {status.state}", ""]
    lines += [f"  {process.name:{width}}  {_line(process)}" for process in status.processes]
    lines += ["", f"  {status.waits}", "", *(f"  {name:{named}}  {value}" for name, value in figures.items())]
    lines += ["", *(f"  warning: {as_line(one)}" for one in status.warnings)] if status.warnings else []
    return printable("\n".join(lines))


def _figures(status: RunStatus, of: str) -> dict[str, str]:
    return {
        "step shipped": "none" if status.shipped is None else f"{status.shipped}{of}",
        "version published": _shown(status.published),
        "version live": _shown(status.live),
        **_held(status.held),
        "checkpoint": _shown(status.checkpoint),
        "rewards": "  ".join(f"{step}: {reward:.3f}" for step, reward in status.rewards.items()) or "none yet",
        "rollouts": "not counted"
        if status.rollouts is None
        else ", ".join(f"{num:,} {state}" for state, num in sorted(status.rollouts.items())) or "none yet",
    }


def _held(held: Mapping[int, str]) -> dict[str, str]:
    """Returns a line for each version that somebody needs, and one for those that pools of opponents keep on disk."""
    kept = [version for version, text in held.items() if all(by.startswith("pool ") for by in _pins(text))]
    lines = {f"version {version} held": text for version, text in held.items() if version not in kept}
    if kept:
        pools = dict.fromkeys(by.removeprefix("pool ") for version in kept for by in _pins(held[version]))
        lines["versions kept"] = f"{', '.join(map(str, kept))}, for opponents ({', '.join(pools)})"
    return lines


def _pins(text: str) -> list[str]:
    return text.rpartition(", pinned by ")[2].split(", ") if ", pinned by " in text else [""]


def _line(process: ProcessStatus) -> str:
    where = {True: "alive", False: "gone", None: "on another machine"}[process.alive]
    return f"{doing(process)}{_for(process)}" + ("" if process.pid is None else f"  (pid {process.pid}, {where})")


def _shown(number: int | None) -> str:
    return "none" if number is None else str(number)


# --- while a run goes on ---


@contextlib.contextmanager
def shown(folder: Path) -> Iterator[Callable[[], None]]:
    """Shows the run while it is entered: on a terminal a table that is redrawn, else a line for each step and,
    before the first one, for each new state. What it gives is called often."""
    from rich.live import Live
    from rich.text import Text

    print(f"run folder {folder}", flush=True)
    began_s, next_s = time.monotonic(), 0.0
    live = Live(auto_refresh=False) if sys.stdout.isatty() else None
    curves = _Curves(folder)
    lines = _Lines(folder)

    def show() -> None:
        elapsed = f"{time.monotonic() - began_s:.0f} s"
        with contextlib.suppress(NoRun):  # the folder is gone: the launcher finds out what that means
            status = run_status(folder, count=False)
            for line in lines.new_warnings(status):
                if live is None:
                    print(line, flush=True)
                else:
                    live.console.print(Text(line))  # above the table
            if live is None:
                lines.print_new(status, elapsed)
            else:
                live.update(_table(status, curves, elapsed), refresh=True)

    def tick() -> None:
        nonlocal next_s
        if time.monotonic() >= next_s:
            show()
            next_s = time.monotonic() + REFRESH_S

    with live or contextlib.nullcontext():
        try:
            yield tick
        finally:
            show()


class _Curves:
    """What the table of a terminal draws of a run's metrics."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last_bytes: int | None = None
        self.newest: dict[bool, Mapping[str, float]] = {}
        """The newest step (True) and the newest evaluation."""
        self.rewards: dict[float, float] = {}
        self.accuracies: dict[float, float] = {}
        self.seconds: dict[float, float] = {}
        """Of each step."""

    def read(self) -> None:
        """Takes what is new: all at first, later the end of the file."""
        for record in metrics(self._folder, last_bytes=self._last_bytes):
            self.newest[REWARD in record] = record
            for key, curve in ((REWARD, self.rewards), (_MEAN_ACCURACY, self.accuracies), (_STEP_S, self.seconds)):
                if key in record:
                    curve[record[STEP]] = record[key]
        self._last_bytes = _TAIL_BYTES

    def left(self, max_steps: int | None) -> str:
        """Returns how long the steps that are left take at the pace of the last ones; empty where that is unknown."""
        done = self.newest.get(True, {}).get(STEP, 0.0)
        if max_steps is None or not self.seconds or done >= max_steps:
            return ""
        seconds = statistics.median([*self.seconds.values()][-_PACE:]) * (max_steps - done)
        minutes, hours = seconds / 60, seconds / 3600
        return (
            f"{seconds:.0f} s left"
            if minutes < 2
            else f"{minutes:.0f} min left"
            if hours < 2
            else f"{hours:.1f} h left"
        )


def _spark(values: Sequence[float]) -> str:
    """Returns a curve of block characters: means of neighbours, from the smallest to the largest of them."""
    size = math.ceil(len(values) / _SPARKS) or 1
    means = [statistics.fmean(values[start : start + size]) for start in range(0, len(values), size)]
    means = [one for one in means if math.isfinite(one)]
    low, span = min(means, default=0.0), max(means, default=0.0) - min(means, default=0.0)
    return "".join(_BLOCKS[round((one - low) / span * (len(_BLOCKS) - 1))] if span else _BLOCKS[0] for one in means)


def _table(status: RunStatus, curves: _Curves, elapsed: str) -> "Group":
    """The newest step with the share of all and the time left, curves, the newest evaluation, what is being done and
    what each program does."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    curves.read()
    newest = curves.newest
    done = newest.get(True, {}).get(STEP, 0.0)
    head, programs = Table.grid(padding=(0, 2)), Table.grid(padding=(0, 2))
    bar = "" if status.max_steps is None else ProgressBar(total=status.max_steps, completed=done, width=24)
    line = _line_of(newest[True], status.max_steps) if True in newest else "no step is done yet"
    head.add_row(elapsed, bar, curves.left(status.max_steps), Text(line))
    drawn = Table.grid(padding=(0, 2))
    for name, curve in (("reward", curves.rewards), ("held-out accuracy", curves.accuracies)):
        if len(curve) > 1:
            values = [one for _, one in sorted(curve.items())]
            drawn.add_row(name, Text(_spark(values)), f"{values[0]:.3f} → {values[-1]:.3f}")
    for process in status.processes:
        programs.add_row(process.name, Text(printable(doing(process))))
    evaluated = [Text(_line_of(newest[False], None))] if False in newest else []
    return Group(head, drawn, *evaluated, Text(printable(status.waits)), programs)


class _Lines:
    """Prints what is new since the last time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._states: dict[str, str] = {}
        self._known = {_key(record) for record in metrics(folder, last_bytes=_TAIL_BYTES)}
        """Steps and evaluations that were there before or have been printed."""
        self._any_step = False
        self._warned = {(one.program, one.kind): one.times for one in run_warnings(folder)}
        """Number of times that each warning had come before, or when it was printed."""

    def new_warnings(self, status: RunStatus) -> Iterator[str]:
        """A line for each kind of warning that has come since the beginning, once."""
        for one in status.warnings:
            if self._warned.get((one.program, one.kind), 0) < one.times:
                self._warned[one.program, one.kind] = sys.maxsize
                yield f"warning: {as_line(one)}"

    def print_new(self, status: RunStatus, elapsed: str) -> None:
        for record in metrics(self._folder, last_bytes=_TAIL_BYTES):
            if _key(record) not in self._known:
                self._known.add(_key(record))
                self._any_step |= REWARD in record
                print(_line_of(record, status.max_steps), flush=True)
        for process in status.processes:
            state = doing(process)
            if not self._any_step and self._states.get(process.name) != state:
                self._states[process.name] = state
                print(f"{elapsed:>5}  {process.name}: {printable(state)}", flush=True)


def _key(record: Mapping[str, float]) -> tuple[bool, float]:
    return REWARD in record, record[STEP]


def _line_of(record: Mapping[str, float], max_steps: int | None) -> str:
    """`step 12/80  reward 0.512  tokens/s 4,210` …; of an evaluation `evaluation of v80  reverse-text 0.935`."""
    if REWARD in record:
        of = "" if max_steps is None else f"/{max_steps}"
        texts = [f"step {record[STEP]:.0f}{of}"]
        texts += [f"{title} {form.format(record[key])}" for title, key, form in _COLUMNS if key in record]
    else:
        texts = [f"evaluation of v{record[STEP]:.0f}"]
        found = {key.removeprefix(_ACCURACY): value for key, value in record.items() if key.startswith(_ACCURACY)}
        texts += [f"{env} {value:.3f}" for env, value in found.items()]
    return printable("  ".join(texts))

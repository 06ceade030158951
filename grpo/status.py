"""`grpo status RUN`, and what `grpo` shows while a run goes on: what each program does and who waits for whom, from the
run's files alone."""

import argparse
import contextlib
import json
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from grpo.ledger import open_ledger
from grpo.run_files import REWARD, STEP, NoRun, Said, metrics, orch_settings, read, read_run
from transport.checkpoints import TRAINER
from transport.errors import UserError
from transport.folders import steps_in
from transport.status import FAILED, FINISHED

if TYPE_CHECKING:
    from rich.console import Group

_NOT_STARTED = "not started"
ROLES = ("infer", "orch", "train")
TEACHER = "teacher"
"""The server of a teacher is there only in runs that start one."""
_REPLACEABLE = ("grpo-infer", f"grpo-{TEACHER}")
"""Whose failure need not be the run's."""
NUM_REWARDS = 5
"""So many of the newest steps' rewards are shown."""
COUNT_LIMIT_S = 0.4
"""Counting the rollouts of a long run may take no longer; `grpo ledger` has the time."""
REFRESH_S = 0.5
_TAIL_BYTES = 256 * 1024
_NEWEST_STEP = "SELECT step FROM rollouts WHERE step IS NOT NULL AND state != 'shipping' ORDER BY step DESC LIMIT 1"
_AWAITED = {"orchestrator": "grpo-orch", "trainer": "grpo-train", "inference servers": "grpo-infer"}
"""What status files call those who are waited for."""
_TOLD_TO_END = {
    "SystemExit: 143": "ended by SIGTERM",
    "SystemExit: 130": "ended by SIGINT",
    "KeyboardInterrupt": "ended by SIGINT",
    "CancelledError": "ended by a signal",
}
_COLUMNS = (
    ("reward", REWARD, "{:.3f}"),
    ("tokens/s", "perf/generate_tokens_per_s", "{:,.0f}"),
    ("policy", "policy/version", "v{:.0f}"),
    ("lag", "policy/lag_mean", "{:.2f}"),
    ("seconds", "time/step_s", "{:.2f}"),
)
_ACCURACY = "eval/accuracy/"
EPILOG = """\
exit codes: 0 the run is at work, or finished; 1 a program has failed, or is gone without a word;
2 there is no run, or the command line is wrong"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStatus:
    """What one process says of itself, and whether it is there."""

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
        """It has said so, or it is gone without having finished."""
        return self.state == FAILED or (self.alive is False and self.state != FINISHED)

    @property
    def awaited(self) -> tuple[str, str] | None:
        """The program that it waits for, and what for; None where it waits for nobody."""
        if self.waiting_for is None or self.failed or self.state == FINISHED:
            return None
        who, _, what = self.waiting_for.partition(": ")
        return _AWAITED.get(who, who), what


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A run, as its folder shows it. None stands for what is not there (yet)."""

    folder: str
    run_id: str
    state: str
    """`starting`, `running`, `finished`, or `failed`."""
    processes: tuple[ProcessStatus, ...]
    waits: str
    """Who waits for whom, in one line."""
    shipped: int | None
    """Newest batch that has left for the trainer."""
    published: int | None
    """Newest policy version that the trainer has published."""
    live: int | None
    """Newest policy version that the servers serve."""
    max_steps: int | None
    checkpoint: int | None
    """Newest step with a checkpoint."""
    rewards: Mapping[int, float]
    """Mean reward of the newest steps."""
    rollouts: Mapping[str, int] | None
    """Number by state; None where they are not counted."""


class _InUse(msgspec.Struct):
    newest: int


def run_status(folder: Path, *, count: bool = True) -> RunStatus:
    """Everything that the folder tells, now; with the number of rollouts if `count`. Raises `NoRun`."""
    run = read_run(folder)
    processes = tuple(_processes(folder / "status", run.programs))
    steps = {int(one[STEP]): one for one in metrics(folder, last_bytes=_TAIL_BYTES) if REWARD in one}
    counts, trained = _ledger(folder) if count else (None, [])
    in_use = read(folder / "broadcasts" / "in_use.json", _InUse)
    return RunStatus(
        folder=str(folder),
        run_id=run.run_id,
        state=_state(processes),
        processes=processes,
        waits=wait_graph(processes),
        shipped=max([*steps_in(folder / "batches"), *trained], default=None),
        published=max(steps_in(folder / "broadcasts"), default=None),
        live=max([*([in_use.newest] if in_use else []), *steps], default=None),
        max_steps=orch_settings(run).get("max_steps"),
        checkpoint=max(steps_in(folder / "checkpoints", part=TRAINER), default=None),
        rewards={step: steps[step][REWARD] for step in sorted(steps)[-NUM_REWARDS:]},
        rollouts=counts,
    )


def _processes(folder: Path, programs: Mapping[str, Mapping[str, Any]]) -> Iterator[ProcessStatus]:
    """One for each program at least, in the order of `ROLES`, and the server of a teacher where there is one."""
    for role in (*ROLES, TEACHER):
        files = sorted(folder.glob(f"{role}.json")) + sorted(folder.glob(f"{role}.?*.json"))
        said = {path.name: one for path in files if (one := read(path, Said)) is not None}
        if role != TEACHER and (not said or (role in ("orch", "train") and f"{role}.json" not in said)):
            joined = programs.get(role, {})
            alive = Said(state="joined", **{key: joined.get(key) for key in ("pid", "host", "started")}).alive
            if role not in programs or alive is False:  # that of an earlier start
                yield ProcessStatus(name=f"grpo-{role}", state=_NOT_STARTED)
            else:
                yield ProcessStatus(name=f"grpo-{role}", state="joined", pid=joined.get("pid"), alive=alive)
        for name, one in said.items():
            more = name.removesuffix(".json").removeprefix(role).removeprefix(".")
            more = more.replace("_", ":" if role == "infer" else " ")
            yield ProcessStatus(
                name=f"grpo-{role} {more}".strip(),
                state=one.state,
                step=one.step,
                seconds=None if one.since is None else max(0.0, time.time() - one.since),
                waiting_for=one.waiting_for,
                message=one.message and _TOLD_TO_END.get(one.message, one.message),
                pid=one.pid,
                alive=one.alive,
            )


def _state(processes: Sequence[ProcessStatus]) -> str:
    by_name = {process.name: process for process in processes}
    orch, train = by_name["grpo-orch"], by_name["grpo-train"]
    if train.state == FINISHED and orch.state in (FINISHED, _NOT_STARTED):  # a supervised stage has no orchestrator
        return FINISHED
    # A server may go: others may be left, and the orchestrator says where none is.
    if any(process.failed for process in processes if not process.name.startswith(_REPLACEABLE)):
        return FAILED
    return "starting" if {orch.state, train.state} & {_NOT_STARTED, "joined"} else "running"


def _ledger(folder: Path) -> tuple[dict[str, int] | None, list[int]]:
    """Numbers of rollouts by state, and the newest step that has left; None and none where they cannot be read (yet),
    or not in time."""
    newest: list[int] = []
    try:
        with open_ledger(folder, limit_s=COUNT_LIMIT_S) as database:
            newest = [step for (step,) in database.execute(_NEWEST_STEP)]
            return dict(database.execute("SELECT state, COUNT(*) FROM rollouts GROUP BY state").fetchall()), newest
    except (UserError, sqlite3.Error):
        return None, newest


# --- who waits for whom ---


def wait_graph(processes: Sequence[ProcessStatus]) -> str:
    """Who waits for whom, in one line, the longest wait first; then what those do that wait for nobody."""
    waits = sorted((one for one in processes if one.awaited), key=lambda one: -(one.seconds or 0.0))
    parts = [_wait(one) for one in waits]
    others = [one for one in processes if not one.awaited and one.state != FINISHED]
    parts += [f"{one.name} is {doing(one)}{_for(one)}" for one in others]
    return "; ".join(parts) or "nobody waits: all have finished"


def _wait(process: ProcessStatus) -> str:
    who, what = process.awaited or ("nobody", "")
    doing = "" if process.state == "waiting" else f" ({process.state})"
    return f"{process.name}{doing} waits for {who}{f': {what}' if what else ''}{_for(process)}"


def doing(process: ProcessStatus) -> str:
    """What it does and for whom it waits, or how it has ended."""
    state = process.state if process.message is None else f"{process.state}: {process.message}"
    state += "" if process.step is None else f" in step {process.step}"
    state += "" if process.awaited is None else f", waits for {process.waiting_for}"
    return f"gone without a word; it was {state}" if process.failed and process.state != FAILED else state


def _for(process: ProcessStatus) -> str:
    return "" if process.seconds is None else f", for {duration(process.seconds)}"


def duration(seconds: float) -> str:
    """As `4.2 s`, `3 min 12 s` or `5 h 3 min`."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min {seconds % 60:.0f} s" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


# --- the command ---


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of `grpo status`."""
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder (output_dir)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def main(options: argparse.Namespace) -> int:
    """`grpo status`; the exit code."""
    status = run_status(options.run)
    print(json.dumps(asdict(status), indent=1) if options.json else text(status))
    return int(status.state == FAILED)


def text(status: RunStatus) -> str:
    """The answer for people."""
    width = max(len(process.name) for process in status.processes)
    of = "" if status.max_steps is None else f" of {status.max_steps}"
    figures = {
        "step shipped": "none" if status.shipped is None else f"{status.shipped}{of}",
        "version published": _shown(status.published),
        "version live": _shown(status.live),
        "checkpoint": _shown(status.checkpoint),
        "rewards": "  ".join(f"{step}: {reward:.3f}" for step, reward in status.rewards.items()) or "none yet",
        "rollouts": "not counted"
        if status.rollouts is None
        else ", ".join(f"{num:,} {state}" for state, num in sorted(status.rollouts.items())) or "none yet",
    }
    lines = [f"run {status.run_id} in {status.folder}: {status.state}", ""]
    lines += [f"  {process.name:{width}}  {_line(process)}" for process in status.processes]
    lines += ["", f"  {status.waits}", "", *(f"  {name:17}  {value}" for name, value in figures.items())]
    return "\n".join(lines)


def _line(process: ProcessStatus) -> str:
    where = {True: "alive", False: "gone", None: "on another machine"}[process.alive]
    return f"{doing(process)}{_for(process)}" + ("" if process.pid is None else f"  (pid {process.pid}, {where})")


def _shown(number: int | None) -> str:
    return "none" if number is None else str(number)


# --- while a run goes on ---


@contextlib.contextmanager
def shown(folder: Path) -> Iterator[Callable[[], None]]:
    """Shows the run while it is entered: on a terminal a table that is drawn anew, else a line for each step and,
    before the first one, for each new state. What it gives is called often."""
    from rich.live import Live

    print(f"run folder {folder}", flush=True)
    began_s, next_s = time.monotonic(), 0.0
    live = Live(auto_refresh=False) if sys.stdout.isatty() else None
    lines = _Lines(folder)

    def show() -> None:
        elapsed = f"{time.monotonic() - began_s:.0f} s"
        with contextlib.suppress(NoRun):  # the folder is gone: the launcher finds out what that means
            status = run_status(folder, count=False)
            if live is None:
                lines.print_new(status, elapsed)
            else:
                live.update(_table(status, metrics(folder, last_bytes=_TAIL_BYTES), elapsed), refresh=True)

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


def _table(status: RunStatus, records: Sequence[Mapping[str, float]], elapsed: str) -> "Group":
    """The newest step with the share of all, the newest evaluation, and what each program does."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    newest = {REWARD in record: record for record in records}
    done = newest.get(True, {}).get(STEP, 0.0)
    head, programs = Table.grid(padding=(0, 2)), Table.grid(padding=(0, 2))
    bar = "" if status.max_steps is None else ProgressBar(total=status.max_steps, completed=done, width=24)
    head.add_row(elapsed, bar, _line_of(newest.get(True, {REWARD: 0.0, STEP: 0.0}), status.max_steps))
    for process in status.processes:
        programs.add_row(process.name, doing(process))
    evaluated = [_line_of(newest[False], None)] if False in newest else []
    return Group(head, *evaluated, programs)


class _Lines:
    """Prints what is new since the last time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._states: dict[str, str] = {}
        self._known = {_key(record) for record in metrics(folder, last_bytes=_TAIL_BYTES)}
        """Steps and evaluations that were there before or have been printed."""
        self._any_step = False

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
                print(f"{elapsed:>5}  {process.name}: {state}", flush=True)


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
    return "  ".join(texts)

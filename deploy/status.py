"""`grpo status RUN`: what each program of a run is doing, and who waits for whom, from the run's files alone."""

import argparse
import json
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deploy.ledger_view import LedgerError, open_ledger
from deploy.liveness import is_alive
from deploy.restarts import AWAY, read_restarts, times
from transport.run import RUN_FILE
from transport.status import FAILED, FINISHED, read_status

ROLES = ("train", "orch", "infer")
TEACHER = "teacher"
"""The server of a teacher is there only in runs that start one; the launcher says what it does."""
_REPLACEABLE = ("grpo-infer", f"grpo-{TEACHER}")
"""Whose failure need not be the run's."""
NUM_REWARDS = 5
"""So many of the newest steps' rewards are shown."""
COUNT_LIMIT_S = 0.4
"""Counting the rollouts of a long run may take no longer; `grpo ledger` has the time."""
_TAIL_BYTES = 256 * 1024
_NEWEST_STEP = "SELECT step FROM rollouts WHERE step IS NOT NULL AND state != 'shipping' ORDER BY step DESC LIMIT 1"
_AWAITED = {"orchestrator": "grpo-orch", "trainer": "grpo-train", "inference servers": "grpo-infer"}
"""What status files call those who are waited for."""
_ENDED = {
    "SystemExit: 143": "ended by SIGTERM",
    "SystemExit: 130": "ended by SIGINT",
    "KeyboardInterrupt": "ended by SIGINT",
    "CancelledError": "ended by a signal",
}
"""What programs that were told to end say of it."""
_EPILOG = """\
exit codes: 0 the run is at work, or finished; 1 a program has failed, or is gone without a word;
2 there is no run, or the command line is wrong; 141 nobody reads what it prints, as in grpo status RUN | head"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStatus:
    """What one process says of itself, and whether it is there."""

    name: str
    """`grpo-train`, `grpo-orch`, `grpo-infer`; other ranks and servers have their part of the file's name after it."""
    state: str
    """Its own word; `not started` where it has not joined the run, `joined` where it has not said more yet."""
    step: int | None
    seconds: float | None
    """Since it is in this state."""
    waiting_for: str | None
    message: str | None
    """The error of one that has failed."""
    pid: int | None
    host: str | None
    alive: bool | None
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
    created: str
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
    checkpoint: Mapping[str, int | None]
    """Newest step with a checkpoint: `trainer`, `orchestrator` and `complete`, from which the run can be resumed."""
    rewards: Mapping[int, float]
    """Mean reward of the newest steps."""
    rollouts: Mapping[str, int] | None
    """Number by state."""
    restarts: Mapping[str, int]
    """How often the launcher has started a program again that had ended by itself, by role."""

    @property
    def exit_code(self) -> int:
        """0 at work or finished, 1 failed."""
        return int(self.state == FAILED)


class NoRun(ValueError):
    """A folder that holds no run."""


def main(argv: Sequence[str]) -> int:
    """`grpo status`; the exit code."""
    parser = argparse.ArgumentParser(
        prog="grpo status",
        description="What each program of a run is doing, and who waits for whom, from the run's folder.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder (output_dir)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    options = parser.parse_args(argv)
    try:
        status = run_status(options.run)
    except NoRun as error:
        parser.error(str(error))
    print(json.dumps(asdict(status), indent=1) if options.json else text(status))
    return status.exit_code


def run_status(folder: Path) -> RunStatus:
    """Everything that the folder tells, now. Raises `NoRun`; files that are missing or torn are left out."""
    founded = _founded(folder)
    programs = founded["programs"]
    processes = tuple(_processes(folder / "status", programs))
    steps = _last_steps(folder / "metrics.jsonl")
    counts, newest_trained = _ledger(folder)
    orch = programs.get("orch", {}).get("settings", {})
    return RunStatus(
        folder=str(folder),
        run_id=str(founded["run_id"]),
        created=str(founded.get("created", "")),
        state=_state(processes),
        processes=processes,
        waits=wait_graph(processes),
        shipped=_newest([*_steps(folder / "batches"), *newest_trained]),
        published=_newest(_steps(folder / "broadcasts")),
        live=_newest([*_live(folder / "broadcasts" / "in_use.json"), *(int(step) for step in steps)]),
        max_steps=orch.get("max_steps"),
        checkpoint=_checkpoints(folder / "checkpoints"),
        rewards=dict(list(steps.items())[-NUM_REWARDS:]),
        rollouts=counts,
        restarts=read_restarts(folder / "status"),
    )


# --- the processes ---


def _founded(folder: Path) -> dict[str, Any]:
    """`run.json`. Raises `NoRun`."""
    try:
        fields = json.loads((folder / RUN_FILE).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise NoRun(f"{folder} holds no run: it has no {RUN_FILE}; give the output_dir of a run") from None
    except (OSError, ValueError) as error:
        raise NoRun(f"{folder / RUN_FILE} cannot be read: {error}") from None
    if not isinstance(fields, dict) or "run_id" not in fields:
        raise NoRun(f"{folder / RUN_FILE} is not a run of this release")
    programs = fields.get("programs")
    return fields | {"programs": programs if isinstance(programs, dict) else {}}


def _processes(folder: Path, programs: Mapping[str, Any]) -> Iterator[ProcessStatus]:
    """One for each program at least, in the order of `ROLES`, and the server of a teacher where there is one."""
    for role in (*ROLES, TEACHER):
        files = sorted(folder.glob(f"{role}.json")) + sorted(folder.glob(f"{role}.?*.json"))
        said = {path.name: fields for path in files if (fields := _status(path)) is not None}
        if role != TEACHER and f"{role}.json" not in said and (role in programs or not said):
            yield _silent(role, programs.get(role))
        for name, fields in said.items():
            more = name.removesuffix(".json").removeprefix(role).removeprefix(".")
            more = more.replace("_", ":" if role == "infer" else " ")
            yield _process(f"grpo-{role} {more}".strip(), fields)


def _status(path: Path) -> dict[str, Any] | None:
    try:
        fields = read_status(path)
    except OSError:
        return None
    return fields if isinstance(fields, dict) and "state" in fields else None


def _silent(role: str, joined: Mapping[str, Any] | None) -> ProcessStatus:
    """A program without a status file. A server writes none before it has loaded a version."""
    joined = joined or {}
    pid, host = joined.get("pid"), joined.get("host")
    return ProcessStatus(
        name=f"grpo-{role}",
        state="joined" if joined else "not started",
        step=None,
        seconds=None,
        waiting_for=None,
        message=None,
        pid=pid,
        host=host,
        alive=is_alive(pid, host, since=None),
    )


def _process(name: str, fields: Mapping[str, Any]) -> ProcessStatus:
    since, pid, host = fields.get("since"), fields.get("pid"), fields.get("host")
    return ProcessStatus(
        name=name,
        state=str(fields["state"]),
        step=fields.get("step"),
        seconds=None if since is None else max(0.0, time.time() - since),
        waiting_for=fields.get("waiting_for"),
        message=_in_words(fields.get("message")),
        pid=pid,
        host=host,
        alive=is_alive(pid, host, since=since),
    )


def _in_words(message: str | None) -> str | None:
    """The error of a process; where it was told to end, by what."""
    return _ENDED.get(message, message) if message is not None else None


def _state(processes: Sequence[ProcessStatus]) -> str:
    by_name = {process.name: process for process in processes}
    orch, train = by_name.get("grpo-orch"), by_name.get("grpo-train")
    if orch is not None and train is not None and orch.state == train.state == FINISHED:
        return FINISHED
    # A server may go: others may be left, and the orchestrator says where none is.
    if any(process.failed for process in processes if not process.name.startswith(_REPLACEABLE)):
        return FAILED
    joined = [process.state not in ("not started", "joined") for process in (orch, train) if process is not None]
    return "running" if joined and all(joined) else "starting"


def wait_graph(processes: Sequence[ProcessStatus]) -> str:
    """Who waits for whom, in one line, the longest wait first; then what those do that wait for nobody."""
    waits = sorted((one for one in processes if one.awaited), key=lambda one: -(one.seconds or 0.0))
    parts = [_wait(one) for one in waits]
    parts += [f"{one.name} {_doing(one)}" for one in processes if not one.awaited and one.state != FINISHED]
    return "; ".join(parts) or "nobody waits: all have finished"


def _wait(process: ProcessStatus) -> str:
    assert process.awaited is not None
    who, what = process.awaited
    while_ = "" if process.state == "waiting" else f" ({process.state})"
    return f"{process.name}{while_} waits for {who}{f': {what}' if what else ''}{_for(process.seconds)}"


def _doing(process: ProcessStatus) -> str:
    if process.state == FAILED:
        return f"has failed: {process.message}"
    if process.alive is False:
        return f"is gone without a word; it was {process.state}{_in_step(process.step)}"
    if process.state in ("not started", "joined"):
        return f"has {process.state}" if process.state == "joined" else "has not started, or says nothing yet"
    verb = "has" if process.state == AWAY else "is"
    return f"{verb} {process.state}{_in_step(process.step)}{_for(process.seconds)}"


def _in_step(step: int | None) -> str:
    return "" if step is None else f" in step {step}"


def _for(seconds: float | None) -> str:
    return "" if seconds is None else f", for {duration(seconds)}"


def duration(seconds: float) -> str:
    """As `4.2 s`, `3 min 12 s` or `5 h 3 min`."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min {seconds % 60:.0f} s" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


# --- what the run has come to ---


def _steps(folder: Path) -> list[int]:
    """Numbers of the folders that are there, whole."""
    try:
        names = os.listdir(folder)  # noqa: PTH208 (there may be many)
    except OSError:
        return []
    return [int(name[5:]) for name in names if name.startswith("step_") and name[5:].isdigit()]


def _newest(steps: Sequence[int]) -> int | None:
    return max(steps, default=None)


def _live(path: Path) -> list[int]:
    try:
        newest = json.loads(path.read_bytes())["newest"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [newest] if isinstance(newest, int) else []


def _checkpoints(folder: Path) -> dict[str, int | None]:
    steps = _steps(folder)
    newest: dict[str, int | None] = {}
    for name, part in (("trainer", "trainer"), ("orchestrator", "orchestrator"), ("complete", "COMPLETE")):
        newest[name] = _newest([step for step in steps if (folder / f"step_{step:06d}" / part).exists()])
    return newest


def _last_steps(path: Path) -> dict[int, float]:
    """Mean rewards by step, from the end of `metrics.jsonl`. Evaluations and torn lines are left out."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return {}
    rewards: dict[int, float] = {}
    for line in lines:
        try:
            record = json.loads(line)
            rewards[int(record["progress/step"])] = float(record["reward/mean"])
        except (ValueError, KeyError, TypeError):
            continue
    return dict(sorted(rewards.items()))


def _ledger(folder: Path) -> tuple[dict[str, int] | None, list[int]]:
    """Numbers of rollouts by state, and the newest step that has left; None and none where they cannot be read (yet),
    or not in time."""
    counts, newest = None, list[int]()
    try:
        with open_ledger(folder, limit_s=COUNT_LIMIT_S) as database:
            newest = [step for (step,) in database.execute(_NEWEST_STEP)]
            counts = dict(database.execute("SELECT state, COUNT(*) FROM rollouts GROUP BY state").fetchall())
    except (LedgerError, sqlite3.Error):
        pass
    return counts, newest


# --- as text ---


def text(status: RunStatus) -> str:
    """For people."""
    of = "" if status.max_steps is None else f" of {status.max_steps}"
    lines = [f"run {status.run_id} in {status.folder}: {status.state}", ""]
    width = max(len(process.name) for process in status.processes)
    lines += [f"  {process.name:{width}}  {_line(process)}" for process in status.processes]
    lines += ["", f"  {status.waits}", ""]
    figures = {
        "step shipped": _shown(status.shipped) + (of if status.shipped is not None else ""),
        "version published": _shown(status.published),
        "version live": _shown(status.live),
        "checkpoint": ", ".join(f"{part} {_shown(step)}" for part, step in status.checkpoint.items()),
        "rewards": "  ".join(f"{step}: {reward:.3f}" for step, reward in status.rewards.items()) or "none yet",
        "rollouts": "not counted"
        if status.rollouts is None
        else ", ".join(f"{num:,} {state}" for state, num in sorted(status.rollouts.items())) or "none yet",
    }
    if status.restarts:
        figures["started again"] = ", ".join(f"grpo-{role} {times(num)}" for role, num in status.restarts.items())
    return "\n".join(lines + [f"  {name:17}  {value}" for name, value in figures.items()])


def _line(process: ProcessStatus) -> str:
    there = {
        True: "alive",
        False: "gone",
        None: "on another machine" if process.pid is not None else "no process known",
    }
    pid = "" if process.pid is None else f"pid {process.pid}, "
    waits = "" if process.awaited is None else f", waits for {process.waiting_for}"
    error = "" if process.message is None else f": {process.message}"
    state = f"{process.state}{error}{_in_step(process.step)}{waits}{_for(process.seconds)}"
    return f"{state}  ({pid}{there[process.alive]})"


def _shown(number: int | None) -> str:
    return "none" if number is None else str(number)

"""One run: opens its folder, starts the programs, watches over them, and says how it ended."""

import contextlib
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from configs.common import exit_with_problems
from configs.errors import SettingsError
from configs.resuming import ORCHESTRATOR_MAY_CHANGE, TRAINER_MAY_CHANGE
from deploy.arguments import Arguments
from deploy.cores import thread_variables
from deploy.gpus import visible_gpus
from deploy.memory import DryStepError, NoRoom, with_split
from deploy.plan import Plan, resolve, with_run, write_settings
from deploy.programs import Outcome, Program, Signals, run_programs
from deploy.teacher import within_model
from orchestrator.monitors.summary import Summary
from transport.batches.store import StepStore
from transport.checkpoints import Checkpoints
from transport.errors import RunFolderError, StorageError
from transport.folders import write_atomic
from transport.run import RunFolder, changes_of, current_run_id, is_at_work, open_run
from transport.weights.identity import base_identity, resolve_model

_LOCK = ".grpo.lock"
RESTARTS_FILE = "restarts.json"
"""In the run's `status` folder: how often each program was started again, by role."""
SUMMARY_FILE = "summary.json"
_MODULES = {"infer": "infer.cli", "train": "trainer.cli", "orch": "orchestrator.cli", "teacher": "infer.cli"}
_SETTINGS_PREFIXES = ("GRPO_INFER_", "GRPO_TRAIN_", "GRPO_ORCH_", "GRPO_TEACHER_")
_NUM_LOG_LINES = 20
_NUM_ERROR_LINES = 200
"""How far back a program's error is looked for; a traceback may follow it."""
Show = Callable[[Path], AbstractContextManager[Callable[[], None]]]
"""Shows the run in a folder while it is entered; what it gives is called often."""


def run(arguments: Arguments, show: Show) -> int:
    """Everything `grpo` does once the command line is taken apart; the exit code."""
    try:
        plan = resolve(arguments)
    except SettingsError as error:
        exit_with_problems(error)
    if arguments.dry_run:
        print(plan.effective(), end="")
        return 0
    return run_plan(plan, show)


def run_plan(plan: Plan, show: Show) -> int:
    """A run with these settings, from its founding, or from where it stands, to its summary; the exit code."""
    for line in (plan.gpus.line, plan.unused_teacher):
        if line is not None:
            print(line, flush=True)
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(Signals())
        try:
            model = resolve_model(plan.train.model)
            if plan.teacher is not None:
                plan = replace(plan, teacher=within_model(plan.teacher, resolve_model(plan.teacher.model)))
            stack.enter_context(locked(plan.output_dir))
            folder = _run_of(plan, model)
            if _is_finished(folder, plan):
                print(f"the run in {folder.path} has done its {plan.orch.max_steps} steps; raise max_steps to go on")
                print_summary(folder.path / SUMMARY_FILE)
                return 0
            plan = _divided(plan, model)
        except (FileNotFoundError, RunFolderError, StorageError, NoRoom, DryStepError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        _make_ready(folder)
        return _run_in(folder, with_run(plan, folder.run_id), signals, show)


def _divided(plan: Plan, model: Path) -> Plan:
    """Of a co-located run on a GPU: with the server's share of it, where the user left that open. Raises `NoRoom` and
    `DryStepError`."""
    on_gpu = plan.train.device == "cuda" or (plan.train.device == "auto" and bool(visible_gpus(os.environ).names))
    if not (plan.train.colocate and on_gpu) or "gpu_memory_utilization" in plan.infer.model_fields_set:
        return plan
    plan, line = with_split(plan, model)
    print(line, flush=True)
    return plan


@contextlib.contextmanager
def locked(output_dir: Path) -> Iterator[None]:
    """Holds the run folder, so that no second launcher can take or remove it. Raises `RunFolderError` where another
    holds it."""
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        file = (output_dir / _LOCK).open("a+")
    except (OSError, ValueError) as error:
        message = f"{output_dir} cannot be a run's folder: {error}; give another --output_dir"
        raise RunFolderError(message) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            message = f"output_dir {output_dir} is in use by {holder}; end that run, or give another --output_dir"
            raise RunFolderError(message) from None
        file.truncate(0)
        file.write(f"grpo with process id {os.getpid()}")
        file.flush()
        yield


def _run_of(plan: Plan, model: Path) -> RunFolder:
    """A new run, or the one to go on with, from the checkpoint that the settings name. Raises `RunFolderError`."""
    path, train, step = plan.output_dir, plan.train, plan.resume_step
    if step is not None and current_run_id(path) is None:
        raise RunFolderError(f"resume_step is {step}, and {path} holds no run; give another --output_dir")
    if (role := next((one for one in ("train", "orch") if is_at_work(path, one)), None)) is not None:
        raise RunFolderError(f"a grpo-{role} is at work in {path}; end it first, or give another --output_dir")
    run = open_run(path, resume=train.resume, overwrite=train.overwrite_output_dir)
    orch = plan.orch.model_dump(mode="json")
    changes_of(
        path,
        role="train",
        settings=train.model_dump(mode="json"),
        base_model=base_identity(model),
        may_change=TRAINER_MAY_CHANGE,
    )
    changes_of(path, role="orch", settings=orch, may_change=ORCHESTRATOR_MAY_CHANGE)
    if step is not None and step >= 0:
        Checkpoints(run).go_back_to(step, role=None)
        (run.path / SUMMARY_FILE).unlink(missing_ok=True)
    return run


def _is_finished(run: RunFolder, plan: Plan) -> bool:
    """Whether nothing is left to do: a summary is written when a run has done its steps."""
    summary = _read_json(run.path / SUMMARY_FILE)
    return plan.orch.max_steps is not None and summary.get("steps", 0) >= plan.orch.max_steps


def _read_json(path: Path) -> dict[str, Any]:
    """Empty where it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        if isinstance(fields := json.loads(path.read_bytes()), dict):
            return fields
    return {}


def _make_ready(run: RunFolder) -> None:
    """Removes what programs of an earlier start have said of themselves, and that the run is over."""
    (run.path / SUMMARY_FILE).unlink(missing_ok=True)
    shutil.rmtree(run.status, ignore_errors=True)
    for folder in (run.status, run.logs, run.batches):
        folder.mkdir(exist_ok=True)
    StepStore(run.batches, run_id=run.run_id).remove_finished()


def _run_in(folder: RunFolder, plan: Plan, signals: Signals, show: Show) -> int:
    programs = make_programs(plan, write_settings(plan, folder.path / "settings"), folder)

    def restarted(number: Mapping[str, int]) -> None:
        with contextlib.suppress(OSError):  # it is for people
            write_atomic(folder.status / RESTARTS_FILE, json.dumps(dict(number)).encode(), durable=False)

    with show(folder.path) as tick:
        outcome = run_programs(programs, restarts=plan.restarts, signals=signals, tick=tick, restarted=restarted)
    explain(outcome)
    if outcome.exit_code == 0:
        print_summary(folder.path / SUMMARY_FILE)
    return outcome.exit_code


def make_programs(plan: Plan, files: Mapping[str, Path], run: RunFolder) -> list[Program]:
    """The programs as they are started. Environment variables with settings are left out, because the files
    hold the outcome, and they would overrule it."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(_SETTINGS_PREFIXES)}
    num_threads = {"infer": plan.infer.num_threads, "train": plan.train.num_threads, "orch": 1}
    if plan.teacher is not None:
        num_threads["teacher"] = plan.teacher.num_threads
    status = {"infer": f"infer.{plan.infer.host}_{plan.infer.port}"}
    programs = []
    for role, threads in num_threads.items():
        own = {"PYTHONUNBUFFERED": "1"} | (thread_variables(threads) if threads is not None else {})
        # -P: a folder here that happens to be called `infer` must not shadow the package.
        command = (sys.executable, "-P", "-m", _MODULES[role], str(files[role]))
        programs.append(
            Program(
                role=role,
                command=command,
                log=run.logs / f"{role}.log",
                status=run.status / f"{status.get(role, role)}.json",
                environment=inherited | own | plan.gpus.variables(role),
            )
        )
    return programs


def print_summary(path: Path) -> None:
    """The orchestrator's table, which went to its log, from what it wrote beside that."""
    fields = json.loads(path.read_bytes())
    Summary(**fields | {"versions_served": tuple(fields["versions_served"])}).print()


def explain(outcome: Outcome) -> None:
    """Prints on standard error who failed, with the last lines of its log; the error comes last."""
    if outcome.stopped_by is not None:
        print(f"ended by {outcome.stopped_by.name}", file=sys.stderr)
    elif (failed := outcome.failed) is not None:
        program = failed.program
        tail = program.log_tail(_NUM_LOG_LINES) or "(nothing)"
        print(
            f"\nlast lines of {program.log}:", *(f"  | {line}" for line in tail.splitlines()), sep="\n", file=sys.stderr
        )
        why = last_error(program.log_tail(_NUM_ERROR_LINES))
        print(f"error: {program.name} {failed.failure}{why}", file=sys.stderr)


def last_error(log_tail: str) -> str:
    """The error that a program ended with, to be appended; empty where it was killed without a word. Where a traceback
    belongs to the error, its last line is what the person can mend."""
    lines = log_tail.splitlines()
    found = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    if not found:
        return ""
    first, *more = lines[found[-1] :]
    raised = [line for line in more if line and not line[0].isspace() and not line.startswith("Traceback")]
    is_traceback = any("Traceback (most recent call last):" in line for line in [first, *more])
    return f": {first.removeprefix('error: ')}" + (f" {raised[-1]}" if is_traceback and raised else "")

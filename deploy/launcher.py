"""One run: founds it, starts the programs, watches over them, and says how it ended."""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from configs.common import exit_with_problems
from configs.errors import SettingsError
from deploy.arguments import Arguments
from deploy.cores import thread_variables
from deploy.gpus import visible_gpus
from deploy.guard import become_subreaper, descendants, end_descendants
from deploy.kept import Kept
from deploy.memory import DryStepError, NoRoom, with_split
from deploy.plan import Plan, resolve, with_run, write_settings
from deploy.processes import Program
from deploy.restarts import again_of, keep_restarts, overrule, times, whence, with_restarts
from deploy.supervise import Outcome, Signals, end_all, ended_by_signals, supervise
from deploy.teacher import within_model
from deploy.work_done import trainer_is_done, trainers_end
from orchestrator.monitors.summary import Summary
from transport.batches.store import StepStore
from transport.checkpoints import Checkpoints
from transport.errors import RunFolderError, StorageError
from transport.run import RunFolder, current_run_id, found_run, say_all_ended
from transport.weights.identity import resolve_model

_LOCK = ".grpo.lock"
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
    """A run with these settings, from its founding to its summary; the exit code."""
    for line in (plan.gpus.line, plan.unused_teacher):
        if line is not None:
            print(line, flush=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(ended_by_signals())
        try:
            model = resolve_model(plan.train.model)
            if plan.teacher is not None:
                plan = replace(plan, teacher=within_model(plan.teacher, resolve_model(plan.teacher.model)))
            lock = stack.enter_context(locked(plan.output_dir))
            plan = _divided(plan, model)
            folder = _run_of(plan)
        except (FileNotFoundError, RunFolderError, StorageError, NoRoom, DryStepError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        return _run_in(folder, with_run(plan, folder.run_id), lock, show)


def _divided(plan: Plan, model: Path) -> Plan:
    """Of a co-located run on a GPU: with the server's share of it, where the user left that open. Raises `NoRoom` and
    `DryStepError`."""
    on_gpu = plan.train.device == "cuda" or (plan.train.device == "auto" and bool(visible_gpus(os.environ).names))
    if not (plan.train.colocate and on_gpu) or "gpu_memory_utilization" in plan.infer.model_fields_set:
        return plan
    plan, line = with_split(plan, model)
    print(line, flush=True)
    return plan


def _run_of(plan: Plan) -> RunFolder:
    """A new run, or the one to go on with, from the step that the settings name. Raises `RunFolderError`."""
    if plan.resume_step is None:
        return found_run(plan.output_dir, overwrite=plan.train.overwrite_output_dir)
    run_id = current_run_id(plan.output_dir)
    if run_id is None:
        message = f"resume_step is {plan.resume_step}, and {plan.output_dir} holds no run; give another --output_dir"
        raise RunFolderError(message)
    run = RunFolder(path=plan.output_dir, run_id=run_id)
    if plan.resume_step >= 0:
        Checkpoints(run).go_back_to(plan.resume_step, role="orch")
    Checkpoints(run).settle()
    say_all_ended(run)
    shutil.rmtree(run.status, ignore_errors=True)
    run.status.mkdir()
    StepStore(run.batches, run_id=run_id).remove_finished()
    return run


@contextlib.contextmanager
def locked(output_dir: Path) -> Iterator[int]:
    """Holds the run folder, so that no second launcher can take or remove it. The guards hold it too: it is free when
    the last program has ended, and not before. Raises `RunFolderError` where it is held."""
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        file = (output_dir / _LOCK).open("a+")
    except OSError as error:
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
        yield file.fileno()


def _run_in(folder: RunFolder, plan: Plan, lock: int, show: Show) -> int:
    max_steps = plan.orch.max_steps
    programs = make_programs(plan, write_settings(plan, folder.path / "settings"), folder.logs)
    outcome = run_programs(programs, lock=lock, show=show, folder=folder, max_steps=max_steps)
    explain(outcome)
    if outcome.exit_code == 0:
        with_restarts(folder.path / "summary.json", outcome.restarts)
        print_summary(folder.path / "summary.json")
    return outcome.exit_code


def make_programs(plan: Plan, files: dict[str, Path], logs: Path) -> list[Program]:
    """The programs as they are started. Environment variables with settings are left out, because the files
    hold the outcome, and they would overrule it."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(_SETTINGS_PREFIXES)}
    num_threads = {"infer": plan.infer.num_threads, "train": plan.train.num_threads, "orch": 1}
    addresses, teacher = {"infer": _address(plan.orch.client.base_url[0])}, plan.orch.teacher_model
    if plan.teacher is not None and teacher is not None and teacher.client.base_url is not None:
        num_threads["teacher"], addresses["teacher"] = plan.teacher.num_threads, _address(teacher.client.base_url[0])
    programs = []
    for role, threads in num_threads.items():
        own = {"PYTHONUNBUFFERED": "1"} | (thread_variables(threads) if threads is not None else {})
        # -P: a folder here that happens to be called `infer` must not shadow the package.
        command = (sys.executable, "-P", "-m", _MODULES[role], str(files[role]))
        programs.append(
            Program(
                role=role,
                command=command,
                log=logs / f"{role}.log",
                environment=inherited | own | plan.gpus.variables(role),
                address=addresses.get(role),
                status=_server_status(plan) if role == "infer" else None,
                silent=role == "teacher",
                again=again_of(role, limit=plan.restarts),
            )
        )
    return programs


def _server_status(plan: Plan) -> str:
    """Name of the file in which the policy's server says what it does."""
    return f"infer.{plan.infer.host}_{plan.infer.port}.json"


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    if parts.hostname is None or parts.port is None:
        raise ValueError(f"the server's address is {url}, expected one with host and port")
    return parts.hostname, parts.port


def run_programs(
    programs: Sequence[Program],
    *,
    lock: int,
    show: Show,
    folder: RunFolder,
    max_steps: int | None,
) -> Outcome:
    """Starts all programs, and returns when none of them, nor anything that they started, is left."""
    signals, children = Signals(), dict[str, Kept]()
    become_subreaper()
    others = descendants(os.getpid())
    restarts, began_after = dict[str, int](), Checkpoints(folder).newest_batch()

    def tick(refresh: Callable[[], None]) -> None:
        refresh()
        nonlocal restarts
        if (now := _restarts(children)) != restarts:
            restarts = now
            keep_restarts(folder.status, restarts)

    def tidy() -> None:
        """Before a start: what has lost its guard is the launcher's, and may hold what the program needs."""
        end_descendants(skip=[*others, *(child.pid for child in children.values())])

    with signals.collected():
        try:
            for program in programs:
                children[program.role] = Kept(
                    program,
                    lock=lock,
                    status=folder.status / (program.status or f"{program.role}.json"),
                    tidy=tidy,
                    work_done=partial(trainers_end, folder, max_steps) if program.role == "train" else lambda: None,
                    whence=partial(whence, program.role, folder),
                    overrule=partial(overrule, program.role, folder, began_after=began_after),
                )
            with show(folder.path) as refresh:
                outcome = supervise(
                    children,
                    signals=signals,
                    tick=partial(tick, refresh),
                    trainer_is_done=lambda: trainer_is_done(folder, max_steps),
                )
            restarts = _restarts(children)
            if restarts:
                often = ", ".join(f"grpo-{role} {times(number)}" for role, number in restarts.items())
                print(f"ended by themselves and were started again: {often}", flush=True)
            return replace(outcome, restarts=restarts)
        finally:
            end_all(children, number=signal.SIGTERM, signals=signals, tick=lambda: None)
            end_descendants(skip=others)
            for child in children.values():
                child.close()


def _restarts(children: Mapping[str, Kept]) -> dict[str, int]:
    """How often each program was started again, of those that were."""
    return {role: child.num_ends for role, child in children.items() if child.num_ends}


def print_summary(path: Path) -> None:
    """The orchestrator's table, which went to its log, from what it wrote beside that."""
    fields = json.loads(path.read_bytes())
    Summary(**fields | {"versions_served": tuple(fields["versions_served"])}).print()


def last_error(log_tail: str) -> str:
    """The error that a program ended with, to be appended; empty where it was killed without a word."""
    errors = [line.removeprefix("error: ") for line in log_tail.splitlines() if line.startswith("error: ")]
    return f": {errors[-1]}" if errors else ""


def explain(outcome: Outcome) -> None:
    """Prints on standard error whose fault it was, with the last lines of the log; the error comes last."""
    for failure in reversed(outcome.failures):
        program = failure.child.program
        tail = failure.child.log_tail(_NUM_LOG_LINES) or "(nothing)"
        print(
            f"\nlast lines of {program.log}:\n" + "\n".join(f"  | {line}" for line in tail.splitlines()),
            file=sys.stderr,
        )
    if outcome.stopped_by is not None:
        print(f"ended by {outcome.stopped_by.name}", file=sys.stderr)
    elif outcome.failures:
        first, *others = [f"{failure.child.program.name} {failure.how}" for failure in outcome.failures]
        also = "".join(f"; then {other}" for other in others)
        why = last_error(outcome.failures[0].child.log_tail(_NUM_ERROR_LINES))
        print(f"error: {first}{also}; the other programs were ended{why}", file=sys.stderr)

"""One run: opens its folder, starts the programs, watches over them, and says how it ended."""

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from configs.resuming import ORCHESTRATOR_MAY_CHANGE, SERVER_MAY_CHANGE, TRAINER_MAY_CHANGE
from configs.run import Run
from deploy.gpus import VARIABLE as VISIBLE_GPUS
from deploy.gpus import visible_gpus
from deploy.memory import with_split
from deploy.plan import Plan, resolve, with_run, write_settings
from deploy.programs import Outcome, Program, Signals, run_programs
from deploy.teacher import within_model
from orchestrator.envs.registry import check_id
from orchestrator.monitoring.summary import Summary
from transport.batches.store import StepStore
from transport.checkpoints import Checkpoints
from transport.cores import thread_variables
from transport.errors import RunFolderError
from transport.hidden import hide_environment, key_variables
from transport.run import RunFolder, changes_of, current_run_id, join_run, only_one, open_run
from transport.status import server_file
from transport.weights.identity import base_identity, resolve_model

SUMMARY_FILE = "summary.json"
MODULES = {
    **{"infer": "infer.cli", "teacher": "infer.cli", "train": "trainer.cli", "orch": "orchestrator.cli"},
    "env": "orchestrator.workers.server",
}
"""By program: what Python runs."""
SETTINGS_PREFIXES = ("GRPO_RUN_", "GRPO_INFER_", "GRPO_TRAIN_", "GRPO_ORCH_", "GRPO_TEACHER_")
_NUM_LOG_LINES = 20
Show = Callable[[Path], AbstractContextManager[Callable[[], None]]]
"""Shows the run in a folder while it is entered; what it gives is called often."""


def run(asked: Run, show: Show, *, dry_run: bool = False) -> int:
    """Everything `grpo` does once the settings are loaded; the exit code. Raises what `checked` raises."""
    plan = checked(asked)
    if dry_run:
        print(plan.effective(), end="")
        return 0
    hide_environment(key_variables(plan.orch.model_dump()))
    return run_plan(plan, show)


def checked(asked: Run) -> Plan:
    """What a run's settings come to. Raises `SettingsError`, and `UserError`, which are ValueErrors."""
    plan = resolve(asked)
    for env in (*plan.orch.env, *plan.orch.eval.env):
        if env.address is None:
            check_id(env.id)
    return plan


def run_plan(plan: Plan, show: Show) -> int:
    """A run with these settings, from its founding, or from where it stands, to its summary; the exit code. Raises
    RunFolderError and FileNotFoundError, StorageError, and what `deploy.memory` raises."""
    for line in plan.notes:
        print(line, flush=True)
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(Signals())
        model = resolve_model(plan.train.model)
        if plan.teacher is not None:
            plan = replace(plan, teacher=within_model(plan.teacher, resolve_model(plan.teacher.model)))
        stack.enter_context(only_one(plan.output_dir, "launcher"))
        _check_folder(plan, model)
        if _is_finished(plan):
            print(f"the run in {plan.output_dir} has done its {plan.orch.max_steps} steps; raise max_steps to go on")
            return print_summary(plan.output_dir)
        plan = _divided(plan, model)
        folder = _open(plan)
        plan = with_run(plan, folder.run_id)
        programs = make_programs(plan, write_settings(plan, folder.path / "settings"), folder)
        with show(folder.path) as tick:
            outcome = run_programs(programs, restarts=plan.restarts, signals=signals, tick=tick)
    explain(outcome)
    return outcome.exit_code or print_summary(folder.path)


def _divided(plan: Plan, model: Path) -> Plan:
    """Of a co-located run on a GPU: with the server's share of it, where the user left that open. Raises what
    `with_split` raises."""
    on_gpu = plan.train.device == "cuda" or (plan.train.device == "auto" and bool(visible_gpus(os.environ)))
    if not (plan.train.colocate and on_gpu) or "gpu_memory_utilization" in plan.infer.model_fields_set:
        return plan
    plan, line = with_split(plan, model)
    print(line, flush=True)
    return plan


def _check_folder(plan: Plan, model: Path) -> None:
    """Raises `RunFolderError` where the folder holds a run that cannot be gone on with by these settings."""
    path, step, base = plan.output_dir, plan.resume_step, base_identity(model)
    if step is not None and current_run_id(path) is None:
        raise RunFolderError(f"resume_step is {step}, and {path} holds no run; give another --output_dir")
    for role in ("train", "orch"):
        with only_one(path, role):
            pass
    if plan.train.resume == "auto" and not plan.train.overwrite_output_dir:
        orch, infer = (settings.model_dump(mode="json") for settings in (plan.orch, plan.infer))
        changes_of(path, role="train", settings=plan.train.recorded(), base_model=base, may_change=TRAINER_MAY_CHANGE)
        changes_of(path, role="orch", settings=orch, may_change=ORCHESTRATOR_MAY_CHANGE)
        changes_of(path, role="infer", settings=infer, may_change=SERVER_MAY_CHANGE)


def _is_finished(plan: Plan) -> bool:
    """Whether nothing is left to do: a summary is there once a run has done its steps."""
    if plan.train.resume == "never" or plan.train.overwrite_output_dir or (plan.resume_step or -1) >= 0:
        return False
    try:
        steps = int(json.loads((plan.output_dir / SUMMARY_FILE).read_bytes())["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return plan.orch.max_steps is not None and steps >= plan.orch.max_steps


def _open(plan: Plan) -> RunFolder:
    """A new run, or the one to go on with, from the checkpoint that the settings name; without what programs of an
    earlier start have said of themselves, and that the run is over. Raises `RunFolderError`."""
    run = open_run(plan.output_dir, resume=plan.train.resume, overwrite=plan.train.overwrite_output_dir)
    if plan.resume_step is not None and plan.resume_step >= 0:
        Checkpoints(run).go_back_to(plan.resume_step, role=None)
    # A server knows of no run, and several may serve one: its settings are recorded for it.
    server = plan.infer.model_dump(mode="json")
    join_run(run.path, role="infer", settings=server, may_change=SERVER_MAY_CHANGE, timeout_s=1.0)
    clear_for_start(run)
    return run


def clear_for_start(run: RunFolder) -> None:
    """Removes what programs of an earlier start have said of themselves, and that the run is over."""
    (run.path / SUMMARY_FILE).unlink(missing_ok=True)
    shutil.rmtree(run.status, ignore_errors=True)
    for folder in (run.status, run.logs, run.batches):
        folder.mkdir(exist_ok=True)
    StepStore(run.batches, run_id=run.run_id).remove_finished()


def make_programs(plan: Plan, files: Mapping[str, Path], run: RunFolder) -> list[Program]:
    """The programs as they are started. Environment variables with settings are left out, because the files hold the
    outcome, and they would overrule it; so are keys that only the orchestrator needs. Models are got with HF_TOKEN by
    all of them."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(SETTINGS_PREFIXES)}
    num_threads = {"infer": plan.infer.num_threads, "train": plan.train.num_threads, "orch": 1}
    if plan.teacher is not None:
        num_threads["teacher"] = plan.teacher.num_threads
    needed = {role: key_variables(settings.model_dump()) for role, settings in plan.settings().items()}
    programs = []
    for role in num_threads:
        threads, without = num_threads[role], needed["orch"] - needed[role] - {"HF_TOKEN"}
        own = {"PYTHONUNBUFFERED": "1"} | (thread_variables(threads) if threads is not None else {})
        environment = {k: v for k, v in inherited.items() if k not in without} | own
        ports = plan.ports if role == "infer" else (None,)
        for number, port in enumerate(ports):
            name = f"{role}.{number}" if len(ports) > 1 else role
            at_port = () if port is None else ("--port", str(port))
            gpus = plan.gpus.get(role, ())
            num_gpus = len(gpus) // len(ports)
            gpus = gpus[number * num_gpus : (number + 1) * num_gpus]
            programs.append(
                Program(
                    role=name,
                    # -P: a folder here that happens to be called `infer` must not shadow the package.
                    command=(sys.executable, "-P", "-m", MODULES[role], str(files[role]), *at_port),
                    log=run.logs / f"{name}.log",
                    status=run.status / (f"{role}.json" if port is None else server_file(plan.infer.host, port)),
                    environment=environment | ({VISIBLE_GPUS: ",".join(gpus)} if gpus else {}),
                )
            )
    return programs


def print_summary(folder: Path) -> int:
    """The orchestrator's table, which went to its log, from what it wrote beside that. The exit code."""
    try:
        fields = json.loads((folder / SUMMARY_FILE).read_bytes())
        Summary(**fields | {"versions_served": tuple(fields["versions_served"])}).print()
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"error: {folder / SUMMARY_FILE}, which the run has written, cannot be read: {error}", file=sys.stderr)
        return 1
    return 0


def explain(outcome: Outcome) -> None:
    """Prints on standard error who failed, with the last lines of its log; the error comes last."""
    if outcome.stopped_by is not None:
        print(f"ended by {outcome.stopped_by.name}; the same command goes on", file=sys.stderr)
    elif (failed := outcome.failed) is not None:
        lines = failed.program.last_lines()
        shown = [f"  | {line}" for line in lines[-_NUM_LOG_LINES:] or ["(nothing)"]]
        print(f"\nlast lines of {failed.program.log}:", *shown, sep="\n", file=sys.stderr)
        print(f"error: {failed.program.name} {failed.failure}{last_error(lines)}", file=sys.stderr)


def last_error(lines: Sequence[str]) -> str:
    """The error that a program ended with, to be appended; empty where it was killed without a word. Where a traceback
    belongs to the error, its last line is what the person can mend."""
    found = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    if not found:
        return ""
    first, *more = lines[found[-1] :]
    raised = [line for line in more if line and not line[0].isspace() and not line.startswith("Traceback")]
    is_traceback = any("Traceback (most recent call last):" in line for line in [first, *more])
    first = first.removeprefix("error: ").removesuffix("Traceback (most recent call last):").rstrip()
    return f": {first}" + (f" {raised[-1]}" if is_traceback and raised else "")

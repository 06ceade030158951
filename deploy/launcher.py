"""One run: opens its folder, starts the programs, watches over them, and says how it ended."""

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from grpo.configs.errors import Problem, SettingsError
from grpo.configs.facts import VARIABLE as VISIBLE_GPUS
from grpo.configs.facts import model_facts
from grpo.configs.loading import Given
from grpo.configs.reporting import TRACKER_EXTRAS
from grpo.configs.resuming import changes, record_of
from grpo.configs.run import LoadedRun, is_preset, load_run
from grpo.deploy.memory import with_split
from grpo.deploy.plan import Plan, resolve, with_run, write_settings
from grpo.deploy.programs import Child, Outcome, Program, Signals, run_programs
from grpo.deploy.teacher import within_model
from grpo.orchestrator.monitoring.summary import Summary, what_next
from grpo.orchestrator.rollouts.registry import check_arena, check_id
from grpo.transport.batches.store import StepStore
from grpo.transport.checkpoints import TRAINER, Checkpoints
from grpo.transport.cores import COMPILED_VAR, compiled_folder, thread_variables
from grpo.transport.errors import RunFolderError
from grpo.transport.extras import check_installed
from grpo.transport.folders import steps_in
from grpo.transport.hidden import hide_environment, key_variables, named_keys
from grpo.transport.logs import printable
from grpo.transport.run import Role, RunFolder, current_run_id, join_run, only_one, open_run, recorded_program
from grpo.transport.status import FAILED, FINISHED, LAUNCHER_FILE, STOPPED, StatusFile, server_file
from grpo.transport.weights.chat_template import not_used, unused_arguments
from grpo.transport.weights.identity import base_identity, resolve_model

SUMMARY_FILE = "summary.json"
MODULES = {
    **{
        "infer": "grpo.infer.cli",
        "teacher": "grpo.infer.cli",
        "train": "grpo.trainer.cli",
        "orch": "grpo.orchestrator.cli",
    },
    "env": "grpo.orchestrator.workers.server",
}
"""Python module of each program."""
SETTINGS_PREFIXES = ("GRPO_RUN_", "GRPO_INFER_", "GRPO_TRAIN_", "GRPO_ORCH_", "GRPO_TEACHER_")
_OF_PLACES = {
    *("train.output_dir", "infer.output_dir", "orch.output_dir", "train.model", "infer.model", "orch.model.name"),
    *("train.resume", "train.resume_with_changed_code", "train.ckpt.resume_step"),
    *("orch.resume", "orch.resume_with_changed_code", "orch.ckpt.resume_step"),
}
"""Settings that may differ although nothing is to be done: where things are, and whether to go on."""
_NUM_LOG_LINES = 20
Show = Callable[[Path], AbstractContextManager[Callable[[], None]]]
"""Shows the run in a folder while it is entered; what it gives is called often."""


def run(asked: LoadedRun, show: Show, *, dry_run: bool = False) -> int:
    """Runs all that `grpo` does once the settings are loaded, and returns the exit code. Raises what `checked`
    raises."""
    plan = checked(asked)
    if dry_run:
        print(plan.effective(), end="")
        return 0
    hide_environment(key_variables(plan.orch.model_dump()))
    if model_facts(plan.train.model) is None:  # a model of the hub, from whose lengths defaults follow once it is here
        resolve_model(plan.train.model)
        plan = resolve(load_run(*asked.source, hardware=asked.hardware))
    return run_plan(plan, show, given=asked.given)


def checked(asked: LoadedRun) -> Plan:
    """Returns the plan of a run, once its environments and a model that is a folder are found. Raises `SettingsError`
    and `UserError`, ValueErrors, and FileNotFoundError."""
    plan = resolve(asked)
    if plan.train.model.startswith((".", "/")) or plan.train.model.count("/") != 1:  # no Hugging Face id
        resolve_model(plan.train.model)
    for env in (*plan.orch.env, *plan.orch.eval.env):
        if env.address is None:
            check_id(env.id, env.args)
    if plan.orch.arena is not None:
        check_arena(plan.orch.arena)
    for tracker in () if plan.orch.report_to is None else plan.orch.report_to.to:
        check_installed(TRACKER_EXTRAS[tracker], f"report_to: {tracker}")
    if (what := plan.train.needs_bitsandbytes) is not None:
        check_installed("bitsandbytes", what)
    return plan


def run_plan(plan: Plan, show: Show, *, given: Given = MappingProxyType({})) -> int:
    """A run with these settings, from its founding, or from where it stands, to its summary; the exit code. `given` are
    those that a person gave, which a finished run cannot follow. Raises RunFolderError and FileNotFoundError,
    StorageError, and what `grpo.deploy.memory` raises."""
    for line in plan.notes:
        print(line, flush=True)
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(Signals())
        model = resolve_model(plan.train.model)
        if plan.teacher is not None:
            plan = replace(plan, teacher=within_model(plan.teacher, resolve_model(plan.teacher.model)))
        plan = with_template(plan, given, model=model)
        stack.enter_context(only_one(plan.output_dir, "launcher"))
        changed = _check_folder(plan, model)
        if _is_finished(plan):
            ineffective = sorted(key for key in changed - _OF_PLACES if key in given or " " in key)
            _check_finished(plan, ineffective)
            print(f"the run in {plan.output_dir} has done its {plan.orch.max_steps} steps; raise max_steps to go on")
            return print_summary(plan.output_dir)
        plan = _divided(plan, model)
        folder = _open(plan)
        plan = with_run(plan, folder.run_id)
        print(goes_on(folder), end="", flush=True)
        scratch = stack.enter_context(scratch_folder(folder.run_id))
        programs = make_programs(plan, write_settings(plan, folder.path / "settings"), folder, scratch=scratch)
        with launched(folder) as ended, show(folder.path) as tick:
            outcome = run_programs(programs, restarts=plan.restarts, signals=signals, tick=tick)
            ended(outcome)
    explain(outcome)
    return outcome.exit_code or print_summary(folder.path)


def with_template(plan: Plan, given: Given, *, model: Path) -> Plan:
    """Returns the plan with the arguments that the model's chat template uses: a preset's others belong to the preset's
    own model, and are left out. Raises `SettingsError` for one that a person gave."""
    arguments, problems = plan.orch.model.chat_template_kwargs, list[Problem]()
    unused, known = unused_arguments(model, arguments)
    for name in unused:
        shown = f"chat_template_kwargs.{name}"
        origin, key = next((given[one] for one in (shown, f"orch.model.{shown}") if one in given), ("settings", shown))
        if is_preset(origin):
            print(f"{key} of {origin} is left out: it is {not_used(known)}")
        else:
            message = f"is {not_used(known)}; remove it"
            problems.append(Problem(origin=origin, key=key, value=arguments[name], message=message))
    if problems:
        raise SettingsError(problems)
    used = {"chat_template_kwargs": {name: value for name, value in arguments.items() if name not in unused}}
    orch = plan.orch.model_copy(update={"model": plan.orch.model.model_copy(update=used)})
    return replace(plan, orch=orch, infer=plan.infer.model_copy(update=used)) if unused else plan


def _divided(plan: Plan, model: Path) -> Plan:
    """Returns the plan of a run on one GPU with the server's share of it, where the user left that open. Raises what
    `with_split` raises."""
    if not plan.splits:
        return plan
    plan, line = with_split(plan, model)
    print(line, flush=True)
    return plan


def _check_folder(plan: Plan, model: Path) -> set[str]:
    """The settings that differ from those of the run in the folder. Raises `SettingsError` where it cannot be gone on
    with by them, and `RunFolderError`."""
    path, step, base = plan.output_dir, plan.resume_step, base_identity(model)
    if step is not None and current_run_id(path) is None:
        raise RunFolderError(f"resume_step is {step}, and {path} holds no run; give another --output_dir")
    for role in ("train", "orch"):
        with only_one(path, role):
            pass
    if plan.train.resume == "never" or plan.train.overwrite_output_dir:
        return set()
    roles: tuple[Role, ...] = ("train", "orch", "infer")
    changed = set()
    for role in roles:
        now = record_of(plan.settings()[role].model_dump(mode="json"), base if role == "train" else None)
        earlier = recorded_program(path, role)
        changed |= {f"{role}.{key}" for key, *_ in changes(role, earlier, now, run=path)}
    return changed


def _check_finished(plan: Plan, ineffective: Sequence[str]) -> None:
    """Raises `RunFolderError` for settings that a run which has done its steps cannot follow."""
    if ineffective:
        raise RunFolderError(
            f"the run in {plan.output_dir} has done its steps, and {', '.join(ineffective)} "
            "would have no effect: set as it was to see the summary, raise max_steps to go on, or give another folder"
        )


def _is_finished(plan: Plan) -> bool:
    """Returns whether nothing is left to do: a summary is there once a run has done its steps."""
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
    record = record_of(plan.infer.model_dump(mode="json"))
    compare = partial(changes, "infer", now=record, run=run.path)
    join_run(run.path, role="infer", record=record, compare=compare, timeout_s=1.0)
    clear_for_start(run)
    return run


def goes_on(run: RunFolder) -> str:
    """Returns a line that says from where a run goes on; an empty text for a run that begins."""
    newest, step = max(steps_in(run.broadcasts), default=0), max(steps_in(run.checkpoints, part=TRAINER), default=0)
    if not newest:
        return ""
    again = f"; what came after it, up to step {newest}, is made again from its batches" if newest > step else ""
    return f"going on from {'step' if step == newest else 'the checkpoint of step'} {step}{again}\n"


def clear_for_start(run: RunFolder) -> None:
    """Removes the status files of an earlier start, the summary, and the mark that the run is over."""
    (run.path / SUMMARY_FILE).unlink(missing_ok=True)
    shutil.rmtree(run.status, ignore_errors=True)
    for folder in (run.status, run.logs, run.batches):
        folder.mkdir(exist_ok=True)
    StepStore(run.batches, run_id=run.run_id).remove_finished()


@contextlib.contextmanager
def scratch_folder(run_id: str) -> Iterator[Path]:
    """The folder for what the run's servers leave in the machine's temporary one, sockets above all; while it is
    entered. Its name is the run's, so that the next start removes what a killed one has left. It is not in the run's
    folder, because the path of a socket must be short. Raises OSError."""
    path = Path(tempfile.gettempdir()) / f"grpo-{run_id[:8]}"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(mode=0o700)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def make_programs(
    plan: Plan, files: Mapping[str, Path], run: RunFolder, *, scratch: Path | None = None
) -> list[Program]:
    """Returns the programs as they are started. None gets a key of the run that its own settings do not name, but for
    HF_TOKEN, with which all of them load models. `scratch` is the servers' folder for temporary files."""
    num_threads = {"infer": plan.infer.num_threads, "train": plan.train.num_threads, "orch": 1}
    if plan.teacher is not None:
        num_threads["teacher"] = plan.teacher.num_threads
    keys = key_variables(plan.orch.model_dump()) - {"HF_TOKEN"}
    needed = {role: named_keys(settings.model_dump()) for role, settings in plan.settings().items()} | {"orch": keys}
    programs = []
    for role in num_threads:
        threads = num_threads[role]
        own = thread_variables(threads) if threads is not None else {}
        if scratch is not None and role in ("infer", "teacher"):
            # What torch has compiled stays where it would be without us: it is for later runs too.
            own |= {"TMPDIR": str(scratch), COMPILED_VAR: compiled_folder()}
        ports = plan.ports if role == "infer" else (None,)
        for number, port in enumerate(ports):
            gpus = plan.gpus.get(role, ())
            num_gpus = len(gpus) // len(ports)
            gpus = gpus[number * num_gpus : (number + 1) * num_gpus]
            program = make_program(
                role,
                files[role],
                run,
                variables=own | ({VISIBLE_GPUS: ",".join(gpus)} if gpus else {}),
                without=keys - needed[role],
            )
            if port is not None:
                name = f"{role}.{number}" if len(ports) > 1 else role
                program = replace(
                    program,
                    role=name,
                    command=(*program.command, "--port", str(port)),
                    log=run.logs / f"{name}.log",
                    status=run.status / server_file(plan.infer.host, port),
                )
            programs.append(program)
    return programs


def make_program(
    role: str, file: Path, run: RunFolder, *, variables: Mapping[str, str] = {}, without: Collection[str] = ()
) -> Program:
    """Returns a program as it is started with a settings file. It inherits the environment but for variables with
    settings, which would overrule the file, and those in `without`; `variables` are added."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(SETTINGS_PREFIXES) and k not in without}
    return Program(
        role=role,
        # -P: a folder here that happens to be called `infer` must not shadow the package.
        command=(sys.executable, "-P", "-m", MODULES[role], str(file)),
        log=run.logs / f"{role}.log",
        status=run.status / f"{role}.json",
        environment={**inherited, "PYTHONUNBUFFERED": "1", **variables},
    )


def print_summary(folder: Path) -> int:
    """The orchestrator's table, which went to its log, from what it wrote beside that. The exit code."""
    try:
        fields = json.loads((folder / SUMMARY_FILE).read_bytes())
        Summary(**fields | {"versions_served": tuple(fields["versions_served"])}).print()
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"error: {folder / SUMMARY_FILE}, which the run has written, cannot be read: {error}", file=sys.stderr)
        return 1
    print(what_next(folder))
    return 0


def ended_by(number: signal.Signals) -> str:
    """Returns the message for a run that a signal has ended."""
    return f"ended by {number.name}; the same command goes on"


@contextlib.contextmanager
def launched(run: RunFolder) -> Iterator[Callable[[Outcome], None]]:
    """Within it the run's folder says that this launcher is at work, and afterwards how the run has ended, as what this
    gives is told of it, or by the error that comes out of it."""
    status = StatusFile(run.status / LAUNCHER_FILE)

    def say(state: str, message: str | None = None) -> None:
        with contextlib.suppress(OSError):  # a full disk, of which the programs complain
            status.set(state, message=message)

    def ended(outcome: Outcome) -> None:
        if outcome.stopped_by is not None:
            say(STOPPED, ended_by(outcome.stopped_by))
        elif outcome.failed is not None:
            say(FAILED, reason_of(outcome.failed))
        else:
            say(FINISHED)

    say("running")
    try:
        yield ended
    except BaseException as error:
        is_told = isinstance(error, SystemExit | KeyboardInterrupt)
        say(STOPPED if is_told else FAILED, "told to end" if is_told else f"{type(error).__name__}: {error}")
        raise


def explain(outcome: Outcome) -> None:
    """Prints on standard error who failed, with the last lines of its log; the error comes last."""
    if outcome.stopped_by is not None:
        print(ended_by(outcome.stopped_by), file=sys.stderr)
    elif (failed := outcome.failed) is not None:
        lines = failed.program.last_lines()
        shown = [f"  | {printable(line)}" for line in lines[-_NUM_LOG_LINES:] or ["(nothing)"]]
        print(f"\nlast lines of {failed.program.log}:", *shown, sep="\n", file=sys.stderr)
        print(f"error: {reason_of(failed)}", file=sys.stderr)


def reason_of(failed: Child) -> str:
    """Returns the reason why a program has failed, in its own words where it had some."""
    return printable(f"{failed.program.name} {failed.failure}{last_error(failed.program.last_lines())}")


def last_error(lines: Sequence[str]) -> str:
    """Returns the error that a program ended with, to be appended; an empty text where it printed none. Where a
    traceback belongs to the error, its last line is what the person can mend."""
    found = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    if not found:
        return ""
    first, *more = lines[found[-1] :]
    raised = [line for line in more if line and not line[0].isspace() and not line.startswith("Traceback")]
    is_traceback = any("Traceback (most recent call last):" in line for line in [first, *more])
    first = first.removeprefix("error: ").removesuffix("Traceback (most recent call last):").rstrip()
    return f": {first}" + (f" {raised[-1]}" if is_traceback and raised else "")

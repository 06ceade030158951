"""A run on Slurm: one file for sbatch, a heterogeneous job with a group of machines for each part.

Inside the job, on the machine of the first group, this module is the launcher: it starts the orchestrator beside it and
each other part by `srun`, starts again what may be started again, and has Slurm queue the job again where its time is
over. Slurm itself queues it again where a machine is lost.
"""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo.configs.errors import Problem, SettingsError
from grpo.configs.run import LoadedRun, run_file
from grpo.deploy.cluster import Part, Places, name_of, output_of, parts, preset_of, secrets
from grpo.deploy.launcher import MODULES, SETTINGS_PREFIXES, Show, clear_for_start, explain, launched, print_summary
from grpo.deploy.programs import Program, Signals, run_programs
from grpo.transport.errors import START_AGAIN
from grpo.transport.folders import write_atomic
from grpo.transport.parent import PARENT_VAR
from grpo.transport.run import RunFolder, open_run

JOB_FILE = "slurm.job"
"""File in the run's `settings` with the number of the job."""
MAX_RESTARTS = 20
"""Number of times that a job is queued again because a part does not stay up, as where Slurm has not noticed yet that
its machine is lost."""
_GROUPS = ("orch", "infer", "train", "env")
"""The parts, by the number of their group of machines."""


def script(run: LoadedRun, target: str, arguments: Sequence[str]) -> str:
    """The file for sbatch. `target` and `arguments` are the user's words. Raises `SettingsError` where a value cannot
    stand in a line of it."""
    folder, topology = Path(run.train.settings.output_dir).absolute(), run.settings.topology
    _check_lines(run, folder)
    found = {part.role.partition(".")[0]: part for part in parts(run, Places())}
    common = [option(key, value) for key, value in topology.slurm.items()]
    head = [
        *(f"--job-name={name_of(run)}", option("chdir", Path.cwd()), "--requeue", "--open-mode=append"),
        option("output", f"{folder}/logs/slurm.log".replace("%", "%%")),  # %j is the job's number there
        f"--signal=B:USR1@{topology.slurm_notice_s}",
    ]
    groups = [[*common, *_machines(found[role])] for role in _GROUPS if role in found]
    lines = ["#!/bin/bash", *(f"#SBATCH {word}" for word in head)]
    for number, group in enumerate(groups):
        lines += ["#SBATCH hetjob"] if number else []
        lines += [f"#SBATCH {word}" for word in group]
    words = [sys.executable, "-P", "-m", "grpo.cli", "launch", target, "--on", "slurm", "--inside", *arguments]
    return "\n".join([*lines, f"exec {shlex.join(words)}", ""])


def _check_lines(run: LoadedRun, folder: Path) -> None:
    """Raises `SettingsError` where a key is no option of sbatch, or a line would end within a value."""
    why = "holds a character that sbatch cannot read in a line of its file; use printable ones, and no backslash"
    slurm = run.settings.topology.slurm
    problems = [
        run.problem("topology.slurm", f"{key!r} is no option of sbatch; write it as sbatch --help does, without --")
        for key in slurm
        if not re.fullmatch("[a-z][a-z0-9-]*", key)
    ]
    container = run.settings.topology.container
    named = {"output_dir": str(folder), "container.mounts": ":".join(container.mounts)} if container.image else {}
    problems += [
        run.problem(key if key == "output_dir" else f"topology.{key}", "has a comma, which divides mounts; use others")
        for key, path in named.items()
        if "," in path
    ]
    problems += [run.problem(f"topology.slurm.{key}", why) for key, one in slurm.items() if not str(one).isprintable()]
    # A backslash in the name of a log changes how sbatch reads the rest of it.
    problems += [run.train.problem("output_dir", why)] if not str(folder).isprintable() or "\\" in str(folder) else []
    if not (here := str(Path.cwd())).isprintable():
        problems.append(Problem(origin="working directory", key="here", value=here, message=why))
    if problems:
        raise SettingsError(problems)


def option(key: str, value: object) -> str:
    """Returns an option as sbatch reads it in its file, quoted where a character would end or change the value."""
    text = str(value)
    if not re.search(r"[^\w@%+=:,./-]", text):
        return f"--{key}={text}"
    return f"--{key}=" + '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


def _machines(part: Part) -> list[str]:
    """Returns the options of sbatch. Servers may share a machine, the trainer's processes never do."""
    apart = part.role == "train"
    words = [f"--nodes={part.replicas}", "--ntasks-per-node=1"] if apart else [f"--ntasks={part.replicas}"]
    return words + resources_of(part)


def resources_of(part: Part) -> list[str]:
    """Returns the options of sbatch and srun for what each process of a part gets."""
    words = [] if part.cpus is None else [f"--cpus-per-task={part.cpus}"]
    words += [] if part.memory_gb is None else [f"--mem-per-cpu={int(1024 * part.memory_gb / (part.cpus or 1))}"]
    return words + ([f"--gpus-per-task={part.gpus}"] if part.gpus else [])


# --- from outside ---


def submit(run: LoadedRun, target: str, arguments: Sequence[str]) -> str:
    """Queues the run, and says so. Raises `SettingsError`, `RunFolderError`, and OSError where Slurm refuses."""
    train = run.train.settings
    why = "is not set, and the programs reach each other over a network; set it: export {}=$(openssl rand -hex 32)"
    missing = [name for name in secrets(parts(run, Places()), run) if not os.environ.get(name)]
    if missing:
        problems = [Problem(origin="environment", key=n, value=None, message=why.format(n)) for n in missing]
        raise SettingsError(problems)
    folder = open_run(train.output_dir, resume=train.resume, overwrite=train.overwrite_output_dir)
    (folder.path / "settings").mkdir(exist_ok=True)
    folder.logs.mkdir(exist_ok=True)
    file = folder.path / "settings" / "slurm.sh"
    write_atomic(file, script(run, target, arguments).encode(), durable=False, private=True)
    number = output_of("sbatch", "--parsable", str(file)).partition(";")[0]
    (folder.path / "settings" / JOB_FILE).write_text(number)
    return f"queued as job {number}: {file}; its log is {folder.logs / 'slurm.log'}"


def state(folder: Path) -> str | None:
    """Returns Slurm's line about the run's job; None where it has none."""
    try:
        number = (folder / "settings" / JOB_FILE).read_text()
        said = output_of("squeue", "--noheader", f"--jobs={number}", "--format=%i %T %M %N %r")
    except OSError:  # nothing was queued, or Slurm does not know the job any more
        return None
    return said or None


def stop(folder: Path) -> str:
    """Ends the run's job."""
    number = (folder / "settings" / JOB_FILE).read_text()
    output_of("scancel", number)
    return f"job {number} is ended; the same command queues it again, and it goes on"


# --- inside the job ---


def inside(run: LoadedRun, target: str, show: Show) -> int:
    """The launcher in the job. The exit code: as of `grpo`, and 75 where the job is queued again because its time is
    over."""
    with Signals() as signals:
        folder = open_run(run.train.settings.output_dir, resume="auto")
        clear_for_start(folder)
        programs = _programs(run, target, folder)
        with launched(folder) as ended, show(folder.path) as tick:
            outcome = run_programs(programs, restarts=run.settings.restarts, signals=signals, tick=tick)
            ended(outcome)
    explain(outcome)
    gave_up = outcome.failed is not None and outcome.failed.gave_up
    again = gave_up and int(os.environ.get("SLURM_RESTART_COUNT", 0)) < MAX_RESTARTS
    if outcome.exit_code == START_AGAIN or again:
        print("the job is queued again", flush=True)
        output_of("scontrol", "requeue", os.environ["SLURM_JOB_ID"])
    return outcome.exit_code or print_summary(folder.path)


def _programs(run: LoadedRun, target: str, folder: RunFolder) -> list[Program]:
    in_container = run.settings.topology.container.image is not None
    places = Places(
        target=(preset_of(target) if in_container else None) or str(run_file(target)),
        output_dir=str(folder.path.absolute()),
        trainer=_hosts("train")[0],
        orchestrator=_hosts("orch")[0],
        environments=tuple(_hosts("env")) if run.settings.topology.env.replicas else ("",),
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith(SETTINGS_PREFIXES)}
    environment |= {"PYTHONUNBUFFERED": "1"}
    programs = []
    for part in parts(run, places):
        role = part.role.partition(".")[0]
        several = part.replicas if role == "infer" else 1
        for number in range(several):
            name = f"{part.role}.{number}" if several > 1 else part.role
            argv = _own_port(part, number) if role == "infer" else part.argv
            command = ("-P", "-m", MODULES[role], *argv[1:])
            programs.append(
                Program(
                    role=name,
                    command=(*_start(run, target, folder.path, part), *command),
                    log=folder.logs / f"{name}.log",
                    status=folder.status / f"{role}.json" if role in ("orch", "train") else None,
                    environment=environment,
                    elsewhere=role != "orch" or in_container,
                )
            )
    return programs


def _own_port(part: Part, number: int) -> tuple[str, ...]:
    """Servers may be on one machine."""
    return tuple(f"--port={(part.port or 0) + number}" if word.startswith("--port=") else word for word in part.argv)


def _start(run: LoadedRun, target: str, folder: Path, part: Part) -> tuple[str, ...]:
    """Returns what starts a part's Python: of the orchestrator this one, unless it is in a container, else srun. That
    starts one process, of the trainer one on each of its machines, which does not end with the launcher as a child of
    it would; Slurm ends it."""
    role, container = part.role.partition(".")[0], run.settings.topology.container
    if role == "orch" and container.image is None:
        return (sys.executable,)
    num = part.replicas if role == "train" else 1
    alone = "--overlap" if role == "orch" else "--exact"  # the launcher has the orchestrator's cores already
    srun = (
        *("srun", f"--het-group={_GROUPS.index(role)}", f"--nodes={num}", f"--ntasks={num}", alone),
        *("--unbuffered", "--kill-on-bad-exit=0", *resources_of(part)),
    )
    unset = ("env", f"--unset={PARENT_VAR}")
    if container.image is None:
        return (*srun, *unset, sys.executable)
    here = str(Path.cwd())
    own = (str(folder.absolute()), here, *(() if preset_of(target) else (str(run_file(target).absolute().parent),)))
    mounts = ",".join(dict.fromkeys(one if ":" in one else f"{one}:{one}" for one in (*own, *container.mounts)))
    if container.runtime == "pyxis":
        inside = f"--container-image={container.image}", f"--container-mounts={mounts}", f"--container-workdir={here}"
        return (*srun, *inside, *unset, "python")
    gpus = ("--nv",) if part.gpus else ()
    return (*srun, "apptainer", "exec", *gpus, f"--bind={mounts}", f"--pwd={here}", container.image, *unset, "python")


def _hosts(role: str) -> list[str]:
    """The addresses of a part's machines, in the order of their names, as Slurm itself reaches them."""
    listed = os.environ[f"SLURM_JOB_NODELIST_HET_GROUP_{_GROUPS.index(role)}"]
    machines = output_of("scontrol", "show", "node", "--oneliner", listed).splitlines()
    return [re.findall(r" NodeAddr=(\S+)", machine)[0] for machine in machines]

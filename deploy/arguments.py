"""The command line of `grpo`, taken apart before anything heavy is imported."""

import argparse
import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

ROLES = ("train", "infer", "orch")
TEACHER = "teacher"
PROGRAMS = (*ROLES, TEACHER)
"""Those that have settings of their own; a teacher's server may be among them."""
ON_GPUS = ("infer", "train", TEACHER)
"""Those that have GPUs, by their options --infer_gpus and so on."""
_INDEX, _UUID = re.compile("[0-9]+"), re.compile(r"(GPU|MIG)-\S+")
# Where each shared option goes in each program.
SHARED = {
    "output_dir": {"train": "output_dir", "infer": "output_dir", "orch": "output_dir"},
    "max_steps": {"train": "max_steps", "orch": "max_steps"},
    "seed": {"train": "seed", "infer": "seed", "orch": "seed"},
    "model": {"train": "model", "infer": "model", "orch": "model.name"},
    "resume": {"train": "resume", "orch": "resume"},
    "resume_step": {"train": "ckpt.resume_step", "orch": "ckpt.resume_step"},
}
_SHARED_HELP = {
    "output_dir": "the run's folder",
    "max_steps": "training steps",
    "seed": "seed of everything that is random",
    "model": "base model: a local folder or a Hugging Face id",
    "resume": "where OUTPUT_DIR holds a run: auto (default) goes on with it, never refuses",
    "resume_step": "go back to the checkpoint of this step of the run in OUTPUT_DIR",
}
_USAGE = """grpo FOLDER [options] [--PROGRAM.KEY VALUE ...]
       grpo --train FILE --infer FILE --orch FILE [...]
       grpo status RUN | grpo ledger RUN | grpo compare FOLDER"""
_EPILOG = """\
settings of one program, by its name and the dotted key, override its file and its environment:
  --train.learning_rate 1e-3   --orch.sampling.max_tokens 64   --infer.max_num_seqs 32
The keys are listed by grpo-train --help, grpo-infer --help and grpo-orch --help. Precedence, highest first:
--PROGRAM.KEY, the options above, environment (GRPO_TRAIN_LEARNING_RATE), YAML file, default.

grpo chooses a free port unless infer.port is set, divides the cores unless num_threads is set, and writes what each
program was started with to OUTPUT_DIR/settings/, and what it prints to OUTPUT_DIR/logs/.

With the trainer's loss.teacher_tau above 0, the orchestrator's teacher_model.model.name, and no
teacher_model.client.base_url, grpo starts a server of the teacher too. FOLDER/teacher.yaml, --teacher FILE and
--teacher.KEY VALUE may give it settings, with the keys of grpo-infer --help; what is left open follows from the run's
settings. When it ends, it is started again, and the run goes on.

An index of --infer_gpus, --train_gpus and --teacher_gpus counts in CUDA_VISIBLE_DEVICES where that is set. Programs
for which none is given take, in this order, the next GPUs that no option names. Where these are too few, and with
--colocate or --sleep_mode, they see what grpo sees, and take the first. grpo prints who takes which.

commands (each has a --help of its own; a folder of settings with such a name is given as ./status):
  grpo status RUN           what each program of a run is doing, and who waits for whom
  grpo ledger RUN           what became of a prompt, a group, a rollout, and what trained a step
  grpo compare FOLDER       the same training with different settings, compared in a table and pictures

exit codes: 0 done, 1 a program failed (it says which), 2 settings that cannot be honoured, 130 Ctrl-C, 143 SIGTERM"""


class ArgumentsError(ValueError):
    """Arguments that cannot be taken apart; one message for each problem."""

    def __init__(self, messages: Sequence[str]) -> None:
        self.messages = tuple(messages)
        super().__init__("\n".join(messages))


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What was asked for. The mappings have the keys `train`, `infer` and `orch`, and `teacher`: `files` only where
    there is such a file."""

    files: Mapping[str, Path]
    """The YAML file of each program."""
    options: Mapping[str, tuple[str, ...]]
    """`--key value` arguments of each program, for its own settings."""
    teacher_wanted: bool
    """Whether --teacher or a --teacher.KEY was given, which would have no effect without a teacher's server."""
    dry_run: bool
    restarts: int | None = None
    """How often each program may be started again; None where the user does not say."""
    gpus: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Indices or UUIDs of the GPUs of `infer`, `train` and `teacher`: only of those for which they were given."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ArgumentsError([f"{message}; grpo --help explains the command line"])


def parse(argv: Sequence[str]) -> Arguments:
    """Takes the command line apart. Answers `--help` itself; raises `ArgumentsError` with every problem."""
    general, own, problems = _split(argv)
    parsed, unknown = _parser().parse_known_args(general)
    problems += _unknown(unknown)
    files, missing = _files(parsed)
    if problems or missing:
        raise ArgumentsError(problems + missing)
    return Arguments(
        files=files,
        options=_options(parsed, own),
        teacher_wanted=parsed.teacher is not None or bool(own[TEACHER]),
        dry_run=parsed.dry_run,
        restarts=parsed.restarts,
        gpus={role: names for role in ON_GPUS if (names := getattr(parsed, f"{role}_gpus")) is not None},
    )


def _split(argv: Sequence[str]) -> tuple[list[str], dict[str, dict[str, list[str]]], list[str]]:
    """General arguments; values of `--PROGRAM.KEY` by program and key; problems."""
    general: list[str] = []
    own: dict[str, dict[str, list[str]]] = {role: {} for role in PROGRAMS}
    problems, remaining = [], list(argv)
    while remaining:
        argument = remaining.pop(0)
        name, equals, value = argument.removeprefix("--").partition("=")
        role, dot, key = name.partition(".")
        if not (argument.startswith("--") and dot and role in PROGRAMS):
            general.append(argument)
            continue
        if not equals:
            if not remaining or remaining[0].startswith("--"):
                problems.append(f"--{name}: needs a value, as in --{name} VALUE")
                continue
            value = remaining.pop(0)
        own[role].setdefault(key, []).append(value)
    return general, own, problems


def _options(parsed: argparse.Namespace, own: Mapping[str, Mapping[str, Sequence[str]]]) -> dict[str, tuple[str, ...]]:
    """Each program's own options, and the shared ones that these do not name."""
    values: dict[str, dict[str, Sequence[str]]] = {role: {} for role in PROGRAMS}
    for name, keys in SHARED.items():
        if (value := getattr(parsed, name)) is not None:
            for role, key in keys.items():
                values[role][key] = [value]
    if parsed.overwrite_output_dir:
        values["train"]["overwrite_output_dir"] = ["true"]
    if parsed.colocate:
        values["train"]["colocate"] = values["infer"]["colocate"] = ["true"]
    if parsed.sleep_mode:
        for role in ROLES:
            values[role]["sleep_mode"] = ["true"]
    return {
        role: tuple(f"--{key}={value}" for key, given in (values[role] | dict(own[role])).items() for value in given)
        for role in PROGRAMS
    }


def _files(parsed: argparse.Namespace) -> tuple[dict[str, Path], list[str]]:
    files, problems = {}, []
    for role in PROGRAMS:
        given = getattr(parsed, role)
        if role == TEACHER and given is None and not _has_teacher(parsed.folder):
            continue
        if given is None and parsed.folder is None:
            problems.append(f"--{role}: no file; give a folder with {role}.yaml, or --{role} FILE")
            continue
        files[role] = Path(given) if given is not None else Path(parsed.folder) / f"{role}.yaml"
        if not files[role].is_file():
            problems.append(f"--{role}: {files[role]}: no such file; give the path of a YAML file with settings")
    return files, problems


def _has_teacher(folder: str | None) -> bool:
    return folder is not None and (Path(folder) / f"{TEACHER}.yaml").is_file()


def _unknown(arguments: Sequence[str]) -> list[str]:
    """One message for each argument that nothing takes; the value after an unknown option belongs to it."""
    problems = []
    for position, argument in enumerate(arguments):
        if argument.startswith("-"):
            problems.append(f"{argument.partition('=')[0]}: unknown option; {_suggestion(argument)}")
        elif not (position and arguments[position - 1].startswith("--")):
            problems.append(f"{argument}: unexpected; one FOLDER is taken, and options start with --")
    return problems


def _suggestion(argument: str) -> str:
    """The nearest option, or the program that has a setting of this name."""
    from configs.common import known_keys
    from configs.infer import InferSettings
    from configs.orch import OrchSettings
    from configs.train import TrainSettings

    key = argument.lstrip("-").partition("=")[0]
    keys = {cls.role: set(known_keys(cls)) for cls in (TrainSettings, InferSettings, OrchSettings)}
    if having := [f"--{role}.{key}" for role in ROLES if key in keys[role]]:
        return f"did you mean {' or '.join(having)}?"
    keys[TEACHER] = keys["infer"]
    own = [
        *PROGRAMS,
        *SHARED,
        "overwrite_output_dir",
        "colocate",
        "sleep_mode",
        "restarts",
        *(f"{role}_gpus" for role in ON_GPUS),
        "dry-run",
        *(f"{r}.{k}" for r in PROGRAMS for k in keys[r]),
    ]
    close = difflib.get_close_matches(key, own, n=1)
    return f"did you mean --{close[0]}?" if close else "grpo --help lists them"


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0")
    return int(text)


def _gpus(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(_INDEX.fullmatch(name) or _UUID.fullmatch(name) for name in names):
        raise argparse.ArgumentTypeError(f"{text!r} names no GPUs, expected indices or UUIDs with commas, as in 0,1")
    names = tuple(str(int(name)) if name.isdecimal() else name for name in names)
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} names a GPU twice; name each once")
    return names


class _Once(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, parsed: argparse.Namespace, value: Any, _: Any = None) -> None:
        if getattr(parsed, self.dest) is not None:
            parser.error(f"argument {self.option_strings[0]}: is given twice; give it once, as in 0,1")
        setattr(parsed, self.dest, value)


def _parser() -> _Parser:
    parser = _Parser(
        prog="grpo",
        usage=_USAGE,
        description="Starts grpo-infer, grpo-train and grpo-orch together, and ends them together.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help="holds train.yaml, infer.yaml and orch.yaml")
    for role in ROLES:
        parser.add_argument(f"--{role}", metavar="FILE", help=f"settings of grpo-{role} (instead of the folder's)")
    teacher = "settings of the grpo-infer that serves the teacher (instead of the folder's teacher.yaml, if any)"
    parser.add_argument("--teacher", metavar="FILE", help=teacher)
    for name, keys in SHARED.items():
        programs = ", ".join(f"{role}.{key}" for role, key in keys.items())
        parser.add_argument(f"--{name}", metavar=name.upper(), help=f"{_SHARED_HELP[name]}: sets {programs}")
    overwrite = "remove an earlier run from the run's folder first: sets train.overwrite_output_dir"
    parser.add_argument("--overwrite_output_dir", action="store_true", help=overwrite)
    colocate = "server and trainer on one device with one copy of the base weights: sets train.colocate, infer.colocate"
    parser.add_argument("--colocate", action="store_true", help=colocate)
    programs = ", ".join(f"{role}.sleep_mode" for role in ROLES)
    sleep_mode = f"the server sleeps while the trainer steps, on one GPU: sets {programs}"
    parser.add_argument("--sleep_mode", action="store_true", help=sleep_mode)
    restarts = "how often a program that is killed, or loses its engine, is started again while the run goes on (3)"
    parser.add_argument("--restarts", metavar="N", type=_number, help=restarts)
    whose = {"infer": "the server", "train": "the trainer", TEACHER: "the teacher's server"}
    for role in ON_GPUS:
        of = f"GPUs of {whose[role]}, of those that grpo sees: indices or UUIDs, as in 0,1 (see below)"
        parser.add_argument(f"--{role}_gpus", metavar="LIST", type=_gpus, action=_Once, help=of)
    dry_run = "resolve, check and print the effective settings of all programs, and stop"
    parser.add_argument("--dry-run", action="store_true", help=dry_run)
    return parser

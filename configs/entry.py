"""Functions that the programs' `main` functions call: the settings that a command line asks for, `--help` and
`--dry-run`."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from grpo.configs.errors import SettingsError, exit_with_problems
from grpo.configs.facts import planned_hardware
from grpo.configs.help import page, section_page
from grpo.configs.loading import S, dump, load, read_yaml
from grpo.configs.run import PROGRAMS, LoadedRun, RunSettings, load_part, load_run, presets
from pydantic import BaseModel


def load_settings(cls: type[S], argv: Sequence[str] | None = None) -> S:
    """Settings of one program, from its own file or its part of a run's; answers `--help` and `--dry-run` itself.

    Exits with status 0 after those two, and with status 2 and every problem on standard error where the settings
    cannot be honoured.
    """
    usage = [f"usage: grpo-{cls.role} [FILE.yaml | RUN] [--dry-run] [--KEY VALUE ...]"]
    notes = [
        f"grpo-{cls.role} --help KEY tells more of a key, or lists a section.",
        f"Environment variables are {cls.env_prefix}KEY, {cls.env_prefix}SECTION__KEY.",
        f"exit codes: {cls.exit_codes}",
    ]
    target, arguments, dry_run = _asked(cls, sys.argv[1:] if argv is None else argv, usage, notes)
    try:
        # A file without sections of programs is this one's own; what is no file is a run's folder or name.
        if target is not None and (not Path(target).is_file() or set(read_yaml(Path(target))) & set(PROGRAMS)):
            settings = load_part(cls, target, arguments)
        else:
            settings = load(cls, file=target, arguments=arguments).settings
    except SettingsError as error:
        exit_with_problems(error)
    if dry_run:
        print(dump(settings), end="")
        raise SystemExit(0)
    return settings


def run_of(argv: Sequence[str], *, commands: Mapping[str, str]) -> tuple[LoadedRun, bool]:
    """The run that a command line of `grpo` asks for, and whether its settings are only to be printed; answers `--help`
    itself. Exits with 2 and every problem where the settings cannot be honoured. `commands`: what others do."""
    usage = [
        "usage: grpo RUN [--dry-run] [--KEY VALUE ...]",
        "       grpo --model MODEL --env ENVIRONMENT [--dry-run] [--KEY VALUE ...]",
        "       grpo --train FILE --infer FILE --orch FILE [--teacher FILE] [...]",
        *(f"       {f'grpo {name} …':<20} {about}" for name, about in commands.items()),
    ]
    notes = [
        "A first run: grpo quickstart --output_dir outputs/first; with --view its page is served while it goes on.",
        f"RUN is a folder with run.yaml, such a file, or one of the presets {', '.join(presets())}.",
        "MODEL is a folder or a Hugging Face id, ENVIRONMENT a name as reverse-text, or FILE.py:CLASS of your own.",
        "Keys of one program follow its name: --train.learning_rate 1e-3 --orch.sampling.max_tokens 64.",
        "grpo --help train lists the trainer's keys; grpo --help KEY tells more of a key.",
        "Environment variables are GRPO_RUN_KEY, GRPO_TRAIN_KEY, GRPO_ORCH_SECTION__KEY and so on.",
        "exit codes: 0 done, 1 a program failed, 2 settings that cannot be honoured, 76 a proof does not hold, "
        "130 Ctrl-C, 143 SIGTERM",
    ]
    target, arguments, dry_run = _asked(RunSettings, argv, usage, notes)
    try:
        return load_run(target, arguments, hardware=planned_hardware() if dry_run else None), dry_run
    except SettingsError as error:
        exit_with_problems(error)


def _asked(
    cls: type[BaseModel], argv: Sequence[str], usage: list[str], notes: list[str]
) -> tuple[str | None, list[str], bool]:
    """The file or run that comes first, the options, and whether `--dry-run` is among them. Answers `--help` and
    `--help KEY` and exits, where one of them is given."""
    arguments = [argument for argument in argv if argument != "--dry-run"]
    for position in [number for number, one in enumerate(arguments) if one in ("--help", "-h")][:1]:
        key = "".join(arguments[position + 1 : position + 2]).removeprefix("--")
        notes += ["--dry-run prints the effective settings and stops."]
        notes += ["Precedence, highest first: command line, environment, file, default."]
        try:
            print(section_page(cls, key) if key else page(cls, usage, notes), end="")
        except SettingsError as error:
            exit_with_problems(error)
        raise SystemExit(0)
    target = arguments.pop(0) if arguments and not arguments[0].startswith("-") else None
    return target, arguments, "--dry-run" in argv

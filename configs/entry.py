"""What the programs' `main` functions call: the settings that a command line asks for, `--help` and `--dry-run`."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from configs.errors import SettingsError, exit_with_problems
from configs.help import help_text, run_help
from configs.loading import PROGRAMS, S, dump, load
from configs.run import Run, RunSettings, load_given, load_part, presets
from configs.sources import read_yaml, split


def load_settings(cls: type[S], argv: Sequence[str] | None = None) -> S:
    """Settings of one program, from its own file or its part of a run's; answers `--help` and `--dry-run` itself.

    Exits with status 0 after those two, and with status 2 and every problem on standard error where the settings
    cannot be honoured.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--help" in arguments or "-h" in arguments:
        print(help_text(cls, arguments), end="")
        raise SystemExit(0)
    file = arguments.pop(0) if arguments and not arguments[0].startswith("-") else None
    dry_run = "--dry-run" in arguments
    arguments = [argument for argument in arguments if argument != "--dry-run"]
    try:
        if file is not None and _is_of_run(cls, Path(file)):
            settings = load_part(cls, file, arguments)
        else:
            settings = load(cls, file=file, arguments=arguments).settings
    except SettingsError as error:
        exit_with_problems(error)
    if dry_run:
        print(dump(settings), end="")
        raise SystemExit(0)
    return settings


def _is_of_run(cls: type[S], path: Path) -> bool:
    """Whether a file has the settings of a run, or is no file but its folder or name."""
    return not path.is_file() or bool(set(read_yaml(path)) & set(PROGRAMS))


def run_of(argv: Sequence[str], *, commands: Mapping[str, str]) -> tuple[Run, bool]:
    """The run that a command line of `grpo` asks for, and whether its settings are only to be printed; answers `--help`
    itself. Exits with 2 and every problem where the settings cannot be honoured. `commands`: other commands, for the
    help."""
    if "--help" in argv or "-h" in argv:
        print(run_help(RunSettings, argv, presets=presets(), commands=commands), end="")
        raise SystemExit(0)
    dry_run = "--dry-run" in argv
    words, options = split(RunSettings, [argument for argument in argv if argument != "--dry-run"])
    try:
        return load_given(words[0] if words else None, words[1:], options), dry_run
    except SettingsError as error:
        exit_with_problems(error)

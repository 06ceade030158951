"""`grpo`: the three programs with one command, and commands that look at their runs."""

import argparse
import contextlib
import difflib
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpo
from grpo.configs.errors import SettingsError, exit_with_problems
from grpo.transport.errors import TransportError, UserError
from grpo.transport.logs import printable
from grpo.transport.parent import end_with_starter

COMMANDS = {
    "status": "what each program of a run is doing, and who waits for whom",
    "prove": "what is proved of a run: versions, tokens, gradients, rollouts, files; one exit code",
    "ledger": "what became of a prompt, a group, a rollout, and what trained a step",
    "view": "runs in a browser: curves, timeline, every rollout token by token, live",
    "report": "runs on one page for a paper or a pull request: curves, held out, proofs, costs, how to repeat it",
    "launch": "a run on a cluster, or a machine that ssh reaches: starts it, shows how it stands, ends it",
    "export": "a policy version as a PEFT adapter or a whole model, with its model card",
    "serve": "a policy version and its base over the OpenAI API",
    "service": "a training service for loops that are written against the tinker client",
    "chat": "a conversation with a policy version and its base, side by side",
    "evaluate": "how good a model, a run or a checkpoint is at environments, without training",
    "ratings": "how strong a run's versions and their opponents are, by all games that they played",
    "judge": "how far a policy is from one that nobody can beat at a game, exactly",
    "canary": "whether a server, of ours or not, serves a PEFT adapter",
    "data": "what a data set would ask, how long that is, and which rows cannot be used",
    "sft": "how a model learns prompts and answers from a file, before a run: a supervised first stage",
    "compare": "the same training with different settings, compared in a table and pictures",
    "docs": "the documentation's pages, as they are installed with this version",
}
"""Commands besides `run`, and what each does; the module of its name in `grpo.commands` answers it."""
UNREAD = 141
"""The exit code of a command whose output nobody reads any more, as in `grpo … | head`: 128 + SIGPIPE."""


def main() -> None:
    """Finds the command, and ends with its exit code."""
    end_with_starter()
    try:
        code = _command(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = UNREAD
    except KeyboardInterrupt:
        code = 130
    raise SystemExit(code)


def _command(argv: list[str]) -> int:
    """The exit code; what a person can mend is told in a line: 2 for what was asked wrongly, 1 for what failed."""
    try:
        if not argv:
            with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(SystemExit):
                _run(["--help"])
            return 2
        if argv[0] == "--version":
            print(f"grpo {grpo.__version__}")
            return 0
        if argv[0] in COMMANDS:
            return _answered(argv[0], argv[1:])
        if argv[0] == "help":
            argv = [*argv[1:2], "--help"] if argv[1:2] else ["--help"]
            return _command(argv)
        _check_command(argv)
        return _run(argv[1:] if argv[:1] == ["run"] else argv)
    except BrokenPipeError:
        raise
    except SettingsError as error:
        exit_with_problems(error)
    except (UserError, TransportError, OSError) as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, FileNotFoundError) else getattr(error, "exit_code", 1)


def _check_command(argv: list[str]) -> None:
    """Raises UserError for a word that is no command and no run, where it looks like the one or stands before one."""
    from grpo.configs.run import presets

    word, words = argv[0], [*COMMANDS, "run"]
    if word in words or word.startswith("-") or Path(word).exists() or word.replace("-", "_") in presets():
        return
    close = difflib.get_close_matches(word, [*words, *presets()], n=1)
    if close[:1] and close[0] in words:
        raise UserError(f"no command {word!r}; did you mean {close[0]}?")
    if argv[1:] and not argv[1].startswith("-"):
        raise UserError(f"no command {word!r}; there are {', '.join(words)}. A run is started by grpo {argv[1]}")


def _answered(command: str, argv: list[str]) -> int:
    module: Any = importlib.import_module(f"grpo.commands.{command}")
    parser = argparse.ArgumentParser(
        prog=f"grpo {command}",
        description=f"{COMMANDS[command][0].upper()}{COMMANDS[command][1:]}.",
        epilog=module.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    options, others = parser.parse_known_args(argv)
    options.others = others
    if others and not hasattr(module, "TAKES_OTHERS"):
        parser.error(f"unknown: {' '.join(others)}")
    return int(module.main(options))


def _run(argv: list[str]) -> int:
    from grpo.configs.entry import run_of

    with_page = "--view" in argv
    argv = [word for word in argv if word != "--view"]
    asked, dry_run = run_of(argv, commands=COMMANDS)

    from grpo.commands.status import shown
    from grpo.deploy.launcher import run

    if not with_page:
        return run(asked, shown, dry_run=dry_run)

    from grpo.commands.view import page_of

    @contextlib.contextmanager
    def shown_with_page(folder: Path) -> Iterator[Callable[[], None]]:
        with page_of(folder), shown(folder) as tick:
            yield tick

    return run(asked, shown_with_page, dry_run=dry_run)


if __name__ == "__main__":
    main()

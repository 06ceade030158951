"""`grpo`: the three programs with one command, and commands that look at their runs."""

import importlib
import sys

from deploy.output import ends_unread, go_on_unread

COMMANDS = {
    "status": "deploy.status",
    "ledger": "deploy.ledger_view",
    "bench-async": "deploy.bench_async",
    "ablate": "deploy.ablate",
}
"""The modules whose `main` answers each command."""
ONLY_PRINT = ("status", "ledger")
"""Those that do nothing else; the others train."""


def main() -> None:
    """Parses, then imports what is heavy, and ends with the run's exit code."""
    if sys.argv[1:] and sys.argv[1] in ONLY_PRINT:
        with ends_unread():
            raise SystemExit(importlib.import_module(COMMANDS[sys.argv[1]]).main(sys.argv[2:]))
    go_on_unread()
    if sys.argv[1:] and sys.argv[1] in COMMANDS:
        raise SystemExit(importlib.import_module(COMMANDS[sys.argv[1]]).main(sys.argv[2:]))

    from deploy.arguments import ArgumentsError, parse

    try:
        arguments = parse(sys.argv[1:])
    except ArgumentsError as error:
        print("\n".join(f"error: command line: {message}" for message in error.messages), file=sys.stderr)
        raise SystemExit(2) from None

    from deploy.launcher import run
    from deploy.progress import shown

    raise SystemExit(run(arguments, shown))


if __name__ == "__main__":
    main()

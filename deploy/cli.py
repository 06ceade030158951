"""`grpo`: the three programs with one command."""

import sys


def main() -> None:
    """Parses, then imports what is heavy, and ends with the run's exit code."""
    from deploy.arguments import ArgumentsError, parse

    try:
        arguments = parse(sys.argv[1:])
    except ArgumentsError as error:
        print("\n".join(f"error: command line: {message}" for message in error.messages), file=sys.stderr)
        raise SystemExit(2) from None

    from deploy.launcher import run

    raise SystemExit(run(arguments))


if __name__ == "__main__":
    main()

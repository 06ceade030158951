"""What the commands share that train several times and compare the runs."""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from deploy.arguments import Arguments, ArgumentsError
from transport.folders import write_atomic


class CannotCompare(ValueError):
    """Runs from which no comparison can be made."""


class RunFailed(Exception):
    """The launcher has said why."""

    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__(f"exit code {exit_code}")


def make_parser(
    command: str, *, description: str, epilog: str, own_usage: str, output_dir: str
) -> argparse.ArgumentParser:
    """A parser of `grpo COMMAND FOLDER` for what concerns all runs: their steps, and the folder that they are in."""
    parser = argparse.ArgumentParser(
        prog=f"grpo {command}",
        usage=f"grpo {command} FOLDER [--steps N] {own_usage} [options of grpo] [--PROGRAM.KEY VALUE ...]",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--steps", metavar="N", help="training steps of each run (as --max_steps)")
    help_text = f"for all runs and the report ({output_dir})"
    parser.add_argument("--output_dir", type=Path, default=Path(output_dir), help=help_text)
    return parser


def with_steps(others: Sequence[str], steps: str | None) -> list[str]:
    """The options of `grpo`, with --steps among them."""
    return [*others, *([] if steps is None else ["--max_steps", steps])]


def with_options(arguments: Arguments, role: str, values: Mapping[str, object]) -> Arguments:
    """The same with other settings of one program."""
    keys = tuple(f"--{key}=" for key in values)
    kept = tuple(option for option in arguments.options[role] if not option.startswith(keys))
    options = (*kept, *(f"--{key}={value}" for key, value in values.items()))
    return replace(arguments, options={**arguments.options, role: options})


def exit_code_of(work: Callable[[], None]) -> int:
    """0 where `work` could be done, otherwise what a command ends with, once standard error says why."""
    try:
        work()
    except ArgumentsError as error:
        print("\n".join(f"error: command line: {message}" for message in error.messages), file=sys.stderr)
        return 2
    except CannotCompare as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except RunFailed as failed:
        return failed.exit_code
    return 0


def steps_of(folder: Path) -> dict[int, Mapping[str, float]]:
    """The metrics of each step of a run, in their order. Raises `CannotCompare` where there are none."""
    path = folder / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    steps = {int(record["progress/step"]): record for record in records if "reward/mean" in record}
    if not steps:
        raise CannotCompare(f"{folder} has no metrics of any step; see its logs")
    return dict(sorted(steps.items()))


def last_quarter(steps: Mapping[int, Mapping[str, float]], key: str) -> list[float]:
    """A metric in the last quarter of the steps, one of them at least; of a metric that only some steps have, those."""
    newest = list(steps.values())[-max(1, len(steps) // 4) :]
    return [metrics[key] for metrics in newest if key in metrics]


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean, and the sample standard deviation of two values or more."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def write_report(path: Path, fields: Mapping[str, object]) -> None:
    """As JSON, whole or not at all."""
    write_atomic(path, json.dumps(fields, indent=1).encode() + b"\n")

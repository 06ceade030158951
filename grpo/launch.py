"""`grpo launch RUN --on slurm|kubernetes|sky`: a run over the machines of a cluster, by what schedules them."""

import argparse
import sys
from pathlib import Path

from configs.errors import SettingsError, exit_with_problems
from configs.run import load_run
from deploy import cluster, slurm
from grpo.run_files import NoRun
from grpo.status import run_status, shown, text
from transport.errors import RunFolderError

TAKES_OTHERS = True
ENGINES = ("slurm",)
EPILOG = """\
The first time it starts the run, as topology in run.yaml says; given again it shows how it stands, and --stop ends it.
Started once more, it goes on. Other --key value options are settings, as of grpo. docs/clusters.md tells more.
exit codes: 0 done, 1 the engine refuses, 2 settings that cannot be honoured"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own options."""
    parser.add_argument("run", metavar="RUN", help="a folder with run.yaml, such a file, or a preset's name")
    parser.add_argument("--on", required=True, choices=ENGINES, help="what starts the programs")
    parser.add_argument("--dry-run", action="store_true", help="print what would be handed over, and stop")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--stop", action="store_true", help="end what runs; the run's folder stays")


def main(options: argparse.Namespace) -> int:
    """Returns the exit code."""
    try:
        run = load_run(options.run, options.others)
        cluster.check(run)
        folder = Path(run.train.settings.output_dir)
        if options.inside:
            return slurm.inside(run, options.run, shown)
        if options.dry_run:
            print(slurm.script(run, options.run, options.others), end="")
            return 0
        if options.stop:
            print(slurm.stop(folder))
        elif (state := slurm.state(folder)) is not None:
            print(state)
            print(text(run_status(folder)))
        else:
            print(slurm.submit(run, options.run, options.others))
    except SettingsError as error:
        exit_with_problems(error)
    except (RunFolderError, NoRun) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0

"""`grpo launch RUN --on slurm|kubernetes|sky|ssh:HOST`: a run over the machines of a cluster, or on one that
ssh reaches."""

import argparse
from pathlib import Path

from grpo.commands.status import run_status, shown, text
from grpo.configs.run import LoadedRun, load_run
from grpo.deploy import cluster, kubernetes, sky, slurm, ssh
from grpo.transport.run import current_run_id
from grpo.transport.status import FINISHED

TAKES_OTHERS = True
EPILOG = """\
The first time it starts the run, as topology in run.yaml says; given again it shows how it stands, and --stop ends it.
Started once more, it goes on. Other --key value options are settings, as of grpo. docs/clusters.md tells more.
exit codes: 0 done, 1 the engine refuses, 2 settings that cannot be honoured"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own options."""
    parser.add_argument("run", metavar="RUN", help="a folder with run.yaml, such a file, or a preset's name")
    parser.add_argument(
        "--on", required=True, type=_engine, metavar="slurm|kubernetes|sky|ssh:HOST", help="where it runs"
    )
    parser.add_argument("--overlay", choices=kubernetes.OVERLAYS, default="base", help="what Kubernetes gets")
    parser.add_argument("--dry-run", action="store_true", help="print what would be handed over, and stop")
    parser.add_argument("--stop", action="store_true", help="end what runs; the run's folder stays")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)


def _engine(text: str) -> str:
    if text not in ("slurm", "kubernetes", "sky") and not text.startswith("ssh:"):
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: expected slurm, kubernetes, sky or ssh:HOST")
    return text


def main(options: argparse.Namespace) -> int:
    """Returns the exit code."""
    run = load_run(options.run, options.others, hardware=cluster.HARDWARE)
    if options.on.startswith("ssh:"):
        print(_by_ssh(run, ssh.host_of(options.on), options))
        return 0
    cluster.check(run)
    if options.inside:
        return slurm.inside(run, options.run, shown)
    on = {"slurm": _on_slurm, "kubernetes": _on_kubernetes, "sky": _on_sky}[options.on]
    print(on(run, options))
    return 0


def _on_slurm(run: LoadedRun, options: argparse.Namespace) -> str:
    folder = Path(run.train.settings.output_dir)
    if options.dry_run:
        return slurm.script(run, options.run, options.others)
    if options.stop:
        return slurm.stop(folder)
    if (state := slurm.state(folder)) is not None:
        return f"{state}\n{text(run_status(folder))}"
    return _finished(run, folder) or slurm.submit(run, options.run, options.others)


def _by_ssh(run: LoadedRun, host: str, options: argparse.Namespace) -> str:
    if options.dry_run:
        return ssh.script(run, options.run, options.others)
    if options.stop:
        return ssh.stop(run, host)
    return ssh.state(run, host) or ssh.submit(run, host, options.run, options.others)


def _finished(run: LoadedRun, folder: Path) -> str | None:
    """A word where the run has nothing left to do."""
    train, last = run.train.settings, run.orch.settings.max_steps
    if train.overwrite_output_dir or current_run_id(folder) is None:
        return None
    status = run_status(folder, count=False)
    if status.state != FINISHED or last is None or (status.shipped or 0) < last:
        return None
    return f"the run in {folder} has done its {last} steps; raise max_steps to go on"


def _on_kubernetes(run: LoadedRun, options: argparse.Namespace) -> str:
    if options.dry_run:
        rendered = kubernetes.files(run, options.run)
        return "\n".join(f"# {path}\n{rendered[path]}" for path in sorted(rendered))
    if options.stop:
        return kubernetes.stop(run, options.overlay)
    return kubernetes.state(run) or kubernetes.submit(run, options.run, options.overlay)


def _on_sky(run: LoadedRun, options: argparse.Namespace) -> str:
    if options.dry_run:
        return sky.group(run, options.run)
    return sky.stop(run) if options.stop else sky.state(run) or sky.submit(run, options.run)

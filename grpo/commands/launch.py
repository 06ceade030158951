"""`grpo launch RUN --on slurm|kubernetes|sky|ssh:HOST`: a run over the machines of a cluster, or on one that ssh
reaches; with the word `service` in place of a run, a training service."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from grpo.commands.service import SERVER_KEY_VAR, server_settings, train_settings
from grpo.commands.service import add_arguments as add_service_arguments
from grpo.commands.status import run_status, shown, text
from grpo.configs.run import LoadedRun, load_run
from grpo.configs.topology import Topology
from grpo.deploy import cluster, kubernetes, service, sky, slurm, ssh
from grpo.deploy.service import ServiceLaunch
from grpo.service_folder import SERVICE
from grpo.transport.errors import UserError
from grpo.transport.run import current_run_id
from grpo.transport.status import FINISHED

TAKES_OTHERS = True
EPILOG = """\
The first time it starts the run, as topology in run.yaml says; given again it shows how it stands, and --stop ends it.
Started once more, it goes on. Other --key value options are settings, as of grpo. `grpo docs clusters` tells more. A
training service takes the options of grpo service, and --topology as JSON:

  grpo launch service --on slurm --model M --output_dir D --topology '{"infer": {"replicas": 2}}'

exit codes: 0 done, 1 the engine refuses, 2 settings that cannot be honoured"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own options."""
    parser.add_argument(
        "run", metavar="RUN", help="a folder with run.yaml, such a file, or a preset's name; or: service"
    )
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
    if options.run == SERVICE:
        print(_service(launched(options.others), options))
        return 0
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
        return _shown(kubernetes.files(run, options.run))
    if options.stop:
        return kubernetes.stop(cluster.name_of(run), options.overlay)
    return kubernetes.state(cluster.name_of(run)) or kubernetes.submit(run, options.run, options.overlay)


def _on_sky(run: LoadedRun, options: argparse.Namespace) -> str:
    if options.dry_run:
        return sky.group(run, options.run)
    return sky.stop(run) if options.stop else sky.state(run) or sky.submit(run, options.run)


def _shown(files: Mapping[str, str]) -> str:
    return "\n".join(f"# {path}\n{files[path]}" for path in sorted(files))


def launched(words: Sequence[str]) -> ServiceLaunch:
    """Returns what `grpo launch service` hands to a cluster, from the options of this command and `--topology`. Raises
    `UserError` and `SettingsError`."""
    parser = argparse.ArgumentParser(prog="grpo launch service", add_help=False)
    add_service_arguments(parser)
    parser.add_argument("--topology", default="{}")
    options = parser.parse_args(words)
    if options.server:
        raise UserError("--server: grpo launch starts the servers, as many as topology.infer.replicas says")
    if options.host != "127.0.0.1":
        raise UserError("--host: on a cluster the service listens on all addresses of its machine")
    try:
        topology = Topology.model_validate_json(options.topology)
    except ValueError as error:
        raise UserError(
            f"--topology is {options.topology[:200]!r}, expected JSON as `grpo docs clusters` shows: {error}"
        ) from error
    if topology.train.nodes > 1:
        raise UserError(f"topology.train.nodes is {topology.train.nodes}, and a service trains on one machine")
    if options.device == "auto":  # this machine need not have what those of the cluster have
        options.device = "cuda"
    settings = train_settings(options)
    server = {} if options.no_sampling else server_settings(options, settings)
    own = {"model": options.model, "tenants": ",".join(options.tenants), "sequence_len": settings.sequence_len}
    own |= {"micro_batch_tokens": options.micro_batch_tokens, "max_rank": options.max_rank, "device": options.device}
    own |= {"num_threads": options.num_threads, "gpus": options.gpus}
    return ServiceLaunch(
        output_dir=options.output_dir,
        port=options.port or service.PORT,
        words=tuple(f"--{key}={value}" for key, value in own.items() if value is not None),
        server={key: value for key, value in server.items() if key not in ("host", "port")},
        num_gpus=options.gpus if options.device == "cuda" else 0,
        key_var=SERVER_KEY_VAR,
        topology=topology,
    )


def _service(asked: ServiceLaunch, options: argparse.Namespace) -> str:
    if options.on not in ("slurm", "kubernetes"):
        raise UserError(f"a service is written for slurm and kubernetes; start grpo service itself on {options.on}")
    if options.on == "slurm" and asked.topology.container.image is not None:
        raise UserError("topology.container is of runs; a service on Slurm runs as it is installed there")
    if options.overlay != "base":
        raise UserError(f"--overlay {options.overlay} is of runs; a service has Kubernetes' own kinds alone")
    if options.on == "slurm":
        if options.dry_run:
            return service.script(asked)
        if options.stop:
            return slurm.stop(asked.output_dir)
        return slurm.state(asked.output_dir) or service.submit_to_slurm(asked)
    if options.dry_run:
        return _shown(service.files(asked))
    if options.stop:
        return kubernetes.stop(asked.name, "base")
    return kubernetes.state(asked.name) or service.submit_to_kubernetes(asked)

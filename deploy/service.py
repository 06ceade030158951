"""The training service on a cluster: the service, and grpo-infers on machines of their own, whose addresses it knows.

Both are started again where they end: the service goes on from its log, and does without a server that does not answer.
Not run on a real cluster: the files are validated, and their commands run.
"""

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from grpo.configs.topology import Topology
from grpo.deploy.cluster import ALL_INTERFACES, Part, name_of_folder, output_of
from grpo.deploy.kubernetes import VOLUME, rendered, yaml_of
from grpo.deploy.slurm import JOB_FILE, option, resources_of
from grpo.transport.errors import UserError
from grpo.transport.folders import write_atomic
from grpo.transport.parent import PARENT_VAR

PORT = 8100
SERVERS = "$servers"
"""Stands for the servers' addresses in the command on Slurm, whose shell puts them there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLaunch:
    """What a service on a cluster is."""

    output_dir: Path
    port: int
    words: tuple[str, ...]
    """Options of `grpo service` but for folder, address and servers."""
    server: Mapping[str, Any]
    """Settings of each grpo-infer but for folder and address; empty for no sampling."""
    num_gpus: int
    """GPUs that the service trains on; 0 for a CPU."""
    key_var: str
    """Environment variable with the servers' API key."""
    topology: Topology

    @property
    def name(self) -> str:
        """Its name in the cluster."""
        return name_of_folder(self.output_dir)


def parts(asked: ServiceLaunch, *, output_dir: str, servers: str) -> list[Part]:
    """Returns the servers, where there are any, and the service, for which `topology.train` holds."""
    infer, train = asked.topology.infer, asked.topology.train
    of_server = int(asked.num_gpus > 0)
    address = {"host": ALL_INTERFACES, "port": asked.topology.port, "output_dir": output_dir}
    found = []
    if asked.server:
        found.append(
            Part(
                role="infer",
                argv=("grpo-infer", *(f"--{key}={value}" for key, value in {**asked.server, **address}.items())),
                replicas=infer.replicas,
                gpus=of_server if infer.gpus is None else infer.gpus,
                cpus=infer.cpus,
                memory_gb=infer.memory_gb,
                port=asked.topology.port,
            )
        )
    own = [f"--output_dir={output_dir}", f"--host={ALL_INTERFACES}", f"--port={asked.port}"]
    samples = [f"--server={servers}"] if asked.server else ["--no_sampling"]
    service = Part(
        role="service",
        argv=("grpo", "service", *asked.words, *own, *samples),
        gpus=asked.num_gpus if train.gpus is None else train.gpus,
        cpus=train.cpus,
        memory_gb=train.memory_gb,
        port=asked.port,
    )
    return [*found, service]


# --- Slurm ---


def script(asked: ServiceLaunch) -> str:
    """Returns the file for sbatch: a group of one machine for the service, and one of a machine for each server."""
    folder = asked.output_dir.absolute()
    *servers, service = parts(asked, output_dir=str(folder), servers=SERVERS)
    common = [option(key, value) for key, value in asked.topology.slurm.items()]
    head = [f"--job-name={asked.name}", option("chdir", Path.cwd()), "--requeue", "--open-mode=append"]
    head.append(option("output", f"{folder}/logs/slurm.log".replace("%", "%%")))
    lines = ["#!/bin/bash", *(f"#SBATCH {word}" for word in [*head, *common, "--ntasks=1", *resources_of(service)])]
    python = (sys.executable, "-P", "-m")
    command = shlex.join([*python, "grpo.cli", *service.argv[1:]]).replace(
        f"'--server={SERVERS}'", '"--server=$servers"'
    )
    for part in servers:
        machines = [f"--nodes={part.replicas}", "--ntasks-per-node=1"]
        lines += ["#SBATCH hetjob", *(f"#SBATCH {word}" for word in [*common, *machines, *resources_of(part)])]
        step = ["srun", "--het-group=1", f"--nodes={part.replicas}", f"--ntasks={part.replicas}", "--exact"]
        step += ["--unbuffered", "--kill-on-bad-exit=0", *resources_of(part), "env", f"--unset={PARENT_VAR}"]
        again = 'while :; do "$@"; sleep 5; done'  # a server that has ended comes back, and loads what it is asked for
        server = [*python, "grpo.infer.cli", *part.argv[1:]]
        lines += [
            'hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_1")',
            f'servers=$(printf "http://%s:{part.port}," $hosts)',
            "servers=${servers%,}",
            f"{shlex.join([*step, 'bash', '-c', again, 'server', *server])} &",
        ]
    return "\n".join([*lines, f"exec {command}", ""])


def submit_to_slurm(asked: ServiceLaunch) -> str:
    """Queues the service, and says so. Raises `UserError`, and OSError where Slurm refuses."""
    if asked.server and not os.environ.get(asked.key_var):
        raise UserError(
            f"{asked.key_var} is not set, and service and servers reach each other over a network; set it: "
            f"export {asked.key_var}=$(openssl rand -hex 32)"
        )
    settings, logs = asked.output_dir / "settings", asked.output_dir / "logs"
    for folder in (settings, logs):
        folder.mkdir(parents=True, exist_ok=True)
    file = settings / "slurm.sh"
    write_atomic(file, script(asked).encode(), durable=False, private=True)
    number = output_of("sbatch", "--parsable", str(file)).partition(";")[0]
    (settings / JOB_FILE).write_text(number)
    return f"queued as job {number}: {file}; its log is {logs / 'slurm.log'}, and service.json will have its address"


# --- Kubernetes ---


def files(asked: ServiceLaunch) -> dict[str, str]:
    """Returns the files of a folder for `kubectl apply -k FOLDER/base`, by their paths: StatefulSets of the servers and
    of the service, whose address in the cluster is `http://NAME-service:PORT`."""
    name, port = asked.name, asked.topology.port
    urls = [f"http://{name}-infer-{number}.{name}-infer:{port}" for number in range(asked.topology.infer.replicas)]
    own = parts(asked, output_dir=f"{VOLUME}/{name}", servers=",".join(urls))
    resources = rendered(name, own, [], asked.topology, has_settings=False)
    kept = [one for one in resources if one["kind"] not in ("JobSet", "LeaderWorkerSet")]
    kustomization = yaml.safe_dump({"resources": ["resources.yaml"]})
    return {"base/resources.yaml": yaml_of(*kept), "base/kustomization.yaml": kustomization}


def submit_to_kubernetes(asked: ServiceLaunch) -> str:
    """Hands the service to the cluster that kubectl is set up for. Raises OSError."""
    folder = Path(f"{asked.output_dir}-kubernetes")
    for path, text in files(asked).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / path, text.encode(), durable=False, private=True)
    return output_of("kubectl", "apply", "-k", str(folder / "base"))

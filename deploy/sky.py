"""A run on SkyPilot: a job group, whose tasks run side by side and find each other by name.

A task that ends with 75, or whose machine the cloud takes, is started again. All share one volume. Parsed by
SkyPilot's own package, not run on a cloud.
"""

import shlex
from pathlib import Path
from typing import Any

import yaml
from grpo.configs.run import LoadedRun, run_file
from grpo.deploy.cluster import Part, Places, name_of, output_of, parts, preset_of, secrets
from grpo.transport.errors import START_AGAIN
from grpo.transport.folders import write_atomic

VOLUME, SETTINGS = "/outputs", "/etc/grpo"


def group(run: LoadedRun, target: str) -> str:
    """The file of the job group: a head, then a task for each part."""
    name, source, topology = name_of(run), run_file(target), run.settings.topology
    preset = preset_of(target)
    places = Places(
        target=preset or f"{SETTINGS}/{source.name}",
        output_dir=f"{VOLUME}/{name}",
        trainer=f"train-0.{name}",
        orchestrator=f"orch-0.{name}",
        urls=tuple(f"http://infer-{n}.{name}:{topology.port}/v1" for n in range(topology.infer.replicas)),
        environments=tuple(f"env-{number}-0.{name}" for number in range(len(run.orch.settings.env))),
    )
    head = {"name": name, "execution": "parallel", "primary_tasks": ["train", "orch"]}
    all_parts = parts(run, places)
    mounts = {} if preset else {f"{SETTINGS}/{source.name}": str(source.absolute())}
    names = secrets(all_parts, run)
    text: str = yaml.safe_dump_all(
        [head, *(_task(run, one, name, mounts, names) for one in all_parts)], sort_keys=False
    )
    return text


def _task(run: LoadedRun, part: Part, name: str, mounts: dict[str, str], names: tuple[str, ...]) -> dict[str, Any]:
    resources: dict[str, Any] = {**run.settings.topology.sky, "image_id": f"docker:{run.settings.topology.image}"}
    resources |= {} if part.cpus is None else {"cpus": f"{part.cpus}+"}
    resources |= {} if part.memory_gb is None else {"memory": f"{part.memory_gb:g}+"}
    kind = resources.pop("accelerators", "H100")
    resources |= {"accelerators": f"{kind}:{part.gpus}"} if part.gpus else {}
    resources["job_recovery"] = {"max_restarts_on_errors": 0, "recover_on_exit_codes": [START_AGAIN]}
    task = {"name": part.name, "num_nodes": part.replicas, "resources": resources}
    task |= {"file_mounts": mounts} if mounts else {}
    return task | {"volumes": {VOLUME: name}, "secrets": dict.fromkeys(names, ""), "run": shlex.join(part.argv)}


# --- from outside ---


def submit(run: LoadedRun, target: str) -> str:
    """Hands the group to SkyPilot. Raises OSError."""
    file = Path(f"{run.train.settings.output_dir}-sky.yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, group(run, target).encode(), durable=False, private=True)
    words = [word for name in secrets(parts(run, Places()), run) for word in ("--secret", name)]
    return output_of("sky", "jobs", "launch", "--yes", "--detach-run", *words, str(file))


def state(run: LoadedRun) -> str | None:
    """Returns SkyPilot's lines about jobs of this name that have not ended; None where there is none."""
    lines = [
        line
        for line in output_of("sky", "jobs", "queue", "--skip-finished").splitlines()
        if f" {name_of(run)} " in line
    ]
    return "\n".join(lines) or None


def stop(run: LoadedRun) -> str:
    """Ends what runs; the volume stays."""
    return output_of("sky", "jobs", "cancel", "--yes", "--name", name_of(run))

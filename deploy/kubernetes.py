"""A run on Kubernetes: core kinds in a base for kustomize, JobSet and LeaderWorkerSet in overlays over it.

Servers are a StatefulSet that a headless Service names; trainer and orchestrator are Indexed Jobs, whose pods are made
again where they end with 75 or the cluster takes their machine, and which fail with 1, 2 and 76; environments are
Deployments. All share one volume. Not run on a real cluster: the files are validated, and their commands run.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from grpo.configs.errors import SettingsError
from grpo.configs.run import RUN_FILE, LoadedRun, run_file
from grpo.configs.topology import Topology
from grpo.deploy.cluster import Part, Places, name_of, output_of, parts, preset_of
from grpo.deploy.programs import OWN_FAILURES
from grpo.transport.errors import START_AGAIN
from grpo.transport.folders import write_atomic
from jinja2 import Environment, StrictUndefined

VOLUME, SETTINGS = "/outputs", "/etc/grpo"
TEMPLATE = Path(__file__).with_suffix(".yaml.j2")
OVERLAYS = {
    "base": (),
    "jobset": (("batch/v1", "Job", "train"), ("batch/v1", "Job", "orch")),
    "leaderworkerset": (("apps/v1", "StatefulSet", "infer"),),
}
"""Resources of the base that the kind of the same name replaces."""
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_INSTANCE = "app.kubernetes.io/instance"


def files(run: LoadedRun, target: str) -> dict[str, str]:
    """The files of a folder for `kubectl apply -k FOLDER/base`, or one of the overlays, by their paths. Raises
    `SettingsError` where a name is none in Kubernetes."""
    name, source, preset = name_of(run), run_file(target), preset_of(target)
    if not _NAME.fullmatch(run.settings.topology.secret):
        message = "is no name of a secret; use small letters, digits, '-' and '.', a letter or digit first and last"
        raise SettingsError([run.problem("topology.secret", message)])
    seen_as = preset or f"{SETTINGS}/{RUN_FILE}"
    resources = rendered(
        name,
        _parts(run, seen_as, name, f"{name}-train-0.{name}-train"),
        _parts(run, seen_as, name, f"{name}-train-0-0.{name}"),
        run.settings.topology,
        has_settings=preset is None,
    )
    found: dict[str, list[Any]] = {overlay: [] for overlay in OVERLAYS}
    for resource in resources:
        kind = resource["kind"].lower()
        found[kind if kind in OVERLAYS else "base"].append(resource)
    written = {f"{overlay}/resources.yaml": yaml_of(*resources) for overlay, resources in found.items()}
    kustomization: dict[str, Any] = {"resources": ["resources.yaml"]}
    if preset is None:
        kustomization["configMapGenerator"] = [{"name": f"{name}-settings", "files": [RUN_FILE]}]
        written[f"base/{RUN_FILE}"] = source.read_text(encoding="utf-8")
    written["base/kustomization.yaml"] = yaml_of(kustomization)
    for overlay in ("jobset", "leaderworkerset"):
        gone = [
            {"apiVersion": version, "kind": kind, "metadata": {"name": f"{name}-{role}"}, "$patch": "delete"}
            for version, kind, role in OVERLAYS[overlay]
        ]
        over = {"resources": ["../base", "resources.yaml"], "patches": [{"patch": yaml_of(one)} for one in gone]}
        written[f"{overlay}/kustomization.yaml"] = yaml_of(over)
    return written


def rendered(
    name: str, parts: Sequence[Part], parts_of_set: Sequence[Part], topology: Topology, *, has_settings: bool
) -> list[Any]:
    """Returns the resources of what is called `name`; in those for overlays are `parts_of_set`."""
    environment = Environment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined, autoescape=False)
    environment.filters["command"] = _command
    text = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        name=name,
        parts=parts,
        parts_of_set=parts_of_set,
        topology=topology,
        has_settings=has_settings,
        volume=VOLUME,
        settings=SETTINGS,
        start_again=START_AGAIN,
        own_failures=list(OWN_FAILURES),
    )
    return list(yaml.safe_load_all(text))


def _command(argv: Sequence[str]) -> str:
    """A container's command as JSON. The kubelet puts variables in the place of `$(NAME)`, and reads `$$` as `$`."""
    return json.dumps([word.replace("$", "$$") for word in argv])


def _parts(run: LoadedRun, target: str, name: str, trainer: str) -> list[Part]:
    num_envs = len(run.orch.settings.env)
    return parts(
        run,
        Places(
            target=target,
            output_dir=f"{VOLUME}/{name}",
            trainer=trainer,
            orchestrator=f"{name}-orch-0.{name}-orch",
            servers=f"{name}-infer",
            environments=tuple(f"{name}-env-{number}" for number in range(num_envs)),
        ),
    )


def yaml_of(*documents: Any) -> str:
    """Returns documents as one text."""
    text: str = yaml.safe_dump_all(documents, sort_keys=False, width=120)
    return text


# --- from outside ---


def submit(run: LoadedRun, target: str, overlay: str) -> str:
    """Hands the run to the cluster that kubectl is set up for. Raises OSError."""
    folder = Path(f"{run.train.settings.output_dir}-kubernetes")
    for path, text in files(run, target).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / path, text.encode(), durable=False, private=True)
    return output_of("kubectl", "apply", "-k", str(folder / overlay))


def state(name: str) -> str | None:
    """Returns the cluster's resources of what is called `name`; None where there are none."""
    chosen = ("-l", f"{_INSTANCE}={name}", "--ignore-not-found")
    return output_of("kubectl", "get", "pods,jobs", *chosen) or None


def stop(name: str, overlay: str) -> str:
    """Ends what runs; the volume stays."""
    more = {"jobset": ",jobsets.jobset.x-k8s.io", "leaderworkerset": ",leaderworkersets.leaderworkerset.x-k8s.io"}
    kinds = f"jobs,statefulsets,deployments,services{more.get(overlay, '')}"
    return output_of("kubectl", "delete", kinds, "-l", f"{_INSTANCE}={name}", "--ignore-not-found")

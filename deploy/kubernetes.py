"""A run on Kubernetes: core kinds in a base for kustomize, JobSet and LeaderWorkerSet in overlays over it.

Servers are a StatefulSet that a headless Service names; trainer and orchestrator are Indexed Jobs, whose pods are made
anew where they end with 75 or the cluster takes their machine, and which fail with 1 and 2; environments are
Deployments. All share one volume. Not run on a real cluster: the files are validated, and their commands run.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from configs.run import PRESETS, Run, run_file
from deploy.cluster import Part, Places, name_of, parts, said_by
from transport.errors import START_AGAIN

Resource = dict[str, Any]
VOLUME, SETTINGS, HEALTH = "/outputs", "/etc/grpo", "/health"
OVERLAYS = ("base", "jobset", "leaderworkerset")
_LABEL = "app.kubernetes.io"
_FAILURES = [1, 2]
"""Exit codes that another start does not mend."""


def files(run: Run, target: str) -> dict[str, str]:
    """The files of a folder for `kubectl apply -k FOLDER/base`, or one of the overlays, by their paths."""
    name, source = name_of(run), run_file(target)
    preset = source.parent.name if source.is_relative_to(PRESETS) else None
    seen_as = preset or f"{SETTINGS}/{source.name}"
    base = _base(run, name, _parts(run, seen_as, name, f"{name}-train-0.{name}-train"), preset is None)
    kustomization: Resource = {"resources": list(base)}
    written = {f"base/{path}": _yaml(resources) for path, resources in base.items()}
    if preset is None:
        kustomization["configMapGenerator"] = [{"name": f"{name}-settings", "files": [source.name]}]
        written[f"base/{source.name}"] = source.read_text(encoding="utf-8")
    written["base/kustomization.yaml"] = _yaml([kustomization])
    in_set = _parts(run, seen_as, name, f"{name}-train-0-0.{name}")
    jobs = [part for part in in_set if part.role in ("train", "orch")]
    overlays = {
        "jobset": (
            _job_set(name, jobs, _pods(run, name, preset is None)),
            [("Job", f"{name}-{one.role}") for one in jobs],
        ),
        "leaderworkerset": (
            _leader_worker_set(name, in_set[0], _pods(run, name, preset is None)),
            [("StatefulSet", f"{name}-infer")],
        ),
    }
    for overlay, (resource, instead_of) in overlays.items():
        patches = [{"patch": _yaml([_deletion(kind, one)])} for kind, one in instead_of]
        written[f"{overlay}/{overlay}.yaml"] = _yaml([resource])
        written[f"{overlay}/kustomization.yaml"] = _yaml(
            [{"resources": ["../base", f"{overlay}.yaml"], "patches": patches}]
        )
    return written


def _parts(run: Run, target: str, name: str, trainer: str) -> list[Part]:
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


def _base(run: Run, name: str, all_parts: Iterable[Part], has_settings: bool) -> dict[str, list[Resource]]:
    """Resources by file."""
    pods, storage = _pods(run, name, has_settings), f"{run.settings.topology.storage_gb}Gi"
    claim = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": storage}}}
    found = {"volume.yaml": [_resource("v1", "PersistentVolumeClaim", name, name, "volume", claim)]}
    for part in all_parts:
        kind = _workload(name, part, pods)
        found[f"{part.role.replace('.', '-')}.yaml"] = [_service(name, part), kind]
    return found


def _workload(name: str, part: Part, pods: Mapping[str, Any]) -> Resource:
    own, pod = _own_name(name, part), _pod(name, part, pods)
    labels = _labels(name, part.role)
    template = {"metadata": {"labels": labels}, "spec": pod}
    if part.role in ("train", "orch"):
        return _resource("batch/v1", "Job", own, name, part.role, _job(name, part, pods))
    spec = {"replicas": part.replicas, "selector": {"matchLabels": labels}, "template": template}
    if part.role == "infer":
        spec |= {"serviceName": own, "podManagementPolicy": "Parallel"}
        return _resource("apps/v1", "StatefulSet", own, name, part.role, spec)
    return _resource("apps/v1", "Deployment", own, name, part.role, spec)


def _job(name: str, part: Part, pods: Mapping[str, Any], subdomain: str | None = None) -> Resource:
    """An Indexed Job: a pod for each machine, with a name of its own in the DNS."""
    ends = {"containerName": part.role, "operator": "In"}
    rules = [
        {"action": "FailJob", "onExitCodes": {**ends, "values": _FAILURES}},
        {"action": "Ignore", "onExitCodes": {**ends, "values": [START_AGAIN]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    pod = {**_pod(name, part, pods), "restartPolicy": "Never", "subdomain": subdomain or _own_name(name, part)}
    return {
        "completions": part.replicas,
        "parallelism": part.replicas,
        "completionMode": "Indexed",
        "backoffLimit": 10,
        "podFailurePolicy": {"rules": rules},
        "template": {"metadata": {"labels": _labels(name, part.role)}, "spec": pod},
    }


def _service(name: str, part: Part) -> Resource:
    """Names pods in the DNS; of the trainer and the orchestrator before they are ready. Environments have one address
    for all."""
    spec: Resource = {"selector": _labels(name, part.role)}
    if part.port is not None:
        spec["ports"] = [{"name": "grpo", "port": part.port}]
    if not part.role.startswith("env"):
        spec |= {"clusterIP": "None", "publishNotReadyAddresses": part.role != "infer"}
    return _resource("v1", "Service", _own_name(name, part), name, part.role, spec)


def _pods(run: Run, name: str, has_settings: bool) -> dict[str, Any]:
    """What is the same for all pods."""
    volumes: list[Resource] = [{"name": "outputs", "persistentVolumeClaim": {"claimName": name}}]
    volumes += [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts: list[Resource] = [{"name": "outputs", "mountPath": VOLUME}, {"name": "shm", "mountPath": "/dev/shm"}]
    if has_settings:
        volumes.append({"name": "settings", "configMap": {"name": f"{name}-settings"}})
        mounts.append({"name": "settings", "mountPath": SETTINGS, "readOnly": True})
    topology = run.settings.topology
    return {"image": topology.image, "secret": topology.secret, "volumes": volumes, "mounts": mounts}


def _pod(name: str, part: Part, pods: Mapping[str, Any]) -> Resource:
    asked: dict[str, str] = {} if part.cpus is None else {"cpu": str(part.cpus)}
    asked |= {} if part.memory_gb is None else {"memory": f"{part.memory_gb:g}G"}
    limits = {key: value for key, value in asked.items() if key == "memory"}
    limits |= {"nvidia.com/gpu": str(part.gpus)} if part.gpus else {}
    container: Resource = {
        "name": part.role.replace(".", "-"),
        "image": pods["image"],
        "command": list(part.argv),
        "envFrom": [{"secretRef": {"name": pods["secret"]}}],
        "volumeMounts": pods["mounts"],
        "resources": {"requests": asked, "limits": limits},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    if part.port is not None and part.role != "train":
        container["ports"] = [{"name": "grpo", "containerPort": part.port}]
        container |= _probes(part)
    return {
        "securityContext": {
            **{"runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 60,
        "containers": [container],
        "volumes": pods["volumes"],
    }


def _probes(part: Part) -> Resource:
    """A server may take ten minutes to load its model."""
    ask: Resource = (
        {"tcpSocket": {"port": "grpo"}} if part.role != "infer" else {"httpGet": {"path": HEALTH, "port": "grpo"}}
    )
    return {
        "startupProbe": {**ask, "periodSeconds": 5, "failureThreshold": 120},
        "readinessProbe": {**ask, "periodSeconds": 5},
        "livenessProbe": {**ask, "periodSeconds": 10, "timeoutSeconds": 10, "failureThreshold": 6},
    }


def _job_set(name: str, jobs: Iterable[Part], pods: Mapping[str, Any]) -> Resource:
    """Trainer and orchestrator together: queued as one, and both ended where one fails."""
    replicated = [
        {"name": part.role, "replicas": 1, "template": {"spec": _job(name, part, pods, subdomain=name)}}
        for part in jobs
    ]
    spec = {"network": {"enableDNSHostnames": True, "subdomain": name}, "replicatedJobs": replicated}
    return _resource("jobset.x-k8s.io/v1alpha2", "JobSet", name, name, "jobs", spec)


def _leader_worker_set(name: str, servers: Part, pods: Mapping[str, Any]) -> Resource:
    """Servers as groups of one pod."""
    template = {"metadata": {"labels": _labels(name, "infer")}, "spec": _pod(name, servers, pods)}
    spec = {"replicas": servers.replicas, "leaderWorkerTemplate": {"size": 1, "workerTemplate": template}}
    return _resource("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", f"{name}-infer", name, "infer", spec)


def _deletion(kind: str, name: str) -> Resource:
    version = "batch/v1" if kind == "Job" else "apps/v1"
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "$patch": "delete"}


def _resource(version: str, kind: str, own: str, name: str, role: str, spec: Resource) -> Resource:
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": own, "labels": _labels(name, role)},
        "spec": spec,
    }


def _labels(name: str, role: str) -> dict[str, str]:
    return {f"{_LABEL}/name": "grpo", f"{_LABEL}/instance": name, f"{_LABEL}/component": role.replace(".", "-")}


def _own_name(name: str, part: Part) -> str:
    return f"{name}-{part.role.replace('.', '-')}"


def _yaml(documents: Iterable[Any]) -> str:
    text: str = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120)
    return text


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


# --- from outside ---


def submit(run: Run, target: str, overlay: str) -> str:
    """Hands the run to the cluster that kubectl is set up for. Raises OSError and ValueError."""
    folder = Path(f"{run.train.settings.output_dir}-kubernetes")
    for path, text in files(run, target).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    return said_by("kubectl", "apply", "-k", str(folder / overlay))


def state(run: Run) -> str | None:
    """What the cluster has of the run; None where it has nothing."""
    return (
        said_by("kubectl", "get", "pods,jobs", "-l", f"{_LABEL}/instance={name_of(run)}", "--ignore-not-found") or None
    )


def stop(run: Run, overlay: str) -> str:
    """Ends what runs; the volume stays."""
    more = {"jobset": ",jobsets.jobset.x-k8s.io", "leaderworkerset": ",leaderworkersets.leaderworkerset.x-k8s.io"}
    kinds = f"jobs,statefulsets,deployments,services{more.get(overlay, '')}"
    return said_by("kubectl", "delete", kinds, "-l", f"{_LABEL}/instance={name_of(run)}", "--ignore-not-found")

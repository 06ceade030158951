"""The parts of a run on a cluster: the same commands for each engine that starts them."""

import hashlib
import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo.configs.errors import SettingsError
from grpo.configs.facts import Hardware
from grpo.configs.keys import get
from grpo.configs.loading import COMMAND_LINE, LoadedSettings
from grpo.configs.run import PRESETS, LoadedRun, run_file
from grpo.configs.topology import Machine
from grpo.deploy.plan import run_id_problems
from grpo.deploy.teacher import why_not_started

_BESIDE_FILES = (COMMAND_LINE, "environment variable")
HARDWARE = Hardware(gpus=("0", "1"))
"""Programs have GPUs of their own, unless their `device` is cpu."""
MAX_NAME = 40
"""Characters of a run's name: Kubernetes takes 63, which what it appends itself is part of."""
ALL_INTERFACES = "0.0.0.0"
ANSWER_S = 600.0
"""Longest time that a command of an engine may take; SkyPilot makes machines meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Addresses by which the parts of a run find each other. Names are those of machines, services or pods."""

    target: str = ""
    """The run's file as the programs see it, or the name of a preset."""
    output_dir: str = ""
    trainer: str = ""
    """The machine of the trainer at which the others meet."""
    orchestrator: str = ""
    servers: str | None = None
    """A name whose every address in the DNS is a server."""
    urls: tuple[str, ...] = ()
    """Addresses of the servers. Without these and `servers`, they are found by the run's folder."""
    environments: tuple[str, ...] = ("",)
    """The machine of each environment, or as many in turn as there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Processes of one kind. Example: ``Part(role="infer", argv=("grpo-infer", "run.yaml"), replicas=2, gpus=1)``"""

    role: str
    """`infer`, `train`, `orch`, `env.0` …"""
    argv: tuple[str, ...]
    replicas: int = 1
    gpus: int = 0
    cpus: int | None = None
    memory_gb: float | None = None
    port: int | None = None
    """Port at which others reach it."""

    @property
    def name(self) -> str:
        """`infer`, `train`, `orch`, `env-0` …"""
        return self.role.replace(".", "-")


def check(run: LoadedRun) -> None:
    """Raises `SettingsError` where a run cannot be divided over a cluster."""
    train, topology = run.train, run.settings.topology
    problems = run_id_problems(run)
    if train.settings.colocate or train.settings.sleep_mode:
        problems.append(
            train.problem("colocate", "shares one device, and launch gives each program its own; remove it")
        )
    if why_not_started(train.settings, run.orch.settings) is None:
        problems.append(run.problem("teacher", "is served by nobody here; set teacher_model.client.base_url"))
    if train.settings.weight_broadcast.type == "nccl":
        problems.append(train.problem("weight_broadcast.type", "does without servers that come and go; use filesystem"))
    eight_bit, least = train.settings.optimizer.startswith("adamw_8bit"), topology.train.min_nodes
    if eight_bit and least is not None and least < topology.train.nodes:
        problems.append(run.problem("topology.train.min_nodes", "needs an optimizer without 8-bit state; use adamw"))
    if problems:
        raise SettingsError(problems)


def parts(run: LoadedRun, places: Places) -> list[Part]:
    """The parts of a run: servers, trainer, orchestrator, and environments where they have machines of their own."""
    topology, versions = run.settings.topology, run.orch.settings.weight_broadcast
    of_server: dict[str, Any] = {"host": ALL_INTERFACES, "port": topology.port}
    of_server |= {"max_model_len": run.infer.settings.max_model_len}
    if versions.type == "http":
        of_server["weight_broadcast_url"] = f"http://{places.orchestrator}:{versions.port}"
    return [
        Part(
            role="infer",
            argv=_command(run.infer, places, **of_server),
            replicas=topology.infer.replicas,
            gpus=_server_gpus(run),
            port=topology.port,
            **_machine(topology.infer),
        ),
        Part(
            role="train",
            argv=_command(run.train, places, **_of_trainer(run, places)),
            replicas=topology.train.nodes,
            gpus=0 if run.train.settings.device == "cpu" else _ranks(run),
            port=topology.rendezvous_port,
            **_machine(topology.train),
        ),
        Part(role="orch", argv=_command(run.orch, places, **_of_orchestrator(run, places)), **_machine(topology.orch)),
        *(
            Part(
                role=f"env.{number}",
                argv=("grpo-env", env_id, "--host", ALL_INTERFACES, "--port", str(port)),
                replicas=topology.env.replicas,
                port=port,
                **_machine(topology.env),
            )
            for number, (env_id, port) in enumerate(_distant(run).items())
        ),
    ]


def _machine(chosen: Machine) -> dict[str, Any]:
    return {"cpus": chosen.cpus, "memory_gb": chosen.memory_gb}


def _ranks(run: LoadedRun) -> int:
    return run.settings.topology.train.gpus or run.train.settings.gpus


def _server_gpus(run: LoadedRun) -> int:
    server, given = run.infer.settings, run.settings.topology.infer.gpus
    return 0 if server.device == "cpu" else server.tp * server.dp if given is None else given


def _of_trainer(run: LoadedRun, places: Places) -> dict[str, Any]:
    of_run, chosen = run.settings.topology, run.settings.topology.train
    settings = run.train.settings
    found: dict[str, Any] = {"gpus": _ranks(run)} | _sockets(run, places)
    found |= {"sequence_len": settings.sequence_len, "micro_batch_tokens": settings.pack_tokens}
    if chosen.nodes > 1:
        found |= {"nodes": chosen.nodes, "rendezvous": f"{places.trainer}:{of_run.rendezvous_port}"}
        found |= {} if chosen.min_nodes is None else {"min_nodes": chosen.min_nodes}
    return found


def _of_orchestrator(run: LoadedRun, places: Places) -> dict[str, Any]:
    found: dict[str, Any] = {"client.base_url": places.urls} if places.urls else {"client.elastic": {}}
    if places.servers is not None:
        found["client.elastic"] = {"hostname": places.servers, "port": run.settings.topology.port}
    found |= _sockets(run, places)
    # Lengths follow from the device, which this machine need not have.
    found |= {"seq_len": run.orch.settings.seq_len, "micro_batch_tokens": run.orch.settings.pack_tokens}
    if distant := _distant(run):
        addresses = {
            key: f"tcp://{places.environments[number % len(places.environments)]}:{port}"
            for number, (key, port) in enumerate(distant.items())
        }
        found["env"] = [
            env.model_dump(mode="json", exclude_unset=True)
            | ({"address": addresses[env.id]} if env.id in addresses and env.address is None else {})
            for env in run.orch.settings.env
        ]
    return found


def _sockets(run: LoadedRun, places: Places) -> dict[str, Any]:
    """Returns the options for the orchestrator's address, for what travels over sockets."""
    settings = run.orch.settings
    over = {"rollout_transport": settings.rollout_transport.type, "weight_broadcast": settings.weight_broadcast.type}
    return {f"{name}.host": places.orchestrator for name, kind in over.items() if kind in ("zmq", "http")}


def _distant(run: LoadedRun) -> dict[str, int]:
    """The environments that have processes of their own, and their ports."""
    topology = run.settings.topology
    if topology.env.replicas == 0:
        return {}
    ids = dict.fromkeys(env.id for env in run.orch.settings.env if env.address is None)
    return {env_id: topology.env_port + number for number, env_id in enumerate(ids)}


def _command(loaded: LoadedSettings[Any], places: Places, **settings: Any) -> tuple[str, ...]:
    """A program with what its file does not say: what the command line and the environment gave it, and what follows
    from the topology, which prevails."""
    tree = loaded.settings.model_dump(mode="json", exclude_unset=True)
    given = {key: get(tree, key) for key, (origin, _) in loaded.given.items() if origin.startswith(_BESIDE_FILES)}
    settings = {"output_dir": places.output_dir} | settings
    kept = {key: value for key, value in given.items() if key not in ("overwrite_output_dir", *settings)}
    words = [f"--{key}={_text(value)}" for key, value in (settings | kept).items()]
    return (f"grpo-{loaded.settings.role}", places.target, *words)


def _text(value: Any) -> str:
    return "null" if value is None else value if isinstance(value, str) else json.dumps(value)


def preset_of(target: str) -> str | None:
    """The name of the preset that a run's target leads to, which every installation has; None for a file."""
    source = run_file(target)
    return source.parent.name if source.is_relative_to(PRESETS) else None


def name_of(run: LoadedRun) -> str:
    """A name for a run in a cluster, as RFC 1035 has it: that of its folder, in small letters, digits and hyphens. It
    begins with a letter; a long one is cut, and ends with a digest of all of it."""
    return name_of_folder(Path(run.train.settings.output_dir))


def name_of_folder(path: Path) -> str:
    """Returns `name_of` what runs in this folder."""
    folder = path.name
    name = "".join(one if one.isascii() and one.isalnum() else "-" for one in folder.lower()).strip("-") or "grpo"
    name = name if name[0].isalpha() else f"run-{name}"
    if len(name) <= MAX_NAME:
        return name
    digest = hashlib.sha256(folder.encode()).hexdigest()[:8]
    return f"{name[: MAX_NAME - 9].rstrip('-')}-{digest}"


def secrets(parts: Sequence[Part], run: LoadedRun) -> tuple[str, ...]:
    """Environment variables with keys that must be set where programs of several machines talk to each other."""
    distant = any(part.role.startswith("env") for part in parts)
    return (run.infer.settings.api_key_var, *(["GRPO_ENV_KEY"] if distant else []))


def output_of(*command: str) -> str:
    """Returns the output of a command of an engine. Raises OSError where it is missing, fails, or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S)
    except FileNotFoundError:
        message = f"there is no {command[0]} here; give the command where the engine's own are, or see --dry-run"
        raise OSError(message) from None
    except subprocess.TimeoutExpired:
        raise OSError(f"{command[0]} has not answered within {ANSWER_S:g} s; see whether the engine is up") from None
    if done.returncode:
        raise OSError(f"{command[0]}: {done.stderr.strip().rpartition(chr(10))[2]}")
    return done.stdout.strip()

"""The settings of the programs, resolved together, and what the launcher adds to them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import yaml
from grpo.configs.common import ProcessSettings
from grpo.configs.errors import Problem, SettingsError
from grpo.configs.infer import InferSettings
from grpo.configs.loading import LoadedSettings
from grpo.configs.orch import OrchSettings
from grpo.configs.run import LoadedRun
from grpo.configs.train import TrainSettings
from grpo.deploy.teacher import server_settings, teacher_problems, why_not_started
from grpo.transport.cores import available_cores, threads_each
from grpo.transport.folders import write_atomic
from grpo.transport.ports import free_port
from pydantic import BaseModel

C = TypeVar("C", bound=BaseModel)
P = TypeVar("P", TrainSettings, InferSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Settings of a run that agree with each other."""

    train: TrainSettings
    infer: InferSettings
    orch: OrchSettings
    free_port: bool
    """True where the launcher chooses the server's port."""
    teacher: InferSettings | None = None
    """Settings of the server that is started for a teacher, if any."""
    restarts: int = 3
    """Number of times that each of the three programs may be started again."""
    gpus: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """GPUs that each program sees; empty where all see the same."""
    ports: tuple[int, ...] = ()
    """Ports of the servers; known once the run is."""
    replicas: int = 1
    """Number of servers of the policy."""
    splits: bool = False
    """Whether server and trainer share a GPU of which the server gets what a step of the trainer leaves, as measured
    before they start."""
    chosen: tuple[str, ...] = ()
    """Lines for people: what became of settings that were left open, and a share of the GPU that is kept."""

    @property
    def output_dir(self) -> Path:
        """The run's folder."""
        return Path(self.train.output_dir)

    @property
    def resume_step(self) -> int | None:
        """The checkpoint to go on from: -1 for the newest, None for a new run."""
        return self.train.ckpt.resume_step

    def settings(self) -> dict[str, ProcessSettings]:
        """Returns the settings by program: train, infer, orch, and teacher where its server is started."""
        settings: dict[str, ProcessSettings] = {"train": self.train, "infer": self.infer, "orch": self.orch}
        return settings if self.teacher is None else settings | {"teacher": self.teacher}

    @property
    def notes(self) -> list[str]:
        """Lines for people: what was chosen for them, who takes which GPUs, and why the teacher that is configured
        teaches nobody."""
        told = ", ".join(f"grpo-{role} takes {' and '.join(names)}" for role, names in self.gpus.items())
        notes = [*self.chosen, *([f"GPUs: {told}"] if told else [])]
        if self.splits:
            base = ", and one copy of the base" if self.train.colocate else ""
            notes.append(
                f"one GPU for server and trainer{base}: a step of the trainer is measured before they start, and grpo "
                "sets infer's gpu_memory_utilization to what the trainer leaves"
            )
        if self.orch.teacher_model is not None and not self.train.loss.teacher_tau:
            notes.append(f"no teacher is asked or started: {why_not_started(self.train, self.orch)}")
        return notes

    def effective(self) -> str:
        """All settings of all programs as one YAML document, defaults included."""
        notes = []
        if self.free_port:
            notes.append("grpo chooses a free port for the server when it starts, and client.base_url accordingly")
        if self.teacher is not None and "port" not in self.teacher.model_fields_set:
            notes.append("grpo chooses one for the teacher's server too, and teacher_model.client.base_url accordingly")
        notes += self.notes
        values = {role: settings.model_dump(mode="json") for role, settings in self.settings().items()}
        return "".join(f"# {note}\n" for note in notes) + _yaml(values)


def resolve(run: LoadedRun) -> Plan:
    """Returns the plan of a launcher on the run's machine. Raises `SettingsError` with every problem found."""
    visible = run.hardware.gpus
    train, infer, orch, replicas = (
        run.train.settings,
        run.infer.settings,
        run.orch.settings,
        run.settings.infer_replicas,
    )
    problems = [*run_id_problems(run), *_address(run), *_on_one_machine(run)]
    restarts = 0 if train.weight_broadcast.type == "nccl" else run.settings.restarts  # no program can be missing
    if restarts < run.settings.restarts and "restarts" in run.settings.model_fields_set:
        message = "has no effect: with weight_broadcast.type nccl no program is started again; remove it"
        problems.append(run.problem("restarts", message))
    if train.sleep_mode and train.device != "cuda" and not visible:
        why = "needs a GPU: vLLM cannot sleep on a CPU, and no GPU is visible; remove it"
        problems.append(run.train.problem("sleep_mode", why))
    if train.low_precision is not None and not visible:
        why = f"{train.recipe} needs a GPU that computes in so few bits, and none is visible"
        problems.append(run.train.problem("recipe", f"{why}; use bf16 or fp32"))
    teacher = None
    if (why_not := why_not_started(train, orch)) is not None:
        problems += _for_no_teacher(run, why_not)
    elif not (found := [*teacher_problems(run.teacher, infer=infer, orch=orch)]):
        teacher = server_settings(run.teacher.settings, train=train, infer=infer, orch=orch)
    else:
        problems += found
    on_gpus: dict[str, tuple[TrainSettings | InferSettings, int]]
    on_gpus = {"infer": (infer, infer.tp * infer.dp * replicas), "train": (train, train.gpus)}
    on_gpus |= {} if teacher is None else {"teacher": (teacher, teacher.tp * teacher.dp)}
    needs = {role: number for role, (settings, number) in on_gpus.items() if run.hardware.on_gpu(settings.device)}
    together = train.colocate or train.sleep_mode
    gpus = {} if together else divided(visible, needs)
    splits, said = _shared_gpu(run, needs, divides=bool(gpus))
    problems += [] if gpus or splits or together else _too_few_gpus(run, needs, teacher)
    if problems:
        raise SettingsError(problems)
    plan = Plan(
        train=train,
        infer=infer,
        orch=orch,
        teacher=teacher,
        free_port=not ({"port"} & infer.model_fields_set or {"base_url"} & orch.client.model_fields_set),
        restarts=restarts,
        gpus=gpus,
        replicas=replicas,
        splits=splits,
        chosen=(*run.notes, *said),
    )
    return with_threads(plan, threads_each(available_cores(), len(on_gpus)), gpu=bool(visible))


def divided(visible: Sequence[str], needs: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """The GPUs that each program sees, the next ones in turn; empty where there are too few, and every program sees
    all. Example: ``divided(("0", "1"), {"infer": 1, "train": 1})`` is ``{"infer": ("0",), "train": ("1",)}``."""
    if len(visible) < 2 or sum(needs.values()) > len(visible):
        return {}
    left = iter(visible)
    return {role: tuple(islice(left, number)) for role, number in needs.items()}


def _shared_gpu(run: LoadedRun, needs: Mapping[str, int], *, divides: bool) -> tuple[bool, list[str]]:
    """Returns whether the GPU of server and trainer is to be divided by a measurement, and a line about a share that
    stands in its way."""
    train, infer = run.train.settings, run.infer
    both = {"infer", "train"} <= needs.keys()
    one = needs == {"infer": 1, "train": 1} and len(run.hardware.gpus) < 2 and not train.sleep_mode
    if divides or not both or not (train.colocate or one):
        return False, []
    if "gpu_memory_utilization" not in infer.settings.model_fields_set:
        return True, []
    share = infer.described("gpu_memory_utilization")
    return False, [f"one GPU for server and trainer: nothing is measured, because of {share}; remove it to have that"]


def _too_few_gpus(run: LoadedRun, needs: Mapping[str, int], teacher: InferSettings | None) -> Iterator[Problem]:
    """Yields a problem where programs would take the same GPU without having been given shares of it."""
    visible, wanted = max(1, len(run.hardware.gpus)), sum(needs.values())
    servers = {"infer": run.infer.settings} | ({} if teacher is None else {"teacher": teacher})
    servers = {role: one for role, one in servers.items() if role in needs}
    shares = {role: one.gpu_memory_utilization for role, one in servers.items() if _has_share(one)}
    if wanted <= visible:
        return
    if len(shares) == len(servers):
        if visible == 1 and sum(shares.values()) > 1:
            told = " and ".join(f"{role} {share:g}" for role, share in shares.items())
            yield run.infer.problem("gpu_memory_utilization", f"exceeds one GPU: {told}; lower them to 1 together")
        return
    told = ", ".join(f"grpo-{role} {number}" for role, number in needs.items())
    yield run.infer.problem(
        "gpu_memory_utilization",
        f"{wanted} GPUs are needed ({told}), and {visible} is visible; give each program its own, share one by "
        "--colocate (one copy of the base) or --sleep_mode with --orch.max_async_level 0 (by turns), or set "
        f"gpu_memory_utilization of {' and '.join(servers)} to what the others leave",
    )


def _has_share(server: InferSettings) -> bool:
    return "gpu_memory_utilization" in server.model_fields_set


def with_threads(plan: Plan, num_threads: int, *, gpu: bool) -> Plan:
    """Gives `num_threads` to trainer, servers and teacher, divided among ranks and replicas, where they compute on a
    CPU and the user left it open."""

    def given(settings: P, among: int = 1) -> P:
        on_gpu = settings.device == "cuda" or (settings.device == "auto" and gpu)
        if on_gpu or "num_threads" in settings.model_fields_set:
            return settings
        return settings.model_copy(update={"num_threads": max(1, num_threads // among)})

    teacher = None if plan.teacher is None else given(plan.teacher)
    return replace(
        plan, train=given(plan.train, plan.train.gpus), infer=given(plan.infer, plan.replicas), teacher=teacher
    )


def with_run(plan: Plan, run_id: str) -> Plan:
    """Joins trainer and orchestrator to the run that the launcher made, and all programs by ports, free ones where the
    user left them open."""
    ports = _free_ports(plan.infer.host, plan.replicas)
    if not plan.free_port:
        ports = tuple(range(plan.infer.port, plan.infer.port + plan.replicas))
    goes_on: dict[str, Any] = {"run_id": run_id, "resume": "auto"}
    # Without the step to go back to: the launcher has done it, and a program that is started again must not.
    train = goes_on | {"overwrite_output_dir": False, "ckpt": _with(plan.train.ckpt, resume_step=None)}
    orch = goes_on | {"ckpt": _with(plan.orch.ckpt, resume_step=None)}
    infer: dict[str, Any] = {"port": ports[0]}
    if "base_url" not in plan.orch.client.model_fields_set:
        urls = tuple(_url(plan.infer.host, port) for port in ports)
        orch["client"] = _with(plan.orch.client, base_url=urls)
    if (server := plan.teacher) is not None and plan.orch.teacher_model is not None:
        server = server if "port" in server.model_fields_set else _with(server, port=free_port(server.host))
        client = _with(plan.orch.teacher_model.client, base_url=(_url(server.host, server.port),))
        orch["teacher_model"] = _with(plan.orch.teacher_model, client=client)
    for name, kind in (("rollout_transport", "zmq"), ("weight_broadcast", "http")):
        section = getattr(plan.orch, name)
        if section.type == kind and "port" not in section.model_fields_set:
            port = free_port()
            train[name], orch[name] = (_with(getattr(one, name), port=port) for one in (plan.train, plan.orch))
            if kind == "http":
                infer["weight_broadcast_url"] = _url(section.host, port).removesuffix("/v1")
    return replace(
        plan,
        train=_with(plan.train, **train),
        infer=_with(plan.infer, **infer),
        orch=_with(plan.orch, **orch),
        teacher=server,
        ports=ports,
    )


def _with(settings: C, **changed: Any) -> C:
    return settings.model_copy(update=changed)


def write_settings(plan: Plan, folder: Path) -> dict[str, Path]:
    """Writes `train.yaml`, `infer.yaml`, `orch.yaml` and maybe `teacher.yaml`, from which each program can be started.
    They hold what was set and leave out defaults, because a default that is spelt out counts as set, and may be refused
    as without effect. This user alone can read them: arguments of environments may be keys."""
    (folder / "teacher.yaml").unlink(missing_ok=True)
    return {role: write_program_settings(settings, folder, role) for role, settings in plan.settings().items()}


def write_program_settings(settings: ProcessSettings, folder: Path, role: str) -> Path:
    """Writes the file from which the program of a role is started, and returns its path."""
    folder.mkdir(exist_ok=True)
    text = _yaml(settings.model_dump(mode="json", exclude_unset=True))
    write_atomic(folder / f"{role}.yaml", text.encode(), durable=False, private=True)
    return folder / f"{role}.yaml"


def _for_no_teacher(run: LoadedRun, why_not: str) -> Iterator[Problem]:
    """Settings of a teacher's server that is not started, but for those in a run's file."""
    message = f"has no effect: no server of a teacher is started, because {why_not}; remove it"
    for key, (origin, _) in run.teacher.given.items():
        if not run.teacher.prefix or origin != run.teacher.file:
            yield run.teacher.problem(key, message)


def run_id_problems(run: LoadedRun) -> list[Problem]:
    """A run_id, which only programs that are started apart can be given."""
    programs: tuple[LoadedSettings[Any], ...] = (run.train, run.orch)
    why = "grpo makes a run of its own; remove it, or start the programs apart"
    return [one.problem("run_id", why) for one in programs if one.settings.run_id is not None]


def _on_one_machine(run: LoadedRun) -> Iterator[Problem]:
    if run.train.settings.nodes > 1:
        yield run.train.problem("nodes", "grpo starts the trainer on this machine alone; use grpo launch, or nodes: 1")
    train = run.train.settings
    if run.settings.infer_replicas > 1 and (
        train.weight_broadcast.type == "nccl" or train.colocate or train.sleep_mode
    ):
        why = "needs weight_broadcast.type: filesystem, and neither colocate nor sleep_mode, which are of one server"
        yield run.problem("infer_replicas", why)


def _address(run: LoadedRun) -> list[Problem]:
    """The orchestrator must be led to the servers that are started with it."""
    orch, server = run.orch, run.infer.settings
    urls, num = orch.settings.client.base_url, run.settings.infer_replicas
    started = [_url(server.host, server.port + number) for number in range(num)]
    if orch.settings.client.elastic is not None:
        return [orch.problem("client.elastic", "grpo starts servers itself; remove it, or start the programs apart")]
    if "base_url" not in orch.settings.client.model_fields_set:
        return []
    if [_place(url) for url in urls] == [_place(url) for url in started]:
        return []
    message = f"grpo starts the server at {', '.join(started)}; remove base_url, or start the programs apart"
    return [orch.problem("client.base_url", message)]


def _place(url: str) -> str:
    return urlsplit(url).netloc.replace("localhost", "127.0.0.1")


def _url(host: str, port: int) -> str:
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}/v1" if ":" in reachable else f"http://{reachable}:{port}/v1"


def _free_ports(host: str, num: int = 1) -> tuple[int, ...]:
    """Different ones. Should somebody take one meanwhile, the server says so and the run ends."""
    ports = set[int]()
    while len(ports) < num:
        ports.add(free_port(host))
    return tuple(sorted(ports))


def _yaml(values: dict[str, Any]) -> str:
    text: str = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    return text

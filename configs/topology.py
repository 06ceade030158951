"""Settings of what runs where on a cluster, for `grpo launch`. docs/clusters.md explains them."""

from typing import Annotated, Literal

from grpo.configs.common import Conflicts, Listed, OnlyWith, Port, Section
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

NAME = r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$"
"""A name in Kubernetes that may be a label's value."""


class Machine(Section):
    """What each process of a part gets."""

    cpus: PositiveInt | None = None
    """CPU cores of each process (null: the cluster's default)."""
    memory_gb: PositiveFloat | None = None
    """Memory of each process in GB (null: the cluster's default)."""


class InferTopology(Machine):
    """The inference servers."""

    replicas: PositiveInt = 1
    """Number of servers."""
    gpus: NonNegativeInt | None = None
    """GPUs of each (null: `tp` · `dp`, none with `device: cpu`)."""


class TrainTopology(Machine):
    """The trainer."""

    nodes: PositiveInt = 1
    """Number of machines."""
    min_nodes: PositiveInt | None = None
    """Machines with which it continues if others are lost (null: all)."""
    gpus: NonNegativeInt | None = None
    """GPUs, and ranks, of each machine (null: the trainer's `gpus`, none with `device: cpu`)."""

    def conflicts(self) -> Conflicts:
        if (self.min_nodes or 1) > self.nodes:
            yield "min_nodes", f"must not exceed nodes = {self.nodes}"


class OrchTopology(Machine):
    """The orchestrator."""


class EnvTopology(Machine):
    """Machines that run the environments (`grpo-env`), apart from the orchestrator's."""

    replicas: NonNegativeInt = 0
    """Processes for each environment without `address` (0: beside the orchestrator)."""


class Kueue(Section):
    """How Kueue queues the run on Kubernetes."""

    queue: str | None = Field(default=None, pattern=NAME)
    """Name of the LocalQueue (null: Kubernetes starts everything at once)."""
    priority: Annotated[str | None, OnlyWith("queue"), Field(pattern=NAME)] = None
    """Name of the WorkloadPriorityClass (null: the queue's default)."""


class Container(Section):
    """The container that programs run in on Slurm."""

    image: str | None = Field(default=None, pattern=r"^[^\s-]\S*$")
    """For pyxis what enroot takes (`registry.example#team/grpo:gpu`, a .sqsh file), for apptainer a .sif file or
    `docker://…` (null: no container)."""
    runtime: Annotated[Literal["pyxis", "apptainer"], OnlyWith("image")] = "pyxis"
    """srun's plugin pyxis, or apptainer."""
    mounts: Annotated[Listed[str], OnlyWith("image")] = ()
    """More folders to mount, as PATH or PATH:PATH_INSIDE, besides the run's, run.yaml's and the working directory."""


class Ssh(Section):
    """The machine of `grpo launch --on ssh:HOST`."""

    folder: str = Field(default="grpo-runs", pattern=r"^[^\x00\n-][^\x00\n]*$")
    """Folder for runs on that machine, below the home unless it begins with a slash."""
    command: str = Field(default="grpo", min_length=1)
    """Command on that machine, such as `/opt/env/bin/grpo`."""
    options: Listed[str] = ()
    """More options of ssh: `["-p", "2222"]`."""


class Topology(Section):
    """What runs where on a cluster."""

    infer: InferTopology = InferTopology()
    """The inference servers."""
    train: TrainTopology = TrainTopology()
    """The trainer."""
    orch: OrchTopology = OrchTopology()
    """The orchestrator."""
    env: EnvTopology = EnvTopology()
    """The environments."""
    port: Port = 8000
    """Port of the servers (on Slurm of the first; the others count up)."""
    rendezvous_port: Port = 29400
    """Port at which the trainer's machines meet."""
    env_port: Port = 7000
    """Port of the first environment; the others count up."""
    image: str = "grpo:gpu"
    """Container image on Kubernetes and SkyPilot, made by `deploy/Dockerfile`."""
    storage_gb: PositiveInt = 100
    """Size of the run's volume on Kubernetes, in GB."""
    slurm: dict[str, str | int] = {}
    """More options of sbatch: `partition: gpu`, `time: "24:00:00"`, `account: lab`."""
    container: Container = Container()
    """The container that programs run in on Slurm."""
    kueue: Kueue = Kueue()
    """How Kueue queues the run on Kubernetes."""
    ssh: Ssh = Ssh()
    """The machine of `grpo launch --on ssh:HOST`."""
    slurm_notice_s: PositiveInt = 120
    """Seconds before Slurm's time limit at which the run writes a checkpoint and is requeued."""
    sky: dict[str, str] = {}
    """More resources of SkyPilot tasks: `infra: aws`, `accelerators: H100`."""
    secret: str = Field(default="grpo", min_length=1)
    """Kubernetes secret with the keys (`VLLM_API_KEY`, `GRPO_ENV_KEY` …)."""

"""A Slurm cluster on this machine: a controller, and several machines by name, each with its own slurmd."""

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from grpo.transport.ports import free_port

from tests.support import until

NEEDED = ("slurmctld", "slurmd", "sbatch", "srun", "scancel", "squeue", "scontrol")
CPUS = 4
"""Of each machine, as Slurm is told."""
START_S = 60.0
"""How long the machines may take to become idle."""


class Slurm:
    """The cluster below `folder`. Nothing of it is shared with another one but the machine."""

    def __init__(self, folder: Path, num_nodes: int) -> None:
        self.folder, self.nodes = folder, [f"n{number}" for number in range(num_nodes)]
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        host = subprocess.run(["hostname", "-s"], capture_output=True, text=True, check=True).stdout.strip()
        ports = [free_port() for _ in range(num_nodes)]
        for name in ("state", *self.nodes):
            (folder / name).mkdir(parents=True)
        lines = [
            *("ClusterName=test", f"SlurmctldHost={host}(127.0.0.1)", f"SlurmctldPort={free_port()}"),
            *("SlurmUser=root", "SlurmdUser=root", "AuthType=auth/none", "AuthInfo=cred_expire=5"),
            *("CredType=cred/none", "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none"),
            *("SwitchType=switch/none", "MpiDefault=none", "JobAcctGatherType=jobacct_gather/none"),
            *("SelectType=select/cons_tres", "SelectTypeParameters=CR_CPU", "DefMemPerCPU=100"),
            *("SchedulerParameters=bf_interval=1,sched_interval=1", "AccountingStorageType=accounting_storage/none"),
            "SlurmdParameters=config_overrides",  # a machine has as many CPUs as it says here, whatever it really has
            *("SlurmdTimeout=5", "KillWait=3", "ReturnToService=2", "JobRequeue=1"),
            *(f"StateSaveLocation={folder}/state", f"SlurmdSpoolDir={folder}/%n"),
            *(f"SlurmctldPidFile={folder}/ctld.pid", f"SlurmdPidFile={folder}/%n.pid"),
            *(
                f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS} RealMemory=4000"
                for name, port in zip(self.nodes, ports, strict=True)
            ),
            f"PartitionName=all Nodes={','.join(self.nodes)} Default=YES MaxTime=INFINITE State=UP",
        ]
        (folder / "slurm.conf").write_text("\n".join(lines) + "\n")

    def start(self) -> None:
        """Returns when all machines are idle. One that Slurm refuses will not become so."""
        self._start("controller", "slurmctld", "-c", "-D")
        for name in self.nodes:
            self._start(name, "slurmd", "-D", "-N", name)
        until(self._is_idle, log=self._logs, poll_s=0.2, limit_s=START_S)

    def _is_idle(self) -> bool:
        """Whether all machines are idle. Skips the tests where Slurm refuses one, which will not become so."""
        states = self.run("sinfo", "--noheader", "--format=%T %D").split()
        if refused := [state for state in states if state.startswith(("inval", "drain"))]:
            pytest.skip(f"Slurm refuses this machine as a node ({', '.join(refused)}): {self._logs()}")
        return states == ["idle", str(len(self.nodes))]

    def _logs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in self.folder.glob("*.log"))

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def run(self, *command: str) -> str:
        """What a command of Slurm prints."""
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=300).stdout

    def lose(self, node: str) -> None:
        """Kills a machine's slurmd and all that jobs have there, as a failure of its power would."""
        self._daemons[node].kill()
        for process in self.processes(node):
            process.kill()

    def processes(self, node: str | None = None) -> list[psutil.Process]:
        """What jobs have on a machine, or on any."""
        found = []
        for process in psutil.process_iter():
            try:
                environment = process.environ()
            except psutil.Error:
                continue
            if environment.get("SLURM_CONF") != self.environment["SLURM_CONF"] or "SLURM_JOB_ID" not in environment:
                continue
            if node is None or environment.get("SLURMD_NODENAME") == node:
                found.append(process)
        return found

    def stop(self) -> None:
        """Ends all of it."""
        self.run("scancel", "--state=RUNNING")
        self.run("scancel", "--state=PENDING")
        with contextlib.suppress(AssertionError):
            until(lambda: not self.processes(), poll_s=0.2, limit_s=20)
        for process in self.processes():
            process.kill()
        for daemon in self._daemons.values():
            daemon.send_signal(signal.SIGTERM)
        for daemon in self._daemons.values():
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()


def missing() -> list[str]:
    """The programs of Slurm that are not installed here."""
    return [name for name in NEEDED if shutil.which(name) is None]

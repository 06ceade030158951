"""Dividing this machine's cores among the programs."""

import os
from dataclasses import dataclass
from pathlib import Path

MAX_THREADS = 8
"""More threads than this seldom help the models that are trained on a CPU."""
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads:
    """Computing threads of server, trainer and teacher. Example: ``Threads(infer=1, train=1)`` on two cores."""

    infer: int
    train: int
    teacher: int = 0
    """0 where no server of a teacher is started."""


def available_cores(cgroup_limit: Path = _CGROUP_LIMIT) -> int:
    """Cores that this process may use, by affinity and by the container's quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = cgroup_limit.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def divide(cores: int, *, teacher: bool = False) -> Threads:
    """Threads on `cores` cores: server and trainer, and the server of a teacher, work at the same time and get as much
    each; from five cores on, one is left to the orchestrator, which needs little."""
    shared = cores if cores < 5 else cores - 1
    threads = min(MAX_THREADS, max(1, shared // (3 if teacher else 2)))
    return Threads(infer=threads, train=threads, teacher=threads if teacher else 0)


def thread_variables(num_threads: int) -> dict[str, str]:
    """Environment variables that hold the numeric libraries of a process to `num_threads`."""
    return dict.fromkeys(_THREAD_VARIABLES, str(num_threads))

"""Dividing this machine's cores among the programs."""

import os
from pathlib import Path

MAX_THREADS = 8
"""More threads than this seldom help the models that are trained on a CPU."""


def available_cores(cgroup_limit: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores that this process may use, by affinity and by the container's quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = cgroup_limit.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def threads_each(cores: int, num_programs: int) -> int:
    """Threads of each of the programs that compute at the same time: server, trainer, maybe a teacher's server. From
    five cores on, one is left to the orchestrator, which needs little."""
    shared = cores if cores < 5 else cores - 1
    return min(MAX_THREADS, max(1, shared // num_programs))


def thread_variables(num_threads: int) -> dict[str, str]:
    """Environment variables that hold the numeric libraries of a process to `num_threads`."""
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(num_threads))

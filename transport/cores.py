"""The cores that a process may use, their division among programs, and the settings of numeric libraries for them."""

import getpass
import os
import tempfile
from collections.abc import Iterator, MutableMapping
from pathlib import Path

MAX_THREADS = 8
"""More threads than this seldom help the models that are trained on a CPU."""
NUMERIC_DEFAULTS = {
    "OMP_WAIT_POLICY": "passive",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    "LRU_CACHE_CAPACITY": "128",
}
"""Environment variables that torch's libraries read while they are loaded, or at the first product.

Threads of two programs on the same cores, which by default spin while they wait for each other, make both several times
slower. Every product of matrices with a number of rows that is new compiles a kernel of some 0.3 MB, of which oneDNN's
and torch's caches hold 1,024 each by default: 900 MB after some hundred steps. (0 for the latter ends the process.)"""


COMPILED_VAR = "TORCHINDUCTOR_CACHE_DIR"
ALLOCATOR_VAR = "PYTORCH_ALLOC_CONF"


def available_cores(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Returns how many cores this process may use, by affinity and by the quotas of its cgroups of either version. A
    part of a core counts as none, and the last one as whole."""
    return max(1, min([len(os.sched_getaffinity(0)), *map(int, _quotas(root, own))]))


def _quotas(root: Path, own: Path) -> Iterator[float]:
    """Yields the quotas, in cores, of this process's cgroups and of those around them, as far as they are visible: a
    container sees its own at the root, whatever its path is outside."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounted = root / "cpu" if controllers else root  # the first version's is there under this name, or a link
        for folder in (mounted / path.strip("/"), *(mounted / path.strip("/")).parents):
            if folder == root.parent:
                break
            quota = _v1_quota(folder) if controllers else _v2_quota(folder)
            if quota is not None:
                yield quota


def _v2_quota(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _v1_quota(folder: Path) -> float | None:
    try:
        quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return None if quota < 0 else quota / period
    except (OSError, ValueError):
        return None


def threads_each(cores: int, num_programs: int) -> int:
    """Returns the threads for each of the programs that compute at the same time: server, trainer, maybe a teacher's
    server. From five cores on, one is left to the orchestrator, which needs little."""
    shared = cores if cores < 5 else cores - 1
    return min(MAX_THREADS, max(1, shared // num_programs))


def thread_variables(num_threads: int) -> dict[str, str]:
    """Returns environment variables that hold the numeric libraries of a process to `num_threads`."""
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(num_threads))


def set_allocator(environment: MutableMapping[str, str]) -> None:
    """Lets torch's memory on a GPU grow in place: micro-batches differ in tokens, and blocks of fixed sizes would leave
    gaps that no other program can use. Call it before torch is imported, and not in a process that lends tensors by
    CUDA IPC, as the server does. What a person has set stays."""
    if not {ALLOCATOR_VAR, "PYTORCH_CUDA_ALLOC_CONF"} & environment.keys():
        environment[ALLOCATOR_VAR] = "expandable_segments:True"


def set_numeric_defaults() -> None:
    """Sets `NUMERIC_DEFAULTS` where the user has set nothing else. Call it before torch is imported."""
    os.environ |= {name: os.environ.get(name, value) for name, value in NUMERIC_DEFAULTS.items()}


def compiled_folder() -> str:
    """Returns where torch keeps what it has compiled for later starts: where `COMPILED_VAR` says, or else in the
    temporary folder under the user's name. A user without one, as in some containers, goes by the number."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return os.environ.get(COMPILED_VAR) or f"{tempfile.gettempdir()}/torchinductor_{user}"

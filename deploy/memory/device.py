"""How much memory a device has, and how much of it is free."""

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import psutil

from deploy.memory.estimate import MIB

_TIMEOUT_S = 30.0
Run = Callable[[Sequence[str]], str]
"""Runs a command and gives what it prints."""


class DeviceError(RuntimeError):
    """The GPU's driver does not tell its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Bytes. Example: a GPU of 24 GiB on which a desktop takes one."""

    total: int
    free: int


def main_memory() -> DeviceMemory:
    """This machine's."""
    memory = psutil.virtual_memory()
    return DeviceMemory(total=memory.total, free=memory.available)


def gpu_memory(environment: Mapping[str, str], run: Run | None = None) -> DeviceMemory:
    """That of the first GPU that is visible, as its driver's tool tells it: asking by torch would take hundreds of
    megabytes of it. Raises `DeviceError`. Not yet run: needs a GPU."""
    first = environment.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    command = ["nvidia-smi", f"--id={first}", "--query-gpu=memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        printed = (run or _printed)(command)
        total, free = (int(number) * MIB for number in printed.split(","))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise DeviceError(
            f"{' '.join(command)} does not tell the memory of GPU {first}: {error}; set gpu_memory_utilization "
            "(infer.yaml) yourself"
        ) from error
    return DeviceMemory(total=total, free=free)


def _printed(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S)
    return done.stdout

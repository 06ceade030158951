"""What goes into a sandbox and what comes out."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal, Protocol

LimitName = Literal["wall", "cpu", "memory", "processes", "files", "output", "killed"]
"""What ended a program from outside. `killed`: a SIGKILL that is not ours, of the kernel for want of memory say."""

Input = bytes | Callable[[], bytes]
"""Standard input; or what makes it, called once it is the program's turn."""

MIB = 1024 * 1024


class SandboxError(RuntimeError):
    """A sandbox that could not do its work, for which the program is not to blame."""


class SandboxMissing(SandboxError):
    """Untrusted code cannot be contained here. The message says what is missing and how to get it."""


class SandboxUnreachable(SandboxError):
    """An external sandbox service that does not answer, or answers with a failure of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one program may use, its children included. Raises ValueError for what is no such number."""

    wall_s: float = 10.0
    """Seconds by the clock."""
    cpu_s: float = 10.0
    """Seconds of processor time of all processes together."""
    memory_bytes: int = 512 * MIB
    """Address space of each process, and memory of all of them together."""
    processes: int = 32
    """Processes and threads at one time."""
    output_bytes: int = MIB
    """Kept of standard output, and of standard error. A program that writes more is ended."""
    file_bytes: int = 32 * MIB
    """The largest file that can be written."""
    disk_bytes: int = 64 * MIB
    """Size of `/tmp`, and of `/dev/shm`; they live in memory, beside `memory_bytes`."""
    num_files: int = 4096
    """Files and folders in `/tmp`, and in `/dev/shm`."""
    open_files: int = 256
    """Open files of each process."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), _LEAST[field.name]
            kinds = (int,) if isinstance(field.default, int) else (int, float)
            if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value < math.inf:
                kind = "a whole number" if kinds == (int,) else "a finite number"
                raise ValueError(f"Limits({field.name}={value!r}): expected {kind} of at least {least}")


_LEAST = {
    "wall_s": 0.05,
    "cpu_s": 0.05,
    "memory_bytes": 64 * MIB,
    "processes": 1,
    "output_bytes": 1,
    "file_bytes": 1,
    "disk_bytes": 64 * 1024,
    "num_files": 16,
    "open_files": 16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of a program. Example: ``Result(exit_code=0, stdout=b"3\\n", stderr=b"", limit=None, wall_s=0.1)``"""

    exit_code: int
    """128 + N where signal N ended it, as a shell has it: 137 where a limit did."""
    stdout: bytes
    """At most `output_bytes`."""
    stderr: bytes
    limit: LimitName | None
    """The limit that ended it; None where it ended in its own way, by what the kernel refused it included."""
    wall_s: float
    """From the start of its sandbox to the end of its last process."""

    @property
    def succeeded(self) -> bool:
        """Whether it ended by itself with exit code 0."""
        return self.exit_code == 0 and self.limit is None


class Sandbox(Protocol):
    """Runs programs that nobody vouches for."""

    async def run(self, program: str, *, stdin: Input = b"", limits: Limits | None = None) -> Result:
        """Runs Python source to its end or its limits.

        Raises `ValueError` for what cannot be run at all and `SandboxError` where the sandbox failed.
        """

    async def close(self) -> None:
        """Ends whatever still runs."""

"""Records that go into a sandbox and come out: limits and results."""

from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

import pydantic
from pydantic import ConfigDict, Field

LimitName = Literal["wall", "cpu", "memory", "processes", "files", "output", "killed"]
"""Limits that end a program from outside. `killed`: by a SIGKILL that is not ours, such as the kernel's for want of
memory."""

MIB = 1024 * 1024


class SandboxError(RuntimeError):
    """The sandbox or the service could not do its work, for which the program is not to blame."""


class SandboxMissing(SandboxError):
    """Untrusted code cannot be contained here. The message says what is missing and how to get it."""


Seconds = Annotated[float, Field(ge=0.05, allow_inf_nan=False)]


@pydantic.dataclasses.dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid", strict=True))
class Limits:
    """Limits of one program, its children included. Raises ValueError for numbers that cannot be limits."""

    wall_s: Seconds = 10.0
    """Seconds by the clock."""
    cpu_s: Seconds = 10.0
    """Seconds of processor time of all processes together."""
    memory_bytes: Annotated[int, Field(ge=64 * MIB)] = 512 * MIB
    """Address space of each process, and memory of all of them together."""
    processes: Annotated[int, Field(ge=1)] = 32
    """Processes and threads at one time."""
    output_bytes: Annotated[int, Field(ge=1)] = MIB
    """Kept of standard output, and of standard error. A program that writes more is ended."""
    disk_bytes: Annotated[int, Field(ge=64 * 1024)] = 64 * MIB
    """Size of `/tmp`, and of `/dev/shm`; they live in memory, beside `memory_bytes`."""
    num_files: Annotated[int, Field(ge=16)] = 4096
    """Files and folders in `/tmp`, and in `/dev/shm`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The outcome of a program. Example: ``Result(exit_code=0, stdout=b"3\\n", stderr=b"", limit=None)``"""

    exit_code: int
    """128 + N where signal N ended it, as a shell has it: 137 where a limit did."""
    stdout: bytes
    """At most `output_bytes`."""
    stderr: bytes
    limit: LimitName | None
    """The limit that ended it; None where it ended in its own way, by what the kernel refused it included."""

    @property
    def succeeded(self) -> bool:
        """Tells whether it ended by itself with exit code 0."""
        return self.exit_code == 0 and self.limit is None


class Sandbox(Protocol):
    """Runs programs that nobody vouches for."""

    async def run(self, program: str, *, stdin: bytes = b"", limits: Limits | None = None) -> Result:
        """Runs Python source to its end or its limits.

        Raises `ValueError` for what cannot be run at all and `SandboxError` where the sandbox failed.
        """

"""What goes into a sandbox and what comes out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal, Protocol

LimitName = Literal["wall", "cpu", "memory", "processes", "output", "file_size", "disk", "files", "killed"]
"""What ended a program, or kept it from going on.

- `wall`, `cpu`: it took too long, by the clock or in processor time.
- `memory`: it asked for more than it may have, alone or with its children.
- `processes`: it had more processes and threads than it may.
- `output`: it wrote more to standard output or standard error than is kept.
- `file_size`, `disk`, `files`: one file became too large, `/tmp` is full, or there are too many files in it.
- `killed`: the sandbox ended without a result: the kernel was out of memory and chose it, or the program brought it
  down.
"""

Program = str | tuple[str, ...]
"""Python source, run as `__main__` in an interpreter that waits for it; or a command and its arguments."""

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
    """What one program may use, its children included."""

    wall_s: float = 10.0
    """Seconds by the clock."""
    cpu_s: float = 10.0
    """Seconds of processor time: all processes together. A process that has used it up alone is ended by the kernel."""
    memory_bytes: int = 512 * MIB
    """Address space of each process, and memory of all of them together. Commands that reserve far more address space
    than they use (Node, Java, Go) need a larger number."""
    processes: int = 32
    """Processes and threads at one time."""
    output_bytes: int = MIB
    """Kept of standard output, and of standard error. A program that writes more is ended."""
    file_bytes: int = 32 * MIB
    """The largest file that can be written."""
    disk_bytes: int = 64 * MIB
    """Size of `/tmp`, and of `/dev/shm`; they live in memory, beside `memory_bytes`."""
    num_files: int = 4096
    """Files and folders in `/tmp` and in `/dev/shm`."""
    open_files: int = 256
    """Open files of each process."""

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"Limits({name}={getattr(self, name)}) is too small: at least {least} is needed")


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
    """What became of a program.

    Example::

        Result(exit_code=0, signal=None, stdout=b"3\\n", stderr=b"", stdout_bytes=2, stderr_bytes=0, limit=None,
               wall_s=0.012, cpu_s=0.008)
    """

    exit_code: int | None
    """None where a signal ended it."""
    signal: int | None
    """The signal that ended it: 9 where a limit did."""
    stdout: bytes
    """At most `output_bytes`."""
    stderr: bytes
    stdout_bytes: int
    """How much it had written when it ended, what is not kept included."""
    stderr_bytes: int
    limit: LimitName | None
    """The limit that it hit; None where it ended in its own way."""
    wall_s: float
    """From its first instruction to the end of its last process."""
    cpu_s: float
    """Processor time of all its processes. An external service does not tell: 0."""

    @property
    def succeeded(self) -> bool:
        """Ended by itself with exit code 0, within all limits."""
        return self.exit_code == 0 and self.limit is None


class Sandbox(Protocol):
    """Runs programs that nobody vouches for."""

    async def run(
        self,
        program: Program,
        *,
        stdin: Input = b"",
        files: Mapping[str, bytes] | None = None,
        limits: Limits | None = None,
    ) -> Result:
        """Runs one program to its end or its limits. `files` are in its working folder, by relative path.

        Raises `ValueError` for what cannot be run at all and `SandboxError` where the sandbox failed.
        """

    async def close(self) -> None:
        """Ends whatever still runs."""


def checked_files(files: Mapping[str, bytes] | None) -> dict[str, bytes]:
    """The files, whose paths lie below the working folder, and of which none is where another has its folder."""
    checked = dict(files or {})
    for name in checked:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
            raise ValueError(f"the file {name!r} has no place in the sandbox: expected a relative path without '..'")
        if any(len(part.encode()) > 255 for part in path.parts):
            raise ValueError(f"the file {name[:300]!r} has no place in the sandbox: a name is longer than 255 bytes")
        above = next((str(parent) for parent in path.parents if str(parent) in checked), None)
        if above is not None:
            raise ValueError(f"the files {above!r} and {name!r} exclude each other: one would be the other's folder")
    return checked

"""Child processes of the launcher, each behind a guard."""

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deploy import guard

_LOG_TAIL_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What to start.

    Example: ``Program(role="train", command=("python", "-m", "trainer.cli", "train.yaml"), log=Path("train.log"))``
    """

    role: str
    """`infer`, `train`, `orch` or `teacher`."""
    command: tuple[str, ...]
    log: Path
    """File that takes what the program prints on both of its streams."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """All environment variables of the program."""
    address: tuple[str, int] | None = None
    """Of a server that the run can do without for a while: once it has answered there, it is started again whenever it
    ends."""

    @property
    def name(self) -> str:
        """`grpo-train`."""
        return f"grpo-{self.role}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a program ended."""

    status: int
    """Exit code, or minus the number of the signal that ended it."""
    at_s: float
    """When, on the monotonic clock."""

    def __str__(self) -> str:
        if self.status >= 0:
            return f"ended with exit code {self.status}"
        number = -self.status
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        return f"was killed by {name}"


class Child:
    """A started program. `exit` says how it ended, from the moment of its end on."""

    def __init__(self, program: Program, *, lock: int) -> None:
        """Starts `program`; its guard keeps the descriptor `lock` open until all that it started has ended."""
        self.program = program
        self.exit: Exit | None = None
        self.signalled = False
        ours, theirs = socket.socketpair()
        self._link = ours
        ours.setblocking(False)
        python = [sys.executable, "-I", "-S", guard.__file__]
        with contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            with theirs, program.log.open("ab") as log:
                self._guard = subprocess.Popen(
                    [*python, f"{theirs.fileno()},{lock}", *program.command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=dict(program.environment),
                    pass_fds=(theirs.fileno(), lock),
                    start_new_session=True,
                )
            undo.pop_all()

    @property
    def pid(self) -> int:
        """Process id of the guard, which lives as long as the program."""
        return self._guard.pid

    def poll(self) -> bool:
        """Takes notice of the program's end. True once it, and everything that it started, has ended."""
        gone = self._guard.poll() is not None
        if self.exit is None and (report := self._report()):
            status, at_s = report.split()
            self.exit = Exit(status=int(status), at_s=float(at_s))
        if self.exit is None and gone:
            self.exit = Exit(status=self._guard.returncode, at_s=time.monotonic())
        return gone

    def send(self, number: signal.Signals) -> None:
        """Passes a signal to the program, if it still runs."""
        if not self.poll() and self.exit is None:
            self.signalled = True
            self._guard.send_signal(number)

    def kill(self) -> None:
        """Ends the guard at once; the kernel then ends the program."""
        self.signalled = True
        with contextlib.suppress(ProcessLookupError):
            self._guard.kill()

    def close(self) -> None:
        """Releases what the launcher holds of it; the program must have ended."""
        self._guard.wait()
        self._link.close()

    def log_tail(self, num_lines: int) -> str:
        """The last lines that the program printed."""
        with self.program.log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])

    def _report(self) -> str:
        try:
            return self._link.recv(100).decode()
        except (BlockingIOError, ConnectionResetError):
            return ""

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
class Again:
    """After which ends a program that was up is started again.

    Example: ``Again(limit=3, exit_codes=frozenset({75}), arguments=("--ckpt.resume_step=-1",))``
    """

    limit: int | None
    """How often at most; None: as often as it ends."""
    exit_codes: frozenset[int] | None = frozenset()
    """After which exit codes, besides being killed by a signal; None: after any."""
    arguments: tuple[str, ...] = ()
    """Added to its command, so that it goes on with what it had begun."""

    def mends(self, exit_: "Exit") -> bool:
        """Whether this end is one after which the program can go on."""
        return exit_.status < 0 or self.exit_codes is None or exit_.status in self.exit_codes


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
    """Where a server answers once it is up."""
    status: str | None = None
    """Name of its file in the run's `status` folder; None: its role with `.json`."""
    silent: bool = False
    """Whether it does not write that file itself, because it is no part of the run."""
    again: Again | None = None
    """After which ends it is started again; None: after none."""

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
    note: str = ""
    """What else is to be said of it."""

    def __str__(self) -> str:
        if self.status >= 0:
            return f"ended with exit code {self.status}{self.note}"
        number = -self.status
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        return f"was killed by {name}{self.note}"


class Child:
    """A started program. `exit` says how it ended, from the moment of its end on."""

    def __init__(self, program: Program, *, lock: int) -> None:
        """Starts `program`; its guard keeps the descriptor `lock` open until all that it started has ended."""
        self.program = program
        self.exit: Exit | None = None
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
            self._guard.send_signal(number)

    def kill(self) -> None:
        """Ends the guard at once; the kernel then ends the program."""
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

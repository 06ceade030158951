"""The programs of a run as processes of the launcher: started, started again after ends that mend, ended.

They end with the launcher, however it ends, and what they start ends with them: `grpo.transport.parent`.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import psutil
from grpo.transport.errors import PROOF_FAILED, START_AGAIN
from grpo.transport.parent import PARENT_VAR
from grpo.transport.status import AWAY, FINISHED, StatusFile

POLL_S = 0.1
GRACE_S = 10.0
"""Longest time that programs may take to end once they are told to."""
STRAYS_S = 2.0
"""Longest time that a program's own children may take to end by themselves: Python's trackers remove then what others
have left in /dev/shm."""
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
STEADY_S = 600.0
"""A program that has worked for so long is started again as often, and as soon, as if it had never ended."""
CHECKPOINT_S = 300.0
"""Longest time that the trainer may take to end with a checkpoint."""
OWN_FAILURES = (1, 2, PROOF_FAILED)
"""Exit codes by which a program says that another start does not help."""
_LOG_TAIL_BYTES = 64 * 1024
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program to start.

    Example: ``Program(role="train", command=("python", "-m", "grpo.trainer.cli", "train.yaml"), log=Path("train.log"),
    status=Path("status/train.json"))``
    """

    role: str
    """`infer`, `train`, `orch`, `teacher` or `env`; of several with a number after it, `infer.1`."""
    command: tuple[str, ...]
    log: Path
    """File that takes what the program prints on both of its streams."""
    status: Path | None = None
    """Its status file, in which the launcher says what the program cannot say itself."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """All environment variables of the program."""
    elsewhere: bool = False
    """Another program starts it on another machine, and ends with codes of its own where that machine is lost."""

    @property
    def name(self) -> str:
        """`grpo-train`."""
        return f"grpo-{self.role}"

    @property
    def is_server(self) -> bool:
        """True where it serves until it is told to end."""
        return self.role.partition(".")[0] in ("infer", "teacher", "env")

    def last_lines(self) -> list[str]:
        """Returns the last lines of its log."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
                return file.read().decode(errors="replace").splitlines()
        except FileNotFoundError:
            return ["the log is not there any more"]


class Child:
    """A program that is kept running. It is started again, after a pause that doubles each time, when a signal has
    killed it or it has said by `START_AGAIN` that this mends it, at most `restarts` times in a row."""

    def __init__(self, program: Program, *, restarts: int, tidy: Callable[[], None]) -> None:
        """`tidy` ends what an earlier start has left, before the next one."""
        self.program, self._restarts, self._tidy = program, restarts, tidy
        self.done = False
        """It has ended with 0."""
        self.failure: str | None = None
        """Message about its last end, where it is not started again."""
        self.gave_up = False
        """It has ended for good only because it was started again too often."""
        self.exit_code: int | None = None
        """Its last exit code, or minus the number of the signal that killed it; None before it has ended."""
        self._num_in_a_row = 0
        self._start()

    def _start(self) -> None:
        program = self.program
        with program.log.open("ab") as log:
            self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                program.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**program.environment, PARENT_VAR: str(os.getpid())},
                start_new_session=True,
            )
        self._started_s = time.monotonic()
        if program.role == "teacher":  # which does not know of the run
            self._say("serving", pid=self._process.pid)

    @property
    def pid(self) -> int | None:
        """Id of its process; None while it waits to be started again."""
        return None if self._process is None else self._process.pid

    def look(self) -> None:
        """Takes notice of its end, and starts it again when its pause is over."""
        now_s = time.monotonic()
        if self.done or self.failure is not None:
            return
        if self._process is None:
            if now_s >= self._again_s:
                self._tidy()
                try:
                    self._start()
                except OSError as error:  # of its log, or of a machine without memory
                    self.failure = f"cannot be started again: {error}{removed(self.program.log)}"
        elif (status := self._process.poll()) is not None:
            self._has_ended(status, now_s)

    def _has_ended(self, status: int, now_s: float) -> None:
        if now_s - self._started_s >= STEADY_S:
            self._num_in_a_row = 0
        self.exit_code = status
        if status == 0 and not self.program.is_server:
            self.done = True
        elif not self._may_mend(status):
            self.failure = how(status) + removed(self.program.log)
        elif self._num_in_a_row >= self._restarts:
            self.gave_up = True
            often = f" after {self._restarts} restarts" if self._restarts else ""
            self.failure = how(status) + often + removed(self.program.log)
        else:
            pause_s = min(FIRST_PAUSE_S * 2.0**self._num_in_a_row, MAX_PAUSE_S)
            self._num_in_a_row += 1
            self._process, self._again_s = None, now_s + pause_s
            self._say(AWAY, pid=os.getpid(), message=how(status))  # so that nobody believes it gone
            often = f"({self._num_in_a_row} of {self._restarts})"
            told = f"{self.program.name} {how(status)}; it is started again in {pause_s:g} s {often}"
            print(told, file=sys.stderr, flush=True)

    def _may_mend(self, status: int) -> bool:
        """Returns whether another start may mend it."""
        if self.program.elsewhere:
            return status not in (0, *OWN_FAILURES)
        return status < 0 or status == START_AGAIN

    def has_ended(self) -> bool:
        """True where it has no process."""
        return self._process is None or self._process.poll() is not None

    def send(self, number: int) -> None:
        """Passes a signal to its process, if there is one."""
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """Ends its process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self.program.role == "teacher" and self.failure is None:
            self._say(FINISHED, pid=os.getpid())

    def _say(self, state: str, *, pid: int, message: str | None = None) -> None:
        if self.program.status is None:
            return
        with contextlib.suppress(OSError):  # a full disk, which is for others to complain of
            StatusFile(self.program.status, pid=pid).set(state, message=message)


def how(status: int) -> str:
    """Returns the message for a program that ended with this exit code, or by minus this signal."""
    if status >= 0:
        return f"ended with exit code {status}"
    number = -status
    return f"was killed by {signal.Signals(number).name if number in set(signal.Signals) else f'signal {number}'}"


def removed(log: Path) -> str:
    """The cause where a program's log is not there any more, to be appended: the folder that was removed, or the file.
    What the program said of it went with the log."""
    gone = [one for one in (log, *log.parents) if not one.exists()]
    if not gone:
        return ""
    return f": {gone[-1]} was removed meanwhile; the same command goes on with what is left, or begins again"


class Signals:
    """SIGINT and SIGTERM end this process while it is entered, and SIGUSR1 ends it with a checkpoint; once `collect` is
    called, they are only noted."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._collects = False

    def collect(self) -> None:
        """From now on somebody looks at `received`."""
        self._collects = True

    def __enter__(self) -> "Signals":
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        self._before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.received.append(signal.Signals(number))
        if not self._collects:
            os.write(2, f"ended by {signal.Signals(number).name}\n".encode())  # print may be what was interrupted
            raise SystemExit(128 + number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of a run, a good one where there is neither a failure nor a signal."""

    failed: Child | None = None
    """The program that failed for good first."""
    stopped_by: signal.Signals | None = None
    """The signal that told the launcher to end."""

    @property
    def exit_code(self) -> int:
        """0 done, 1 a program failed, 75 SIGUSR1, 76 a proof does not hold, 130 SIGINT, 143 SIGTERM."""
        if self.stopped_by is signal.SIGUSR1:
            return START_AGAIN
        if self.stopped_by is not None:
            return 128 + self.stopped_by
        if self.failed is None:
            return 0
        return PROOF_FAILED if self.failed.exit_code == PROOF_FAILED else 1


def run_programs(
    programs: Sequence[Program],
    *,
    restarts: int,
    signals: Signals,
    tick: Callable[[], None],
) -> Outcome:
    """Starts all programs, and returns when the orchestrator and the trainer are done, one has failed for good, or a
    signal has come, and none of them, nor anything that they started, is left. `tick` is called all the while."""
    signals.collect()
    _adopt_orphans(True)
    others = _children()
    running: list[Child] = []

    def tidy() -> None:
        _end_strays(keep=[*others, *(child.pid for child in running if child.pid is not None)])

    try:
        for program in programs:
            running.append(Child(program, restarts=restarts, tidy=tidy))
        outcome = _watch(running, signals, tick)
        if outcome.stopped_by is not None:
            told = f"{outcome.stopped_by.name}: ending the programs; once more kills them"
            print(told, file=sys.stderr, flush=True)
        return outcome
    finally:
        _end_all(running, signals, tick)
        _end_strays(keep=others)
        _adopt_orphans(False)


def _watch(children: Sequence[Child], signals: Signals, tick: Callable[[], None]) -> Outcome:
    while not signals.received:
        if all(child.done for child in children if not child.program.is_server):
            return Outcome()
        for child in children:
            child.look()
            if child.failure is not None:
                return Outcome(failed=child)
        tick()
        time.sleep(POLL_S)
    return Outcome(stopped_by=signals.received[0])


def _end_all(children: Sequence[Child], signals: Signals, tick: Callable[[], None]) -> None:
    """Ends what still runs by the signal that has come, or SIGTERM, and kills it after `GRACE_S`, or when one more
    comes. After SIGUSR1 the trainer ends first, with a checkpoint."""
    number = signals.received[0] if signals.received else signal.SIGTERM
    if number is signal.SIGUSR1:
        number, trainer = signal.SIGTERM, [child for child in children if child.program.role == "train"]
        _signal(trainer, signal.SIGUSR1, CHECKPOINT_S, signals, tick)
    _signal(children, number, GRACE_S, signals, tick)
    for child in children:
        child.kill()


def _signal(children: Sequence[Child], number: int, limit_s: float, signals: Signals, tick: Callable[[], None]) -> None:
    """Sends a signal, and returns when all have ended, the limit is over, or another signal has come."""
    num_received = len(signals.received)
    for child in children:
        child.send(number)
    give_up_s = time.monotonic() + limit_s
    while not all(child.has_ended() for child in children):
        if time.monotonic() > give_up_s or len(signals.received) > num_received:
            break
        tick()
        time.sleep(POLL_S)


def _adopt_orphans(adopt: bool) -> None:
    """True where a program's children become children of this process when it ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed; grpo needs Linux")


def _children() -> list[int]:
    return [process.pid for process in psutil.Process().children()]


def _end_strays(*, keep: Collection[int]) -> None:
    """Ends the children of this process but those in `keep`, and all below them."""
    deadline_s = time.monotonic() + STRAYS_S
    while strays := [child for child in psutil.Process().children() if child.pid not in keep]:
        if time.monotonic() > deadline_s:
            for stray in strays:  # what they leave is found by the next look
                with contextlib.suppress(psutil.NoSuchProcess):
                    stray.kill()
        psutil.wait_procs(strays, timeout=POLL_S)

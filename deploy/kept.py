"""A server that the run can do without for a while: it is started again when it ends."""

import contextlib
import signal
import socket
import sys
import time
from pathlib import Path

from deploy.processes import Child, Exit, Program
from transport.status import FAILED, FINISHED, StatusFile

FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
STEADY_S = 120.0
"""A server that has answered for so long is started again after the first pause, as if it had never ended."""
LOOK_S = 0.5
"""Between looking whether it answers."""
_PROBE_S = 0.1


class Kept:
    """A server behind a guard, as `Child` is. Its end counts as its end only before it has answered for the first time,
    and once it was told to end. After any other it is started again, after a pause that doubles from end to end; this
    is said on standard error, and in the status file, which this class writes in the server's stead."""

    def __init__(self, program: Program, *, lock: int, status: Path) -> None:
        """Starts `program`, which has an address; `lock` as for `Child`; `status` is its file in the run's folder."""
        if program.address is None:
            raise ValueError(f"{program.name} has no address, at which it could be seen to answer")
        self.program, self._address, self._lock, self._status_path = program, program.address, lock, status
        self.exit: Exit | None = None
        self.num_ends = 0
        """How often it has ended and was started again, or will be."""
        self._told = False
        self._has_answered, self._num_in_a_row = False, 0
        self._next_look_s = 0.0
        self._start(None)

    def poll(self) -> bool:
        """Takes notice of its end, and starts it again in time. True once it has ended for good, and everything that it
        started."""
        gone, ended = self._child.poll(), self._child.exit
        if ended is None:
            self._look()
            return gone
        if self._told or not self._has_answered:
            self.exit = ended
            self._say(FINISHED if self._told else FAILED, None if self._told else str(ended))
            return gone
        if self._again_at_s is None:
            self._wait(str(ended))
        elif gone and time.monotonic() >= self._again_at_s:
            self._start_again()
        return False

    def send(self, number: signal.Signals) -> None:
        """Tells it to end; it is not started again."""
        self._told = True
        self._child.send(number)

    def kill(self) -> None:
        """Ends it at once; it is not started again."""
        self._told = True
        self._child.kill()

    def close(self) -> None:
        """Releases what the launcher holds of it; it must have ended."""
        self._child.close()

    def log_tail(self, num_lines: int) -> str:
        """The last lines that it printed."""
        return self._child.log_tail(num_lines)

    # --- starting, and starting again ---

    def _start(self, why: str | None) -> None:
        self._child = Child(self.program, lock=self._lock)
        self._status = StatusFile(self._status_path, pid=self._child.pid)
        self._answers_since_s: float | None = None
        self._again_at_s: float | None = None
        self._say("starting", why)

    def _start_again(self) -> None:
        why = self._why()
        self._child.close()
        try:
            self._start(why)
        except OSError as error:  # such as no memory for another process: another time there may be
            self._wait(f"could not be started: {error}")

    def _look(self) -> None:
        """Whether it answers, from time to time until it does."""
        now_s = time.monotonic()
        if self._answers_since_s is not None:
            if self._num_in_a_row and now_s - self._answers_since_s >= STEADY_S:
                self._num_in_a_row = 0
            return
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + LOOK_S
        with contextlib.suppress(OSError):
            socket.create_connection(self._address, timeout=_PROBE_S).close()
            self._has_answered, self._answers_since_s = True, now_s
            self._say("serving", self._why())
            if self.num_ends:
                print(f"{self.program.name} serves again", file=sys.stderr, flush=True)

    def _wait(self, how: str) -> None:
        pause_s = min(FIRST_PAUSE_S * 2.0**self._num_in_a_row, MAX_PAUSE_S)
        self._num_in_a_row, self.num_ends = self._num_in_a_row + 1, self.num_ends + 1
        self._again_at_s = time.monotonic() + pause_s
        self._say("ended, to be started again", f"{self._why()}: {how}")
        message = f"{self.program.name} {how}; the run goes on, and it is started again in {pause_s:g} s"
        print(f"{message}; its log is {self.program.log}", file=sys.stderr, flush=True)

    def _why(self) -> str | None:
        """For the status file."""
        if not self.num_ends:
            return None
        return f"it has ended {times(self.num_ends)} by itself"

    def _say(self, state: str, message: str | None) -> None:
        with contextlib.suppress(OSError):  # a full disk, which is for others to complain of
            self._status.set(state, message=message)


def times(number: int) -> str:
    """`once`, `2 times`."""
    return "once" if number == 1 else f"{number} times"

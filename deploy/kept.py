"""A program of a run, which is started again after ends that the run can do without."""

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from deploy.processes import Child, Exit, Program
from deploy.restarts import AWAY, times
from transport.status import FAILED, FINISHED, StatusFile, read_status

FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
STEADY_S = 120.0
"""A program that has been up for so long is started again after the first pause, as if it had never ended."""
LOOK_S = 0.5
"""Between looking whether it is up."""
_PROBE_S = 0.1


def nothing() -> None:
    """The default of what is to be done before a program is started again."""


class Kept:
    """A program behind a guard, as `Child` is. Its end counts as its end before it was up for the first time, once it
    was told to end or the run is about to, and where its `again` does not mend it. After any other it is started again,
    after a pause that doubles from end to end; this is said on standard error, and in the status file, which this class
    writes in the program's stead.

    A server is up when it answers at its address, another program when it has said in which step it is.
    """

    def __init__(
        self,
        program: Program,
        *,
        lock: int,
        status: Path,
        tidy: Callable[[], None] = nothing,
        work_done: Callable[[], str | None] = lambda: None,
        whence: Callable[[], str] = lambda: "",
        overrule: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        """Starts `program`; `lock` as for `Child`; `status` is its file in the run's folder. `tidy` ends what an
        earlier start may have left. `work_done`: what is to be said where there is nothing left for the program to do,
        so that it has ended well, however it ended; None where there is. `whence` says from where it would go on, and
        `overrule` which settings do not hold there, as arguments."""
        self.program, self._lock, self._status_path = program, lock, status
        self._tidy, self._work_done, self._whence, self._overrule = tidy, work_done, whence, overrule
        self.exit: Exit | None = None
        self.away: Exit | None = None
        """How it has ended, while it waits to be started again."""
        self.num_ends = 0
        """How often it has ended and was started again, or will be."""
        self._told, self._held, self._has_been_up, self._num_in_a_row = False, False, False, 0
        self._start(program, None)

    @property
    def pid(self) -> int:
        """Process id of its guard, which lives as long as it does."""
        return self._child.pid

    def poll(self) -> bool:
        """Takes notice of its end. True once it has ended for good, and everything that it started."""
        gone, ended = self._child.poll(), self._child.exit
        if self.exit is not None:
            return gone
        if ended is None:
            self._look()
        elif self._told:
            self._end(self.away or ended)
        elif self.away is None:
            self._has_ended(ended)
        return gone and self.exit is not None

    def go_on(self) -> None:
        """Starts it again, where it has ended and its pause is over."""
        if self.away is None or self._held or time.monotonic() < self._again_at_s:
            return
        if self._child.poll():
            self._start_again(self.away)

    def hold(self) -> None:
        """The run is about to end: it is not started again, and its next end counts. One that is away stays so."""
        self._held = True

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

    # --- its end ---

    def _has_ended(self, ended: Exit) -> None:
        """It was not told to."""
        again, up = self.program.again, self._has_been_up or self._has_said_its_step()
        if again is None or not again.mends(ended) or not up:
            self._end(ended)
        elif (said := self._work_done()) is not None:
            print(f"{self.program.name} {ended} when its work was done{said}", file=sys.stderr, flush=True)
            self.exit = replace(ended, status=0)
            self._say(FINISHED, f"{ended} when its work was done", pid=self._child.pid, step=self._step())
        elif self._held:
            self._end(ended)
        else:
            self._return_after(ended, again.limit)

    def _end(self, ended: Exit) -> None:
        """For good. Whoever was told to end has not finished its work, but for a server, which has none to finish."""
        was_away, self.exit, self.away = self.away is not None, ended, None
        if (self._read() or {}).get("pid") not in (self._child.pid, os.getpid()):
            return  # the program has said it, or does not take part in the run yet
        if was_away and self._told:
            self._say(FAILED, f"{ended}, and was told to end before it was started again", pid=self._child.pid)
        elif self._told and self.program.address is not None:
            self._say(FINISHED, None, pid=self._child.pid)
        else:
            self._say(FAILED, f"{ended}{' when it was told to end' if self._told else ''}", pid=self._child.pid)

    def _return_after(self, ended: Exit, limit: int | None) -> None:
        if limit is not None and self.num_ends >= limit:
            often = f", after it had been started again {times(limit)}" if limit else ""
            self._end(replace(ended, note=ended.note + often))
            return
        pause_s = min(FIRST_PAUSE_S * 2.0**self._num_in_a_row, MAX_PAUSE_S)
        self._num_in_a_row, self.num_ends = self._num_in_a_row + 1, self.num_ends + 1
        self.away, self._again_at_s = ended, time.monotonic() + pause_s
        self._say(AWAY, f"{self._why()}: {ended}", pid=os.getpid())  # its own processes are gone
        often = "" if limit is None else f" ({self.num_ends} of {limit})"
        message = f"{self.program.name} {ended}; the run goes on, and it is started again in {pause_s:g} s{often}"
        print(f"{message}{self._whence()}; its log is {self.program.log}", file=sys.stderr, flush=True)

    # --- its starts ---

    def _start(self, program: Program, why: str | None) -> None:
        self._child = Child(program, lock=self._lock)
        self.away = None
        self._up_since_s: float | None = None
        self._again_at_s = self._next_look_s = 0.0
        if program.silent or why is not None:
            self._say("starting", why, pid=self._child.pid)

    def _start_again(self, ended: Exit) -> None:
        program, again = self.program, self.program.again
        assert again is not None
        self._child.close()
        self._tidy()
        try:
            if arguments := (*again.arguments, *self._overrule()):
                with program.log.open("a", encoding="utf-8") as log:
                    log.write(f"{program.name} {ended}; started again with {' '.join(arguments)}\n")
            self._start(replace(program, command=(*program.command, *arguments)), self._why())
        except OSError as error:  # such as no memory for another process: another time there may be
            self._return_after(replace(ended, note=f" and could not be started: {error}"), again.limit)

    def _look(self) -> None:
        """Whether it is up, from time to time until it is."""
        now_s = time.monotonic()
        if self._up_since_s is not None:
            if self._num_in_a_row and now_s - self._up_since_s >= STEADY_S:
                self._num_in_a_row = 0
            return
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + LOOK_S
        if self._answers() if self.program.address is not None else self._has_said_its_step():
            self._has_been_up, self._up_since_s = True, now_s
            if self.program.silent:
                self._say("serving", self._why() if self.num_ends else None, pid=self._child.pid)
            if self.num_ends:
                does = "serves" if self.program.address is not None else "works"
                print(f"{self.program.name} {does} again", file=sys.stderr, flush=True)

    def _answers(self) -> bool:
        assert self.program.address is not None
        try:
            socket.create_connection(self.program.address, timeout=_PROBE_S).close()
        except OSError:
            return False
        return True

    def _has_said_its_step(self) -> bool:
        return self.program.address is None and self._step() is not None

    # --- the status file ---

    def _why(self) -> str:
        return f"it has ended {times(self.num_ends)} by itself"

    def _say(self, state: str, message: str | None, *, pid: int, step: int | None = None) -> None:
        with contextlib.suppress(OSError):  # a full disk, which is for others to complain of
            StatusFile(self._status_path, pid=pid).set(state, step=step, message=message)

    def _step(self) -> int | None:
        step = (self._read() or {}).get("step")
        return step if isinstance(step, int) else None

    def _read(self) -> dict[str, object] | None:
        with contextlib.suppress(OSError):
            return read_status(self._status_path)
        return None

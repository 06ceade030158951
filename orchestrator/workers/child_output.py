"""What user code prints goes to the log, but not without end: `python child_output.py` between a pipe and a file.

A process of its own, which imports nothing of ours: what was printed before a crash still arrives.
"""

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable

BYTES_PER_S = 64 << 10
BURST_BYTES = 256 << 10
CHUNK_BYTES = 64 << 10
LINGER_S = 1.0
"""After the process has ended, for what it printed; others that hold its output open are not waited for."""


class Allowance:
    """How much of an output may pass: `burst` at once, then `rate` a second."""

    def __init__(
        self,
        *,
        rate: float = BYTES_PER_S,
        burst: int = BURST_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._left, self._at_s = float(burst), clock()
        self.num_left_out = 0
        """Bytes that did not pass since the last notice."""

    def take(self, data: bytes) -> bytes:
        """What passes of it. Once something was left out, nothing passes until a notice has said so."""
        self._refill()
        passes = 0 if self.num_left_out else min(len(data), int(self._left))
        self._left -= passes
        self.num_left_out += len(data) - passes
        return data[:passes]

    def notice(self) -> bytes:
        """What says how much was left out, once half of a burst may pass again; empty where there is nothing to say."""
        self._refill()
        return self.last_notice() if self._left >= self._burst / 2 else b""

    def last_notice(self) -> bytes:
        """The same, whatever may pass."""
        num, self.num_left_out = self.num_left_out, 0
        return f"\n[{num} bytes of output left out: more than {self._rate:.0f} a second]\n".encode() if num else b""

    def _refill(self) -> None:
        now_s = self._clock()
        self._left = min(float(self._burst), self._left + (now_s - self._at_s) * self._rate)
        self._at_s = now_s


def forward(source: int, target: int, owner: int, allowance: Allowance) -> None:
    """Reads `source` until its end, or until the process of the descriptor `owner` has ended and `LINGER_S` are over;
    writes what passes to `target`."""
    poll = select.poll()
    poll.register(source, select.POLLIN)
    poll.register(owner, select.POLLIN)
    deadline_s = float("inf")
    while time.monotonic() < deadline_s:
        ready = {descriptor for descriptor, _ in poll.poll(500 if allowance.num_left_out else _ms_until(deadline_s))}
        if owner in ready:
            poll.unregister(owner)
            deadline_s = time.monotonic() + LINGER_S
        _write(target, allowance.notice())
        if source in ready:
            if not (data := os.read(source, CHUNK_BYTES)):
                break
            _write(target, allowance.take(data))
    _write(target, allowance.last_notice())


def limit_output() -> int:
    """From now on what this process and its children print passes through a process that limits it. Returns a
    descriptor of the standard error as it was."""
    source, sink = os.pipe()
    owner, error = os.pidfd_open(os.getpid()), os.dup(2)
    try:
        subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(source), str(owner)],
            stdin=subprocess.DEVNULL,
            stdout=error,
            stderr=error,
            pass_fds=(source, owner),
            start_new_session=True,  # it outlives this one's process group, for as long as `forward` says
        ).returncode = 0  # nobody waits for it
        os.dup2(sink, 1)
        os.dup2(sink, 2)
    finally:
        for descriptor in (source, sink, owner):
            os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return error


def _ms_until(deadline_s: float) -> int | None:
    return None if deadline_s == float("inf") else max(0, round(1000 * (deadline_s - time.monotonic())))


def _write(target: int, data: bytes) -> None:
    """As far as anybody reads it: what cannot be logged is no reason to stop those who print."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(target, data) :]


if __name__ == "__main__":
    forward(int(sys.argv[1]), 1, int(sys.argv[2]), Allowance())

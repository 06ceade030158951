"""When a provider may be asked. Nothing here waits: whoever asks is told how long to."""

import random
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds, from any beginning, never backwards."""


class TokenBucket:
    """At most `burst` requests at once, and `per_s` in the long run.

    With the interval T = 1 / per_s, a request at t is due at a = max(t, a), waits until a − (burst − 1) · T, and makes
    the next one due at a + T: the generic cell rate algorithm (ITU-T I.371, "virtual scheduling"), which is a bucket of
    `burst` tokens that fills at `per_s`. Example: ``TokenBucket(2.0, burst=4, clock=time.monotonic)``
    """

    def __init__(self, per_s: float, *, burst: int, clock: Clock) -> None:
        if not per_s > 0 or burst < 1:
            raise ValueError(f"a rate of {per_s} a second with bursts of {burst}, expected above 0 and at least 1")
        self._interval_s, self._clock = 1.0 / per_s, clock
        self._slack_s = (burst - 1) * self._interval_s
        self._due_s = clock()

    @property
    def wait_s(self) -> float:
        """How long whoever takes a token now has to wait."""
        return max(0.0, self._due_s - self._slack_s - self._clock())

    def take(self) -> float:
        """Takes a token; returns how long to wait before it may be used."""
        wait_s = self.wait_s
        self._due_s = max(self._due_s, self._clock()) + self._interval_s
        return wait_s

    def hold(self, seconds: float) -> None:
        """The provider wants no request for so long, and then one after the other."""
        self._due_s = max(self._due_s, self._clock() + seconds + self._slack_s)


class Rest:
    """A provider that failed `after` times in a row rests, and is then tried with one question at a time; each time
    that fails, it rests twice as long, up to `MAX_TIMES` as long (Nygard 2007, "Release It!", the circuit breaker).

    Example: ``Rest(after=5, cooldown_s=60.0, clock=time.monotonic)``
    """

    MAX_TIMES = 16

    def __init__(self, *, after: int, cooldown_s: float, clock: Clock) -> None:
        if after < 1 or not cooldown_s > 0:
            raise ValueError(f"a rest of {cooldown_s} s after {after} failures, expected above 0 s and at least 1")
        self._after, self._rest_s, self._clock = after, cooldown_s, clock
        self._num_failed = self._num_rests = self._era = 0
        """Failures in a row; rests in a row; rests ever."""
        self._until_s: float | None = None
        self._trying = False

    @property
    def resting(self) -> bool:
        """Whether it failed so often that it rests, or is being tried again."""
        return self._until_s is not None

    def begin(self) -> int | None:
        """A number with which the question's `end` is told; None where none may be asked now."""
        if self._until_s is not None:
            if self._trying or self._clock() < self._until_s:
                return None
            self._trying = True
        return self._era

    def end(self, begun: int, well: bool | None) -> None:
        """A question was answered well or not, or, None, taught nothing of the provider. What was asked before the
        newest rest has no say any more."""
        if begun != self._era:
            return
        self._trying = False
        if well:
            self._num_failed = self._num_rests = 0
            self._until_s = None
        elif well is False:
            self._num_failed += 1
            if self._num_failed >= self._after:
                times = min(2 ** min(self._num_rests, 10), self.MAX_TIMES)
                self._until_s = self._clock() + self._rest_s * times
                self._num_rests += 1
                self._era += 1


def pause_s(tries: int, *, first_s: float, most_s: float, draw: random.Random) -> float:
    """Before another try, after `tries` of them: d/2 + u · d/2 with d = min(most, first · 2^(tries − 1)) and u uniform
    in [0, 1) ("equal jitter", Brooker 2015, "Exponential Backoff And Jitter", AWS Architecture Blog)."""
    full_s = min(most_s, first_s * 2.0 ** min(tries - 1, 30))
    return full_s / 2 + draw.random() * full_s / 2

"""How many groups may be in flight at once: follows what the servers say about themselves, between two bounds."""

from collections.abc import Sequence

from transport.http import ServerLoad

MOST_WAITING = 0.1
"""Requests that wait, as a share of those that run, up to which a server is not crowded: a few keep it busy."""
MOST_KV_USE = 0.95
"""Share of the KV cache in use from which a server is crowded: it begins to preempt what it has started."""
INCREASE, DECREASE = 0.05, 0.85
"""Share of the limit by which it grows, and what it is multiplied by where it shrinks."""


def crowded(load: ServerLoad) -> bool:
    """Returns whether more requests would only wait, or push others out."""
    return load.num_waiting > MOST_WAITING * load.num_running or load.kv_use >= MOST_KV_USE


class Concurrency:
    """Additive increase, multiplicative decrease: the limit grows by a twentieth while it is what holds groups back
    and no server is crowded, and shrinks at once where one is.

    Waits for nothing and reads no clock: `observe` is called once for each round of the servers' answers, and those
    should be at least as far apart as a change of the limit takes to show.
    """

    def __init__(self, *, least: int, most: int) -> None:
        """Bounds of the limit, in groups. It begins at `least`."""
        if not 1 <= least <= most:
            raise ValueError(f"bounds of concurrency are {least} and {most}, expected 1 <= least <= most")
        self._least, self._most = least, most
        self._limit = float(least)

    @property
    def limit(self) -> int:
        """Groups that may be in flight."""
        return int(self._limit)

    def observe(self, loads: Sequence[ServerLoad], *, num_in_flight: int) -> int:
        """The limit, now that the servers have said this while `num_in_flight` groups were in flight. Without any
        answer it stays as it is."""
        if any(crowded(load) for load in loads):
            self._limit = max(float(self._least), self._limit * DECREASE)
        elif loads and num_in_flight >= self.limit:
            self._limit = min(float(self._most), self._limit + max(1.0, INCREASE * self._limit))
        return self.limit

"""Asks the servers how they are, keeps what they say about their load, and says how many groups they can take."""

import asyncio
import statistics
from collections.abc import Callable, Sequence

from orchestrator.inference.client import InferenceClient, ServerError, Unreachable
from transport.http import ServerInfo, ServerLoad

MOST_WAITING = 0.1
"""Requests that wait, as a share of those that run, up to which a server is not crowded: a few keep it busy."""
MOST_KV_USE = 0.95
"""Share of the KV cache in use from which a server is crowded: it begins to preempt what it has started."""
INCREASE, DECREASE = 0.05, 0.85
"""Share of the limit by which it grows, and what it is multiplied by where it shrinks."""


class Concurrency:
    """How many groups may be in flight at once: additive increase, multiplicative decrease. The limit grows by a
    twentieth while it is what holds groups back and no server is crowded, and shrinks at once where one is.

    Waits for nothing and reads no clock: `observe` is called once for each round of the servers' answers, and those
    should be at least as far apart as a change of the limit takes to show.
    """

    def __init__(self, *, least: int, most: int) -> None:
        """Bounds of the limit, in groups. It begins at `least`."""
        if not 1 <= least <= most:
            raise ValueError(f"bounds of concurrency are {least} and {most}, expected 1 <= least <= most")
        self._least, self._most, self._limit = least, most, float(least)

    @property
    def limit(self) -> int:
        """Groups that may be in flight."""
        return int(self._limit)

    def observe(self, loads: Sequence[ServerLoad], *, num_in_flight: int) -> int:
        """The limit, now that the servers have said this while `num_in_flight` groups were in flight. Without any
        answer it stays as it is."""
        if any(load.num_waiting > MOST_WAITING * load.num_running or load.kv_use >= MOST_KV_USE for load in loads):
            self._limit = max(float(self._least), self._limit * DECREASE)
        elif loads and num_in_flight >= self.limit:
            self._limit = min(float(self._most), self._limit + max(1.0, INCREASE * self._limit))
        return self.limit


class Health:
    """Asks every server in the routing again and again. One that falls silent is abandoned; what the others say about
    their load is handed on, round by round, and kept for the metrics of a step."""

    def __init__(self, client: InferenceClient, *, interval_s: float, timeout_s: float) -> None:
        """`interval_s` between two questions; `timeout_s` without an answer is silence."""
        self._client, self._pool = client, client.pool
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self._asked: dict[str, asyncio.Task[None]] = {}
        self._answers: dict[str, ServerLoad] = {}
        self._newest: dict[str, ServerLoad] = {}
        self._rounds: list[tuple[ServerLoad, ...]] = []

    async def watch(self, observe: Callable[[Sequence[ServerLoad]], None]) -> None:
        """Consumes: the servers' answers. Waits for: the clock. Unblocked by: it. Ends when: it is cancelled. A server
        that is slow to answer holds up no other: `observe` gets, once in the interval, the loads of those that have
        answered since the last time, if any."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._asked = {server: task for server, task in self._asked.items() if not task.done()}
                for server in self._pool.routed:
                    if server not in self._asked:
                        self._asked[server] = group.create_task(self._ask(server))
                await asyncio.sleep(self._interval_s)
                if self._answers:
                    answers, self._answers = self._answers, {}
                    newest = self._newest | answers
                    self._newest = {server: newest[server] for server in self._pool.routed if server in newest}
                    self._rounds.append(tuple(self._newest.values()))
                    observe(tuple(answers.values()))

    def metrics(self) -> dict[str, float]:
        """Of the rounds since the last call, or of the newest where there was none since; nothing before the first. A
        server counts with the newest that it has said."""
        if not (rounds := self._rounds):
            return {}
        self._rounds = rounds[-1:]
        return {
            "perf/servers": float(len(self._pool.routed)),
            "perf/server_running": statistics.fmean(sum(load.num_running for load in loads) for loads in rounds),
            "perf/server_waiting": statistics.fmean(sum(load.num_waiting for load in loads) for loads in rounds),
            "perf/server_kv_use": max((load.kv_use for loads in rounds for load in loads), default=0.0),
        }

    async def _ask(self, server: str) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                info = await self._reached(server)
        except TimeoutError:
            self._client.abandon(server, f"no answer within client.health_timeout_s = {self._timeout_s:g} s")
        except ServerError as error:
            self._pool.eject(server, str(error))
        else:
            if info.load is not None:
                self._answers[server] = info.load

    async def _reached(self, server: str) -> ServerInfo:
        while True:
            try:
                return await self._client.info(server)
            except Unreachable as error:
                self._pool.eject(server, str(error))
                await asyncio.sleep(self._interval_s)

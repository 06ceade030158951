"""Asks the servers how they are, and keeps what they say about their load."""

import asyncio
import statistics

from orchestrator.inference.client import InferenceClient, ServerError, Unreachable
from transport.http import ServerInfo, ServerLoad


class Health:
    """Asks every server in the routing again and again. One that falls silent is abandoned; what the others say about
    their load is kept, round by round, for the metrics of a step."""

    def __init__(self, client: InferenceClient, *, interval_s: float, timeout_s: float) -> None:
        """`interval_s` between two questions; `timeout_s` without an answer is silence."""
        self._client, self._pool = client, client.pool
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self._asked: dict[str, asyncio.Task[None]] = {}
        self._answers: dict[str, ServerLoad] = {}
        self._newest: dict[str, ServerLoad] = {}
        self._rounds: list[tuple[ServerLoad, ...]] = []

    async def watch(self) -> None:
        """Consumes: the servers' answers. Waits for: the clock. Unblocked by: it. Ends when: it is cancelled. A server
        that is slow to answer holds up no other."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._asked = {server: task for server, task in self._asked.items() if not task.done()}
                for server in self._pool.routed:
                    if server not in self._asked:
                        self._asked[server] = group.create_task(self._ask(server))
                await asyncio.sleep(self._interval_s)
                if self._answers:
                    newest, self._answers = self._newest | self._answers, {}
                    self._newest = {server: newest[server] for server in self._pool.routed if server in newest}
                    self._rounds.append(tuple(self._newest.values()))

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

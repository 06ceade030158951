"""Servers and trainer take turns at a device's memory (`sleep_mode`): the servers rest while the trainer steps."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from orchestrator.client import Refused, ServerError, ServerPool, Unreachable

log = logging.getLogger(__name__)

REST_TIMEOUT_S = 30.0
"""What requests that a server has from others may take to end; then it does not rest in this step."""
WAKE_TIMEOUT_S = 30.0
"""In which a server that does not get its memory back tries again; then it is taken out of the routing."""
WAKE_PAUSE_S = 0.1
CHANGE_TIMEOUT_S = 150.0
"""What falling asleep or waking may take, once it has begun. More than the `canary_timeout_s` (120 s) of grpo-infer,
after which the server itself says what has failed."""
ENDS_THE_RUN = {"cannot_rest", "stale_run"}
"""Kinds of refusals that no later step would end otherwise; so does status 401."""


class _Rested(msgspec.Struct):
    rested: bool
    freed_bytes: int
    rest_s: float


class _Woken(msgspec.Struct):
    woken: bool
    wake_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rest:
    """Of one server. Example: ``_Rest(admission=0, began_s=1764.2, freed_bytes=2147483648)``"""

    admission: int
    """Of the server to the routing: one that was admitted again has been restarted."""
    began_s: float
    """Wall clock, seconds since 1970."""
    freed_bytes: int


class Turns:
    """Whose turn it is. While it is the trainer's, requests to the servers wait, so that none of ours wakes one."""

    def __init__(
        self,
        servers: ServerPool,
        *,
        run_id: str,
        rested: Callable[[str, float, float, int], None] = lambda server, start_s, end_s, step: None,
    ) -> None:
        """`rested` is told of each server's rest that is over: its begin and end on the wall clock, and the step."""
        self._servers, self._members, self._run_id, self._rested = servers, servers.membership, run_id, rested
        self._resting: dict[str, _Rest] = {}
        self._step = 0
        self.falling_asleep: frozenset[str] = frozenset()
        """Servers that are waited for."""
        self.waking: frozenset[str] = frozenset()
        """Likewise."""

    async def to_trainer(self, step: int) -> dict[str, float]:
        """Lets all servers in the routing rest before batch `step` leaves; to be called when nothing of ours is in
        flight but what can wait. One that does not, whatever the reason, goes on. Metrics of the step. Raises Refused
        for a server that never will: it cannot rest, has another run's versions or another key."""
        self._servers.hold()
        self._step, servers, started_s = step, self._members.routed, time.monotonic()
        self.falling_asleep = frozenset(servers)
        found = await asyncio.gather(*(self._rest(server) for server in servers))
        self._resting = {server: rest for server, rest in zip(servers, found, strict=True) if rest is not None}
        return {
            "perf/rested": len(self._resting) / max(1, len(servers)),
            "perf/rest_freed_bytes": float(sum(rest.freed_bytes for rest in self._resting.values())),
            "time/rest_s": time.monotonic() - started_s,
        }

    async def to_servers(self) -> dict[str, float]:
        """Wakes all servers, before the version of the step that was trained is loaded; those that are awake stay so.
        Metrics of the step."""
        started_s, resting = time.monotonic(), self._resting
        servers, self._resting = self._members.routed, {}
        self.waking = frozenset(servers)
        same = [s for s in servers if s in resting and self._members.admission(s) == resting[s].admission]
        woken = dict(zip(servers, await asyncio.gather(*map(self._wake, servers)), strict=True))
        for server, rest in resting.items():
            self._rested(server, rest.began_s, time.time(), self._step)
        if early := [server for server in same if woken[server] is False]:
            log.warning(
                "somebody's request woke %s as the trainer stepped; in sleep_mode only the run may ask its servers",
                ", ".join(early),
            )
        self._servers.release()
        return {"perf/woken_early": float(len(early)), "time/wake_s": time.monotonic() - started_s}

    async def _rest(self, server: str) -> _Rest | None:
        """None where it does not rest."""
        timeout_s = min(REST_TIMEOUT_S, self._servers.timeout_s / 2)
        began_s, admission = time.time(), self._members.admission(server)
        try:
            answer = await self._servers.change(
                server,
                "/policy/rest",
                _Rested,
                within_s=timeout_s + CHANGE_TIMEOUT_S,
                run_id=self._run_id,
                timeout_s=timeout_s,
            )
        except ServerError as error:
            if _ends_the_run(error):
                raise
            if isinstance(error, Unreachable) and error.gone:
                self._members.take_out(server, str(error))
            else:
                log.warning("batch %d leaves while %s does not rest: %s", self._step, server, error)
        else:
            return _Rest(admission=admission, began_s=began_s, freed_bytes=answer.freed_bytes)
        finally:
            self.falling_asleep -= {server}
        return None

    async def _wake(self, server: str) -> bool | None:
        """Whether it had rested until now; None where it is taken out of the routing, or fails in a way that the next
        request to it will tell."""
        deadline_s = time.monotonic() + WAKE_TIMEOUT_S
        try:
            while True:
                try:
                    answer = await self._servers.change(server, "/policy/wake", _Woken, within_s=CHANGE_TIMEOUT_S)
                    return answer.woken
                except Unreachable as error:
                    if error.gone or time.monotonic() > deadline_s:
                        self._members.take_out(server, str(error))
                        return None
                await asyncio.sleep(WAKE_PAUSE_S)
        except ServerError as error:
            if _ends_the_run(error):
                raise
            log.warning("%s is not woken before version %d is loaded: %s", server, self._step, error)
            return None
        finally:
            self.waking -= {server}


def _ends_the_run(error: ServerError) -> bool:
    return isinstance(error, Refused) and (error.status == 401 or error.kind in ENDS_THE_RUN)

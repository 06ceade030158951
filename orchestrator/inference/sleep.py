"""Sleep mode: the servers sleep while the trainer makes a step, so that it has their memory."""

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec
from grpo.orchestrator.inference.client import PolicyClient, ServerError, Unreachable

TIMEOUT_S = 150.0
"""Deadline for falling asleep or waking: more than the server's own limit (`canary_timeout_s`, 120 s), so that the
server can say what went wrong."""
OUT_TIMEOUT_S = 5.0
"""Deadline for a server that is out of the routing."""


class _Changed(msgspec.Struct):
    seconds: float


class SleepScheduler:
    """Puts the servers to sleep before a batch leaves, and wakes them before its version is loaded. In between,
    requests of this run wait (`PolicyClient.hold`)."""

    def __init__(
        self,
        client: PolicyClient,
        *,
        slept: Callable[[str, float, float, int], None] = lambda server, start_s, end_s, step: None,
    ) -> None:
        """`slept` gets each server that has slept, its start and end on the wall clock, and the step."""
        self._client, self._slept = client, slept
        self._asleep: tuple[list[str], float, int] = ([], 0.0, 0)
        """Servers that sleep, since when, and in which step."""
        self.waits_for: str | None = None
        """What the scheduler waits for and from which servers; None while it waits for nothing."""

    async def sleep(self, step: int) -> dict[str, float]:
        """Called before batch `step` leaves, when no request of this run is in flight. Returns metrics. Raises
        ServerError where a server that is there cannot sleep."""
        self._client.hold()
        started_s = time.monotonic()
        slept = await self._all(self._client.pool.routed, "/policy/sleep", "fall asleep")
        self._asleep = slept, time.time(), step
        return {"time/sleep_s": time.monotonic() - started_s}

    async def wake(self) -> dict[str, float]:
        """Called before the version of the step is loaded. Without effect on servers that are awake. Returns metrics.
        Raises ServerError where a server that is there cannot wake."""
        started_s = time.monotonic()
        await self._all(self._client.pool.servers, "/policy/wake", "wake up")
        servers, since_s, step = self._asleep
        for server in servers:
            self._slept(server, since_s, time.time(), step)
        self._asleep = [], 0.0, 0
        self._client.release()
        return {"time/wake_s": time.monotonic() - started_s}

    async def _all(self, servers: Sequence[str], path: str, what: str) -> list[str]:
        """The servers that have changed. One of the routing that is gone is ejected; one that was out may be back and
        asleep."""

        async def one(server: str) -> list[str]:
            routed = server in self._client.pool.routed
            within_s = TIMEOUT_S if routed else OUT_TIMEOUT_S
            try:
                await self._client.once(server, "POST", path, _Changed, within_s=within_s)
            except ServerError as error:
                if routed and not (isinstance(error, Unreachable) and error.gone):
                    raise
                self._client.pool.eject(server, str(error))
                return []
            return [server]

        self.waits_for = f"inference servers, to {what}: {', '.join(servers)}"
        try:
            return [server for changed in await asyncio.gather(*map(one, servers)) for server in changed]
        finally:
            self.waits_for = None
